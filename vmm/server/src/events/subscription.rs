//! One client's end of a machine's events: first what was held for it, then what comes.

use std::collections::VecDeque;
use std::sync::Arc;

use hvprobe_machine::queue::{Exit, Taken};

use super::encoded::Encoded;
use super::position::{Lost, Position};
use super::wanted::Wanted;

/// What a client takes events from.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) wanted: Arc<Wanted>,
    /// Where it begins.
    pub(crate) start: Position,
    /// Events before the start that it has not seen and are no longer held.
    pub(crate) missed: u64,
    /// Events that it has not heard of, and that were dropped before they had a number.
    pub(crate) dropped: u64,
    pub(crate) held: VecDeque<Encoded>,
    pub(crate) queue: Exit<Encoded, Lost>,
}

impl Subscription {
    /// The next batch, loss or notice; `None` when nothing follows any more.
    pub(crate) async fn next(&mut self) -> Option<Taken<Encoded, Lost>> {
        match self.next_held() {
            Some(held) => Some(held),
            None => self.queue.next().await,
        }
    }

    /// What is there without waiting.
    pub(crate) fn try_next(&mut self) -> Option<Taken<Encoded, Lost>> {
        self.next_held().or_else(|| self.queue.try_next())
    }

    fn next_held(&mut self) -> Option<Taken<Encoded, Lost>> {
        let held = self.held.pop_front()?;
        Some(Taken {
            lost: Lost::default(),
            item: Some(held.only(&self.wanted)),
            notices: Vec::new(),
        })
    }
}
