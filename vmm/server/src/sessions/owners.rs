//! Sessions of the owners that machines know by number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::Owner;

/// A session, as it is shown with its probes and pauses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// Owner, as the client stated it.
    pub(crate) owner: Arc<str>,
    /// Id of the session.
    pub(crate) session: Arc<str>,
}

/// Sessions of a server, by owner number. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners(Arc<Mutex<BTreeMap<Owner, Named>>>);

impl Owners {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Owner, Named>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Returns the session of `owner`, if it still exists.
    pub(crate) fn get(&self, owner: Owner) -> Option<Named> {
        self.lock().get(&owner).cloned()
    }

    /// Assigns `owners` to `session`.
    pub(crate) fn name(&self, owners: impl IntoIterator<Item = Owner>, session: &Named) {
        let named = owners.into_iter().map(|owner| (owner, session.clone()));
        self.lock().extend(named);
    }

    /// Removes `owners`.
    pub(crate) fn forget(&self, owners: impl IntoIterator<Item = Owner>) {
        let mut all = self.lock();
        for owner in owners {
            all.remove(&owner);
        }
    }
}
