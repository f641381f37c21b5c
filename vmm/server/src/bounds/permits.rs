//! Permits for large requests and answers.
//!
//! Invariant: at most one large request of each connection waits for a permit of the server at a time. So a
//! connection delays the large requests of others by at most one request of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::totals::Places;

/// How long a client may take to read an answer before its connection is closed.
pub(crate) const UNREAD: Duration = Duration::from_mins(3);

/// State that the calls of one connection share.
#[derive(Debug)]
pub(crate) struct Own {
    /// The connection's turn: only one of its requests at a time can be large.
    request: Arc<Semaphore>,
    /// The connection's own permit for a long answer, which no other connection can take.
    answer: Arc<Semaphore>,
    unread: Mutex<Unread>,
}

/// For each answer that the client has not read yet: the time at which it was ready.
#[derive(Debug, Default)]
struct Unread {
    since: BTreeMap<u64, Instant>,
    next: u64,
}

impl Default for Own {
    fn default() -> Self {
        Self {
            request: Arc::new(Semaphore::new(1)),
            answer: Arc::new(Semaphore::new(1)),
            unread: Mutex::default(),
        }
    }
}

impl Own {
    /// Whether the client has left an answer unread for longer than [`UNREAD`].
    pub(crate) fn is_overdue(&self) -> bool {
        let oldest = self
            .unread()
            .since
            .first_key_value()
            .map(|(_, since)| *since);
        oldest.is_some_and(|since| since.elapsed() > UNREAD)
    }

    fn unread(&self) -> MutexGuard<'_, Unread> {
        // No step leaves it half changed, so a panic elsewhere does no harm.
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit for a large request; released on drop.
#[derive(Debug)]
pub(crate) struct RequestPermit {
    _permit: OwnedSemaphorePermit,
    _turn: OwnedSemaphorePermit,
}

impl RequestPermit {
    /// Waits for the connection's turn, then for one of the permits in `all`.
    pub(crate) async fn wait(own: Arc<Own>, all: &Places) -> Self {
        Self {
            _turn: acquire(&own.request).await,
            _permit: all.wait().await,
        }
    }
}

/// A permit for a long answer; released on drop.
#[derive(Debug)]
pub(crate) struct AnswerPermit {
    own: Arc<Own>,
    /// The key in [`Own::unread`], once the answer is ready.
    unread: Option<u64>,
    _permit: OwnedSemaphorePermit,
}

impl AnswerPermit {
    /// Waits until the connection's own permit or one in `all` is free, and takes it.
    pub(crate) async fn wait(own: Arc<Own>, all: &Places) -> Self {
        let permit = tokio::select! {
            biased;
            permit = acquire(&own.answer) => permit,
            permit = all.wait() => permit,
        };
        Self {
            own,
            unread: None,
            _permit: permit,
        }
    }

    /// Starts the period in which the client has to read the answer.
    pub(crate) fn start_unread(&mut self) {
        let mut unread = self.own.unread();
        let key = unread.next;
        unread.next = key.wrapping_add(1);
        unread.since.insert(key, Instant::now());
        self.unread = Some(key);
    }
}

impl Drop for AnswerPermit {
    fn drop(&mut self) {
        if let Some(key) = self.unread {
            self.own.unread().since.remove(&key);
        }
    }
}

async fn acquire(from: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    match Arc::clone(from).acquire_owned().await {
        Ok(permit) => permit,
        // Nothing closes the semaphore.
        Err(_) => std::future::pending().await,
    }
}
