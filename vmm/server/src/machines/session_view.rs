//! Implements [`Place`], the view that sessions have of a machine.

use hvprobe_machine::{LetGo, Owner};
use tonic::Status;

use super::handle::Handle;
use crate::sessions::keeper::Place;

impl Place for Handle {
    fn number(&self) -> u64 {
        self.number
    }

    fn name(&self) -> &str {
        self.name()
    }

    fn is_there(&self) -> bool {
        self.is_live()
    }

    fn has(&self, owner: Owner) -> bool {
        self.port().is_ok_and(|port| port.belongs_to(owner))
    }

    async fn let_go(&self, owners: Vec<Owner>) -> Result<LetGo, Status> {
        let Ok(port) = self.port() else {
            return Ok(LetGo::default());
        };
        let let_go = match port.let_go(owners).await {
            Ok(Some(let_go)) => let_go,
            Ok(None) => return Ok(LetGo::default()),
            // The error does not matter: the machine has ended meanwhile, and its probes and pauses with it.
            Err(_) if !self.is_there() => return Ok(LetGo::default()),
            Err(error) => return Err(error),
        };
        self.touch();
        Ok(let_go)
    }
}
