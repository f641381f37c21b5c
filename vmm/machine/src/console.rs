//! Console output: the bytes that the guest has printed, for any number of listeners.
//!
//! Invariants: the guest never waits for a listener. The newest bytes, up to a limit, are always available, also to
//! a listener that comes later. A listener that falls further behind gets the number of bytes that it has lost.
//! Printing a byte allocates nothing, with any number of listeners.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_devices::Output;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Maximum size of a piece of output, in bytes.
const PIECE: usize = 64 << 10;

#[derive(Debug, Default)]
struct State {
    kept: VecDeque<u8>,
    /// Number of bytes printed so far.
    printed: u64,
    /// Senders of wakeups to the listeners. A listener has at most one wakeup pending.
    listeners: Vec<Sender<()>>,
    closed: bool,
}

impl State {
    /// Returns the position of the oldest byte that is kept.
    fn oldest(&self) -> u64 {
        self.printed - self.kept.len() as u64
    }
}

/// Console output of one machine.
#[derive(Debug)]
pub(crate) struct ConsoleOutput {
    /// Maximum number of bytes to keep; the newest are kept.
    room: usize,
    state: Mutex<State>,
}

impl ConsoleOutput {
    /// Returns an empty console output that keeps the newest `room` bytes.
    pub(crate) fn new(room: usize) -> Self {
        Self {
            room,
            state: Mutex::default(),
        }
    }

    /// Returns the output that is kept.
    pub(crate) fn kept(&self) -> Vec<u8> {
        self.state().kept.iter().copied().collect()
    }

    /// Returns a listener, which gets the output that is kept, and all later output.
    pub(crate) fn follow(self: &Arc<Self>) -> Console {
        let (waker, wakeups) = channel(1);
        let mut state = self.state();
        if !state.closed {
            state.listeners.push(waker);
        }
        Console {
            output: Arc::clone(self),
            at: state.oldest(),
            wakeups,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Output for ConsoleOutput {
    fn print(&self, bytes: &[u8]) {
        let mut state = self.state();
        state.kept.extend(bytes);
        state.printed += bytes.len() as u64;
        let excess = state.kept.len().saturating_sub(self.room);
        state.kept.drain(..excess);
        // A listener that has a wakeup pending needs no other. A listener that is gone is removed.
        state
            .listeners
            .retain(|listener| listener.try_send(()).is_ok() || !listener.is_closed());
    }

    fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.listeners.clear();
    }
}

/// A piece of a console's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    /// The bytes as the guest sent them: not necessarily text, and cut at any position.
    pub bytes: Vec<u8>,
    /// Number of bytes, right before these, that the listener has lost because it was too slow.
    pub lost: u64,
}

/// A listener to a machine's console output.
#[derive(Debug)]
pub struct Console {
    output: Arc<ConsoleOutput>,
    /// Number of bytes that the listener has received or lost.
    at: u64,
    wakeups: Receiver<()>,
}

impl Console {
    /// Waits for the next piece of output, and returns it; `None` when the machine has ended and all output was
    /// returned.
    pub async fn next(&mut self) -> Option<Printed> {
        loop {
            if let Some(printed) = self.take() {
                return Some(printed);
            }
            if self.wakeups.recv().await.is_none() {
                return self.take();
            }
        }
    }

    /// Like [`Console::next`], but blocks the calling thread, which must not belong to an
    /// asynchronous runtime.
    pub fn blocking_next(&mut self) -> Option<Printed> {
        loop {
            if let Some(printed) = self.take() {
                return Some(printed);
            }
            if self.wakeups.blocking_recv().is_none() {
                return self.take();
            }
        }
    }

    /// Returns the next piece of output that has not been read yet, if there is one.
    fn take(&mut self) -> Option<Printed> {
        let state = self.output.state();
        let from = self.at.max(state.oldest());
        let skipped = usize::try_from(from - state.oldest()).ok()?;
        let bytes: Vec<_> = state
            .kept
            .iter()
            .skip(skipped)
            .take(PIECE)
            .copied()
            .collect();
        let lost = from - self.at;
        self.at = from + bytes.len() as u64;
        (!bytes.is_empty()).then_some(Printed { bytes, lost })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn printed(bytes: &[u8], lost: u64) -> Option<Printed> {
        let bytes = bytes.to_vec();
        Some(Printed { bytes, lost })
    }

    const KEPT: usize = 100 << 10;

    #[test]
    fn a_late_listener_gets_what_is_kept_and_a_slow_one_learns_what_it_lost() {
        let output = Arc::new(ConsoleOutput::new(KEPT));
        output.print(b"early");
        let mut slow = output.follow();
        assert_eq!(slow.take(), printed(b"early", 0));
        assert_eq!(slow.take(), None);
        for _ in 0..KEPT {
            output.print(b"x");
        }
        output.print(b"new");
        assert_eq!(output.kept().len(), KEPT);
        let mut late = output.follow();
        output.close();
        for (listener, mut lost) in [(&mut slow, 3), (&mut late, 0)] {
            let mut all = Vec::new();
            while let Some(piece) = listener.blocking_next() {
                assert_eq!(piece.lost, lost);
                assert!(piece.bytes.len() <= PIECE);
                all.extend(piece.bytes);
                lost = 0;
            }
            assert_eq!(all.len(), KEPT);
            assert!(all.ends_with(b"xnew"));
        }
        assert_eq!(output.follow().blocking_next().map(|p| p.lost), Some(0));
    }

    #[test]
    fn a_listener_is_woken_for_each_byte_it_waits_for_and_by_the_end() {
        let output = Arc::new(ConsoleOutput::new(KEPT));
        let mut listener = output.follow();
        let (asks, asked) = std::sync::mpsc::channel();
        let guest = {
            let output = Arc::clone(&output);
            thread::spawn(move || {
                for byte in 0..=u8::MAX {
                    asked.recv().unwrap();
                    output.print(&[byte]);
                }
                asked.recv().unwrap();
                output.close();
            })
        };
        for byte in 0..=u8::MAX {
            asks.send(()).unwrap();
            assert_eq!(listener.blocking_next(), printed(&[byte], 0));
        }
        asks.send(()).unwrap();
        assert_eq!(listener.blocking_next(), None);
        guest.join().unwrap();
    }

    #[test]
    fn listeners_that_are_gone_are_forgotten() {
        let output = Arc::new(ConsoleOutput::new(KEPT));
        let _stays = output.follow();
        for _ in 0..100 {
            drop(output.follow());
            output.print(b"x");
        }
        assert_eq!(output.state().listeners.len(), 1);
    }
}
