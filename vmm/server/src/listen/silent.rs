//! Connections whose client has not sent the whole preface yet.
//!
//! ```text
//!   silent ──its client's preface──► begun: keeps its permit
//!     └──too long, or another connection needs the permit──► ended
//! ```
//! Invariant: a connection whose client sends nothing keeps its permit for a limited time, and does not keep others
//! out for long. When all permits are taken and another client connects, the connection that has been silent
//! longest loses its permit, if it has been silent for [`LEAST`].

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep};

/// Minimum time that a client has to send its preface, even if others need the permit.
pub(crate) const LEAST: Duration = Duration::from_secs(1);
/// Maximum time that a client has to send its preface.
const LONGEST: Duration = Duration::from_secs(10);
/// Length of the connection preface (RFC 9113, section 3.4), in bytes.
const PREFACE: usize = 24;

/// Silent connections to one socket, in the order in which they were accepted.
#[derive(Debug, Default)]
pub(crate) struct Silent(Mutex<VecDeque<Weak<Mutex<Lent>>>>);

/// A permit that its connection may lose.
#[derive(Debug)]
struct Lent {
    place: Option<OwnedSemaphorePermit>,
    since: Instant,
    waker: Option<Waker>,
}

/// A connection whose preface is not complete.
#[derive(Debug)]
pub(crate) struct Beginning {
    lent: Arc<Mutex<Lent>>,
    /// Bytes of the preface that have not arrived.
    left: usize,
    over: Pin<Box<Sleep>>,
}

impl Silent {
    /// Adds a silent connection, which gets the permit `place`.
    pub(crate) fn lend(&self, place: OwnedSemaphorePermit) -> Beginning {
        let lent = Arc::new(Mutex::new(Lent {
            place: Some(place),
            since: Instant::now(),
            waker: None,
        }));
        let mut silent = lock(&self.0);
        silent.retain(|one| one.strong_count() > 0);
        silent.push_back(Arc::downgrade(&lent));
        Beginning {
            lent,
            left: PREFACE,
            over: Box::pin(sleep(LONGEST)),
        }
    }

    /// Takes the permit of the connection that has been silent longest, if it has been silent for [`LEAST`].
    pub(crate) fn take(&self) -> Option<OwnedSemaphorePermit> {
        let mut silent = lock(&self.0);
        while let Some(first) = silent.pop_front() {
            let Some(first) = first.upgrade() else {
                continue;
            };
            let mut lent = lock(&first);
            if lent.place.is_some() && lent.since.elapsed() < LEAST {
                drop(lent);
                silent.push_front(Arc::downgrade(&first));
                return None;
            }
            let Some(place) = lent.place.take() else {
                continue;
            };
            if let Some(waker) = lent.waker.take() {
                waker.wake();
            }
            return Some(place);
        }
        None
    }
}

impl Beginning {
    /// Checks that the connection may continue.
    ///
    /// # Errors
    /// When its client has been silent for too long, or another connection has its permit.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let mut lent = lock(&self.lent);
        if lent.place.is_none() {
            return Err(lost());
        }
        if self.over.as_mut().poll(cx).is_ready() {
            let why = "the client did not begin in time";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        let waker = lent.waker.get_or_insert_with(|| cx.waker().clone());
        waker.clone_from(cx.waker());
        Ok(())
    }

    /// Notes that `bytes` bytes have arrived. Once the preface is complete, returns the permit, which the
    /// connection keeps from then on; an error if another connection has taken it.
    pub(crate) fn came(&mut self, bytes: usize) -> Poll<io::Result<OwnedSemaphorePermit>> {
        self.left = self.left.saturating_sub(bytes);
        match self.left {
            0 => Poll::Ready(lock(&self.lent).place.take().ok_or_else(lost)),
            _ => Poll::Pending,
        }
    }
}

/// Returns the error for a connection whose permit another connection has got.
fn lost() -> io::Error {
    let why = "the client was silent while others had no place";
    io::Error::new(io::ErrorKind::TimedOut, why)
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // The value is consistent between any two statements, so a panic elsewhere does no harm.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    fn go_on(beginning: &mut Beginning) -> bool {
        beginning
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_silent_longest_loses_its_place_and_who_has_begun_keeps_it() {
        let places = Arc::new(Semaphore::new(3));
        let place = || Arc::clone(&places).try_acquire_owned().unwrap();
        let silent = Silent::default();
        let mut beginnings = [place(), place(), place()].map(|place| silent.lend(place));
        assert!(beginnings.iter_mut().all(go_on));
        assert!(beginnings[0].came(PREFACE - 1).is_pending());
        let Poll::Ready(Ok(kept)) = beginnings[0].came(1) else {
            panic!("it has begun");
        };
        // The others have not been silent for long: their bytes may just not have arrived yet.
        assert!(silent.take().is_none());
        tokio::time::advance(LEAST).await;
        let others = silent.take().expect("the second's");
        assert!(!go_on(&mut beginnings[1]) && go_on(&mut beginnings[2]));
        // What its client sends now is too late.
        assert!(matches!(beginnings[1].came(PREFACE), Poll::Ready(Err(_))));
        drop(beginnings);
        assert!(silent.take().is_none());
        assert_eq!(places.available_permits(), 1);
        drop((kept, others));
        assert_eq!(places.available_permits(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_silent_for_long() {
        let places = Arc::new(Semaphore::new(1));
        let silent = Silent::default();
        let mut beginning = silent.lend(Arc::clone(&places).try_acquire_owned().unwrap());
        tokio::time::advance(LONGEST - Duration::from_millis(1)).await;
        assert!(go_on(&mut beginning));
        tokio::time::advance(Duration::from_millis(2)).await;
        assert!(!go_on(&mut beginning));
        drop(beginning);
        assert_eq!(places.available_permits(), 1);
    }
}
