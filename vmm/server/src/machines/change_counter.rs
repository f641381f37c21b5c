//! Changes of the machines, and their order.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts the changes of all machines of a server. Clones share the counter.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangeCounter(Arc<watch::Sender<u64>>);

impl ChangeCounter {
    /// Counts a change, and calls `mark` with its number before any follower is notified. Later changes have
    /// greater numbers.
    pub(crate) fn publish(&self, mark: impl FnOnce(u64)) {
        self.0.send_modify(|number| {
            *number = number.saturating_add(1);
            mark(*number);
        });
    }

    /// Follows the changes from now on. A slow follower sees several changes as one.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}
