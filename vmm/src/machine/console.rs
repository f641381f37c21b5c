//! The console's way out: what the guest printed, for whoever wants it, whenever they come.
//!
//! Invariants: the guest never waits for a listener; a listener that is too slow loses output from
//! its own stream only, and the newest [`BACKLOG`] bytes are always there for a new one.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use tokio::sync::mpsc::{Receiver, Sender, channel};

/// How much of the newest output is kept, in bytes.
const BACKLOG: usize = 256 << 10;
/// How many pieces may wait for one listener.
const QUEUE: usize = 4096;

#[derive(Debug, Default)]
struct State {
    backlog: VecDeque<u8>,
    listeners: Vec<Sender<Vec<u8>>>,
    closed: bool,
}

/// The output of one machine's console.
#[derive(Debug, Default)]
pub(super) struct ConsoleOutput {
    state: Mutex<State>,
}

impl ConsoleOutput {
    /// The guest printed `bytes`.
    pub(super) fn print(&self, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.backlog.extend(bytes);
        let excess = state.backlog.len().saturating_sub(BACKLOG);
        state.backlog.drain(..excess);
        // A full queue loses this piece; a closed one is forgotten.
        state
            .listeners
            .retain(|listener| listener.try_send(bytes.to_vec()).is_ok() || !listener.is_closed());
    }

    /// What is kept of the output so far, and a stream of what follows.
    pub(super) fn subscribe(&self) -> (Vec<u8>, Receiver<Vec<u8>>) {
        let (to, from) = channel(QUEUE);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let backlog = state.backlog.iter().copied().collect();
        if !state.closed {
            state.listeners.push(to);
        }
        (backlog, from)
    }

    /// The machine has ended: streams end after what is queued.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        state.listeners.clear();
    }
}
