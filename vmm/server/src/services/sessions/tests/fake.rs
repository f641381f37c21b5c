//! A fake machine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use hvprobe_machine::{LetGo, Owner};
use tokio::time::sleep;

use super::*;

/// State of a fake machine.
#[derive(Debug, Default)]
pub(super) struct Inside {
    pub(super) probes: BTreeMap<Owner, usize>,
    pub(super) paused_by: BTreeSet<Owner>,
    pub(super) has_ended: bool,
    /// Number of further attempts to clean it up that fail.
    pub(super) fails: u32,
    /// Whether it is being cleaned up.
    busy: bool,
    /// Number of finished attempts to clean it up, including those that failed.
    pub(super) stops: u32,
}

/// A machine on which everything is done at once, except that its clean-up takes a while.
#[derive(Clone, Debug, Default)]
pub(super) struct Fake(u64, Arc<Mutex<Inside>>);

impl Fake {
    pub(super) fn new(number: u64) -> Self {
        Self(number, Arc::default())
    }

    pub(super) fn inside(&self) -> MutexGuard<'_, Inside> {
        self.1.lock().unwrap()
    }

    pub(super) fn has_nothing(&self) -> bool {
        let inside = self.inside();
        inside.probes.is_empty() && inside.paused_by.is_empty()
    }
}

impl Place for Fake {
    fn number(&self) -> u64 {
        self.0
    }

    fn name(&self) -> &str {
        "fake"
    }

    fn is_there(&self) -> bool {
        !self.inside().has_ended
    }

    fn has(&self, owner: Owner) -> bool {
        let inside = self.inside();
        inside.probes.contains_key(&owner) || inside.paused_by.contains(&owner)
    }

    async fn let_go(&self, owners: Vec<Owner>) -> Result<LetGo, Status> {
        assert!(
            !std::mem::replace(&mut self.inside().busy, true),
            "one at a time"
        );
        sleep(Duration::from_millis(20)).await;
        let mut inside = self.inside();
        inside.busy = false;
        inside.stops += 1;
        if inside.fails > 0 {
            inside.fails -= 1;
            return Err(Status::internal("a virtual CPU does not stop"));
        }
        let was_paused = !inside.paused_by.is_empty();
        let mut let_go = LetGo::default();
        for owner in owners {
            if let Some(count) = inside.probes.remove(&owner) {
                let_go.probes.insert(owner, count);
            }
            inside.paused_by.remove(&owner);
        }
        let_go.resumed = was_paused && inside.paused_by.is_empty();
        Ok(let_go)
    }
}
