//! Threads for calls that may block.
//!
//! Invariant: each class of calls has permits of its own. A call that waits for a permit takes no thread. A call
//! that has a permit keeps it until the call returns, even if nobody waits for the result any more. So stuck or
//! waiting calls of one class take no thread from the calls of another class.

use std::sync::Arc;
use std::thread;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::{Code, Status};

use crate::status::broken;

/// Permits for one class of calls.
#[derive(Debug)]
pub(crate) struct Lane {
    what: &'static str,
    places: Arc<Semaphore>,
}

impl Lane {
    /// Creates a lane for at most `places` calls of the class `what` at a time.
    pub(crate) fn new(what: &'static str, places: usize) -> Self {
        Self {
            what,
            places: Arc::new(Semaphore::new(places)),
        }
    }

    /// Waits for a permit, which is released on drop. For callers that also need a permit of another class.
    pub(crate) async fn turn(&self) -> Result<OwnedSemaphorePermit, Status> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        place.map_err(|_| broken(self.what))
    }

    /// Runs `call` on a thread of its own once there is a permit, and returns its result.
    ///
    /// # Errors
    /// When `call` panics, or the host has no thread for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        let place = self.turn().await?;
        let (to, from) = oneshot::channel();
        start(self.what, move || {
            let returned = call();
            drop(place);
            // The caller may be gone.
            let _gone = to.send(returned);
        })?;
        from.await.map_err(|_| broken(self.what))
    }
}

/// Runs `work` on a thread of its own.
///
/// # Errors
/// When the host has no thread for it.
pub(crate) fn start(
    what: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<(), Status> {
    let started = thread::Builder::new()
        .name("hvprobe-call".to_owned())
        .spawn(work);
    started.map(drop).map_err(|error| {
        let message = format!("the host has no thread for {what}: {error}");
        Failure::new(Code::ResourceExhausted, ErrorKind::Host, message).into()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use tokio::task::JoinSet;
    use tokio::time::timeout;

    use super::*;

    /// Default number of the runtime's threads for blocking calls.
    const STUCK: usize = 512;
    const PLACES: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A call that does not return before [`Stuck::let_go`].
    #[derive(Debug, Default)]
    struct Stuck {
        inside: AtomicUsize,
        let_go: Mutex<bool>,
        changed: Condvar,
    }

    impl Stuck {
        fn wait(&self) {
            self.inside.fetch_add(1, Ordering::Relaxed);
            let mut let_go = self.let_go.lock().unwrap();
            while !*let_go {
                let_go = self.changed.wait(let_go).unwrap();
            }
        }

        fn let_go(&self) {
            *self.let_go.lock().unwrap() = true;
            self.changed.notify_all();
        }
    }

    #[tokio::test]
    async fn calls_that_are_stuck_take_their_own_places_and_no_others() {
        let (stuck, lane) = (
            Arc::new(Stuck::default()),
            Arc::new(Lane::new("it", PLACES)),
        );
        let mut calls = JoinSet::new();
        for _ in 0..STUCK {
            let (stuck, lane) = (Arc::clone(&stuck), Arc::clone(&lane));
            calls.spawn(async move { lane.run(move || stuck.wait()).await });
        }
        let seen = || stuck.inside.load(Ordering::Relaxed);
        let full = async {
            while seen() < PLACES {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, full).await.expect("the places are taken");

        let other = Lane::new("another", 1);
        for number in 0..STUCK {
            let answer = timeout(PATIENCE, other.run(move || number)).await;
            assert_eq!(answer.expect("an answer").unwrap(), number);
        }
        // The stuck calls do not take the runtime's threads for blocking calls either, which all classes share.
        let shared = tokio::task::spawn_blocking(|| 7);
        assert_eq!(timeout(PATIENCE, shared).await.unwrap().unwrap(), 7);
        assert_eq!(seen(), PLACES);

        stuck.let_go();
        let mut returned = 0;
        while let Some(call) = timeout(PATIENCE, calls.join_next()).await.expect("an end") {
            call.unwrap().unwrap();
            returned += 1;
        }
        assert_eq!((returned, seen()), (STUCK, STUCK));
    }

    #[tokio::test]
    async fn a_call_that_nobody_waits_for_keeps_its_place_until_it_returns() {
        let (stuck, lane) = (Arc::new(Stuck::default()), Lane::new("it", 1));
        let waiting = {
            let stuck = Arc::clone(&stuck);
            lane.run(move || stuck.wait())
        };
        let inside = async {
            while stuck.inside.load(Ordering::Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            _ = waiting => panic!("it returned"),
            () = inside => {}
        }
        assert_eq!(lane.places.available_permits(), 0);
        stuck.let_go();
        let next = timeout(PATIENCE, lane.run(|| 1)).await;
        assert_eq!(next.expect("an answer").unwrap(), 1);
    }

    #[tokio::test]
    async fn a_call_that_panics_gives_its_place_back() {
        let lane = Lane::new("it", 1);
        let error: Result<(), _> = lane.run(|| panic!("as the test wants")).await;
        assert_eq!(error.unwrap_err().code(), Code::Internal);
        let next = timeout(PATIENCE, lane.run(|| 1)).await;
        assert_eq!(next.expect("an answer").unwrap(), 1);
    }
}
