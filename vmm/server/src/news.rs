//! That something about the machines has changed, and in which order.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts the changes of all machines of a server. Copies are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct News(Arc<watch::Sender<u64>>);

impl News {
    /// Something has changed; `mark` is called with its number before anybody is told. A later change has
    /// a greater one.
    pub(crate) fn tell(&self, mark: impl FnOnce(u64)) {
        self.0.send_modify(|number| {
            *number = number.saturating_add(1);
            mark(*number);
        });
    }

    /// Is told of every change from now on, of several at once if it is slow.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}
