//! Announces new machines to subscribers.
//!
//! Invariant: an announcement never waits. A subscriber that is more than [`KEPT`] announcements behind gets
//! [`Behind`] instead of those that it missed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast::{Receiver, Sender, channel, error::RecvError};

/// Number of announcements that are kept for a slow subscriber.
const KEPT: usize = 64;

/// Sender of announcements; `None` once closed.
#[derive(Debug)]
pub(crate) struct Arrivals<T>(Mutex<Option<Sender<T>>>);

impl<T: Clone> Default for Arrivals<T> {
    fn default() -> Self {
        let (to, _) = channel(KEPT);
        Self(Mutex::new(Some(to)))
    }
}

impl<T: Clone> Arrivals<T> {
    /// Announces `it` to all subscribers.
    pub(crate) fn announce(&self, it: &T) {
        if let Some(to) = &*self.to() {
            // An error means only that there is no subscriber.
            let _ = to.send(it.clone());
        }
    }

    /// Subscribes to the announcements from now on.
    pub(crate) fn follow(&self) -> Arriving<T> {
        let to = self.to();
        // A channel without a sender ends at once.
        let from = match &*to {
            Some(to) => to.subscribe(),
            None => channel(1).1,
        };
        Arriving(from)
    }

    /// Ends all subscriptions.
    pub(crate) fn close(&self) {
        *self.to() = None;
    }

    fn to(&self) -> MutexGuard<'_, Option<Sender<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A subscription to announcements.
#[derive(Debug)]
pub(crate) struct Arriving<T>(Receiver<T>);

/// A subscriber was too slow and missed announcements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Behind;

impl<T: Clone> Arriving<T> {
    /// Returns the next announcement; `None` after [`Arrivals::close`].
    pub(crate) async fn next(&mut self) -> Result<Option<T>, Behind> {
        match self.0.recv().await {
            Ok(it) => Ok(Some(it)),
            Err(RecvError::Closed) => Ok(None),
            Err(RecvError::Lagged(_)) => Err(Behind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_are_announced_in_order_until_the_end() {
        let arrivals = Arrivals::default();
        arrivals.announce(&1);
        let mut arriving = arrivals.follow();
        arrivals.announce(&2);
        arrivals.announce(&3);
        arrivals.close();
        arrivals.announce(&4);
        assert_eq!(arriving.next().await, Ok(Some(2)));
        assert_eq!(arriving.next().await, Ok(Some(3)));
        assert_eq!(arriving.next().await, Ok(None));
        assert_eq!(arrivals.follow().next().await, Ok(None));
    }

    #[tokio::test]
    async fn one_who_is_too_far_behind_learns_it() {
        let arrivals = Arrivals::default();
        let mut arriving = arrivals.follow();
        for number in 0..=KEPT {
            arrivals.announce(&number);
        }
        assert_eq!(arriving.next().await, Err(Behind));
    }
}
