//! One client's end of a machine's events: first what was held for it, then what comes.
//!
//! Invariant: what its filter costs is paid here, by the task that takes the events for this client, a few events at
//! a time, so that neither the collector nor another client waits for it. If it takes longer than the events do,
//! they wait in the queue, and those that it has no room for are this client's loss.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_machine::queue::{Exit, Loss as _, Taken};

use super::encoded::{Encoded, Sieve};
use super::position::{Lost, Position};
use super::wanted::Wanted;

/// How often a client is told where its stream is if all events pass it by.
pub(crate) const PASSING: Duration = Duration::from_secs(1);
/// Events that a filter looks at before others have a turn: with the longest filter that is about a millisecond.
const LOOK: usize = 32;

/// What a client takes events from.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// Gone with it: the collector has nothing more for a client that does not take.
    pub(crate) wanted: Arc<Wanted>,
    /// Where it begins.
    pub(crate) start: Position,
    /// Events before the start that it has not seen and are no longer held.
    pub(crate) missed: u64,
    /// Events that it has not heard of, and that were dropped before they had a number.
    pub(crate) dropped: u64,
    pub(crate) held: VecDeque<Encoded>,
    pub(crate) queue: Exit<Encoded, Lost>,
    /// When something was taken last that has to be told.
    pub(crate) told: Instant,
}

impl Subscription {
    /// The next batch, loss or notice; `None` when nothing follows any more.
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
            if !passes_by || self.told.elapsed() >= PASSING {
                self.told = Instant::now();
                return Some(taken);
            }
        }
    }

    /// What is there without waiting, and without looking at it.
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

/// `taken` with only those events that are `wanted`.
async fn sift(wanted: &Wanted, taken: Taken<Encoded, Lost>) -> Taken<Encoded, Lost> {
    let Some(batch) = taken.item else {
        return taken;
    };
    let mut sieve = Sieve::of(batch);
    while sieve.look(wanted, LOOK) {
        tokio::task::yield_now().await;
    }
    // However few there are in each batch.
    tokio::task::yield_now().await;
    Taken {
        item: Some(sieve.end()),
        ..taken
    }
}
