//! Who the owners are that machines know by number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::Owner;

/// A session, as it is shown with what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// Who its client said to be.
    pub(crate) owner: Arc<str>,
    /// Its id.
    pub(crate) session: Arc<str>,
}

/// The sessions of a server that have anything, by the numbers that machines know. Copies are the same.
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

    /// The session that `owner` stands for, if it is still there.
    pub(crate) fn get(&self, owner: Owner) -> Option<Named> {
        self.lock().get(&owner).cloned()
    }

    /// `owners` stand for `session` from now on.
    pub(crate) fn name(&self, owners: impl IntoIterator<Item = Owner>, session: &Named) {
        let named = owners.into_iter().map(|owner| (owner, session.clone()));
        self.lock().extend(named);
    }

    /// `owners` stand for nobody any more.
    pub(crate) fn forget(&self, owners: impl IntoIterator<Item = Owner>) {
        let mut all = self.lock();
        for owner in owners {
            all.remove(&owner);
        }
    }
}
