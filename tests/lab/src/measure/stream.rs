//! The lines that a program prints. A thread reads them, so that the program never waits for a reader.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of lines that [`Lines::tail`] returns.
const TAIL: usize = 40;

/// Lines that have arrived, without white space at their ends.
#[derive(Debug)]
pub struct Lines {
    lines: Receiver<String>,
    /// The newest lines, including those that were taken.
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl Lines {
    /// Starts to read `stream`.
    #[must_use]
    pub fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let remembered = Arc::clone(&tail);
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream
                .read_until(b'\n', &mut line)
                .is_ok_and(|length| length > 0)
            {
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                let mut tail = remembered.lock().unwrap_or_else(PoisonError::into_inner);
                tail.push_back(text.clone());
                if tail.len() > TAIL {
                    tail.pop_front();
                }
                drop(tail);
                // The receiver may be gone; the stream has to be drained all the same.
                let _ = sender.send(text);
                line.clear();
            }
        });
        Self { lines, tail }
    }

    /// Returns the last lines that have arrived, including those that were taken.
    #[must_use]
    pub fn tail(&self) -> Vec<String> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().cloned().collect()
    }

    /// Returns whether the stream has ended and all of its lines were taken. If a line has arrived, takes it and
    /// drops it.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.lines.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Takes lines up to the first for which `wanted` returns a result, and returns that. Returns `None` if the
    /// stream ends or `limit` passes before.
    pub fn find<T>(&self, limit: Duration, wanted: impl Fn(&str) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).ok()?;
            if let Some(found) = wanted(&line) {
                return Some(found);
            }
        }
    }

    /// Takes lines up to the first that contains `text`, and returns that line. Returns `None` in the same cases as
    /// [`Lines::find`].
    #[must_use]
    pub fn wait_for(&self, text: &str, limit: Duration) -> Option<String> {
        self.find(limit, |line| line.contains(text).then(|| line.to_owned()))
    }

    /// Takes the lines that have arrived, and returns the last of them, if there are any.
    #[must_use]
    pub fn last(&self) -> Option<String> {
        self.lines.try_iter().last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn lines_are_passed_over_until_the_one_wanted() {
        let lines = Lines::of(&b"one\r\n two: 2 \nthree\nfour"[..]);
        assert_eq!(lines.wait_for("two", LONG).as_deref(), Some("two: 2"));
        assert_eq!(
            lines.find(LONG, |line| line.strip_prefix("th").map(str::len)),
            Some(3)
        );
        assert_eq!(lines.wait_for("none", LONG), None);
        assert!(lines.ended());
        assert_eq!(lines.tail(), ["one", "two: 2", "three", "four"]);
    }

    #[test]
    fn last_line_needs_no_end() {
        let lines = Lines::of(&b"four"[..]);
        assert_eq!(lines.wait_for("four", LONG).as_deref(), Some("four"));
        assert_eq!(lines.last(), None);
    }
}
