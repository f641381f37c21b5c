//! One client's end of a machine's events: first the held events, then new ones.
//!
//! Invariant: the client's filter is evaluated here, by the task that takes the events for this client, a few
//! events at a time, so that neither the collector nor another client waits for it. If events arrive faster than
//! the filter is evaluated, they wait in the queue. If the queue is full, only this client loses events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_machine::queue::{Exit, Loss as _, Taken};

use super::encoded::{Encoded, Sieve};
use super::position::{Lost, Position};
use super::wanted::Wanted;

/// Interval at which a client is sent its position while there are no events for it.
pub(crate) const PASSING: Duration = Duration::from_secs(1);
/// Number of events that are checked with a filter before the task yields: about a millisecond with the longest
/// filter.
const LOOK: usize = 32;

/// Source of the events for one client.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// Selection of events. The collector has only a weak reference, and queues nothing more once this is
    /// dropped.
    pub(crate) wanted: Arc<Wanted>,
    /// Position at which the subscription begins.
    pub(crate) start: Position,
    /// Number of events that the client has missed: those between its position and the start.
    pub(crate) missed: u64,
    /// Number of events since the client's position that were dropped before they got a number.
    pub(crate) dropped: u64,
    pub(crate) held: VecDeque<Encoded>,
    pub(crate) queue: Exit<Encoded, Lost>,
    /// Last time that [`Subscription::next`] returned something.
    pub(crate) last_returned: Instant,
}

impl Subscription {
    /// Returns the next batch, loss or notice; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Taken<Encoded, Lost>> {
        loop {
            let taken = match self.next_held() {
                Some(held) if self.wanted.is_all() => held,
                Some(held) => sift(&self.wanted, held).await,
                None => {
                    let taken = self.queue.next().await?;
                    match &self.wanted.filter {
                        None => return Some(taken),
                        Some(_) => sift(&self.wanted, taken).await,
                    }
                }
            };
            let is_empty = |batch: &Encoded| batch.events.is_empty();
            let passes_by = taken.item.as_ref().is_some_and(is_empty)
                && taken.lost.is_nothing()
                && taken.notices.is_empty();
            if !passes_by || self.last_returned.elapsed() >= PASSING {
                self.last_returned = Instant::now();
                return Some(taken);
            }
        }
    }

    /// Returns the next batch, loss or notice if one is available without waiting, and its events need no check;
    /// otherwise `None`.
    pub(crate) fn try_next(&mut self) -> Option<Taken<Encoded, Lost>> {
        if self.held.is_empty() {
            return match &self.wanted.filter {
                None => self.queue.try_next(),
                Some(_) => None,
            };
        }
        match self.wanted.is_all() {
            true => self.next_held(),
            false => None,
        }
    }

    fn next_held(&mut self) -> Option<Taken<Encoded, Lost>> {
        let held = self.held.pop_front()?;
        Some(Taken {
            lost: Lost::default(),
            item: Some(held),
            notices: Vec::new(),
        })
    }
}

/// Removes the events that are not `wanted` from `taken`.
async fn sift(wanted: &Wanted, taken: Taken<Encoded, Lost>) -> Taken<Encoded, Lost> {
    let Some(batch) = taken.item else {
        return taken;
    };
    let mut sieve = Sieve::of(batch);
    while sieve.look(wanted, LOOK) {
        tokio::task::yield_now().await;
    }
    // Yield after each batch, even if it has few events.
    tokio::task::yield_now().await;
    Taken {
        item: Some(sieve.end()),
        ..taken
    }
}
