//! The lines a program prints, read by a thread so that the program never waits.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// Lines as they come, without white space around them.
#[derive(Debug)]
pub struct Lines(Receiver<String>);

impl Lines {
    /// Starts to read `stream`.
    #[must_use]
    pub fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream
                .read_until(b'\n', &mut line)
                .is_ok_and(|length| length > 0)
            {
                // Whether anybody still listens does not matter: the stream is to be drained.
                let _ = sender.send(String::from_utf8_lossy(&line).trim().to_owned());
                line.clear();
            }
        });
        Self(receiver)
    }

    /// The next line that `wanted` makes something of; none if the stream ends or `limit` is over
    /// before.
    pub fn find<T>(&self, limit: Duration, wanted: impl Fn(&str) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.0.recv_timeout(left).ok()?;
            if let Some(found) = wanted(&line) {
                return Some(found);
            }
        }
    }

    /// What has been read and not been looked at.
    pub fn rest(&self) -> impl Iterator<Item = String> {
        self.0.try_iter()
    }

    /// The next line with `text` in it; none as for [`Lines::find`].
    #[must_use]
    pub fn wait_for(&self, text: &str, limit: Duration) -> Option<String> {
        self.find(limit, |line| line.contains(text).then(|| line.to_owned()))
    }

    /// The last line that has come and was not taken.
    #[must_use]
    pub fn last(&self) -> Option<String> {
        self.0.try_iter().last()
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
    }

    #[test]
    fn last_line_needs_no_end() {
        let lines = Lines::of(&b"four"[..]);
        assert_eq!(lines.wait_for("four", LONG).as_deref(), Some("four"));
        assert_eq!(lines.last(), None);
    }
}
