//! Implements [`Place`], the view that sessions have of a machine.

use hvprobe_engine::{ChangeError, StopError};
use hvprobe_machine::{LetGo, Owner};
use tonic::Status;

use super::handle::Handle;
use crate::sessions::keeper::Place;
use crate::status::change_error;

impl Place for Handle {
    fn number(&self) -> u64 {
        self.number
    }

    fn name(&self) -> &str {
        self.name()
    }

    fn is_there(&self) -> bool {
        self.machine().is_ok()
    }

    fn has(&self, owner: Owner) -> bool {
        self.machine()
            .is_ok_and(|machine| machine.belongs_to(owner))
    }

    async fn let_go(&self, owners: Vec<Owner>) -> Result<LetGo, Status> {
        if !self.is_there() {
            return Ok(LetGo::default());
        }
        let released = self.blocking(move |machine| machine.let_go(&owners)).await;
        let let_go = match released {
            Ok(Err(ChangeError::Stop(StopError::Ended))) => return Ok(LetGo::default()),
            Ok(let_go) => let_go.map_err(|error| change_error(self.name(), &error))?,
            // The machine has ended in between.
            Err(_) if !self.is_there() => return Ok(LetGo::default()),
            Err(broken) => return Err(broken),
        };
        self.touch();
        Ok(let_go)
    }
}
