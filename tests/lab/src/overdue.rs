//! Watch for late tests of a libtest program. Also writes the results of a program that was ended because of them.
//!
//! If one test runs at a time, libtest prints the name of a test when it begins, in a line to which it later adds
//! the result. Otherwise it prints only after a minute that a test has been running for long. A test is late if it
//! has not ended [`Watch::limit`] after it began. A program that prints nothing is late as a whole. Invariant:
//! every test that a [`Watch`] counts as passed or ignored has ended. So if a program was ended because of one
//! test, it can be run again with the tests that have no result.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::libtest::name;

/// Time after which libtest reports that a test is slow.
const SLOW: Duration = Duration::from_secs(60);
/// Maximum length of a line. Lines of libtest are shorter.
const LONGEST_LINE: usize = 4096;

/// Result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Result {
    Passed,
    Failed,
    Ignored,
}

/// Watches the output of one libtest program.
#[derive(Debug)]
pub(crate) struct Watch {
    limit: Duration,
    /// Whether the program as a whole counts as late after a long silence.
    whole: bool,
    line: Vec<u8>,
    heard: Instant,
    /// The test whose line is not complete yet, and the time at which it began.
    begun: Option<(String, Instant)>,
    slow: Vec<(String, Instant)>,
    ended: Vec<(String, Result)>,
}

impl Watch {
    /// Watches a program that starts now. Each of its tests may take `limit`; if `whole`, the program may not
    /// be silent for much longer than that either.
    pub(crate) fn new(limit: Duration, whole: bool) -> Self {
        Self {
            limit,
            whole,
            line: Vec::new(),
            heard: Instant::now(),
            begun: None,
            slow: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Takes `bytes` that the program printed at `now`.
    pub(crate) fn read(&mut self, bytes: &[u8], now: Instant) {
        self.heard = now;
        for &byte in bytes {
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.begun = None;
                self.read_line(&String::from_utf8_lossy(&line), now);
            } else if self.line.len() < LONGEST_LINE {
                self.line.push(byte);
            }
        }
        let line = String::from_utf8_lossy(&self.line);
        let test = line.strip_prefix("test ");
        if let Some(test) = test.and_then(|test| test.strip_suffix(" ... "))
            && self.begun.is_none()
        {
            self.begun = Some((name(test).to_owned(), now));
        }
    }

    fn read_line(&mut self, line: &str, now: Instant) {
        let Some(rest) = line.strip_prefix("test ") else {
            return;
        };
        if let Some((test, _)) = rest.split_once(" has been running for over ") {
            let began = now.checked_sub(SLOW).unwrap_or(now);
            self.slow.push((test.to_owned(), began));
        } else if let Some((test, result)) = rest.split_once(" ... ") {
            let test = name(test);
            let result = match result.split(',').next() {
                Some("ok") => Result::Passed,
                Some("FAILED") => Result::Failed,
                Some("ignored") => Result::Ignored,
                _ => return,
            };
            self.slow.retain(|(slow, _)| slow != test);
            self.ended.push((test.to_owned(), result));
        }
    }

    fn running(&self) -> impl Iterator<Item = &(String, Instant)> {
        self.slow.iter().chain(&self.begun)
    }

    /// Returns the earliest time at which a running test, or the program as a whole, will be late.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let tests = self.running().map(|(_, began)| *began + self.limit);
        // libtest reports a slow test only after this time.
        let whole = self.whole.then(|| self.heard + self.limit + SLOW);
        tests.chain(whole).min()
    }

    /// Returns the running tests that are late at `now`.
    pub(crate) fn late(&self, now: Instant) -> Vec<String> {
        let late = |began: &Instant| now.saturating_duration_since(*began) >= self.limit;
        let late = self.running().filter(|(_, began)| late(began));
        late.map(|(test, _)| test.clone()).collect()
    }

    /// Returns the tests among `all` that have no result and are not among the `late` ones.
    pub(crate) fn unheard(&self, all: Vec<String>, late: &[String]) -> Vec<String> {
        let heard = |test: &String| self.ended.iter().any(|(ended, _)| ended == test);
        all.into_iter()
            .filter(|test| !heard(test) && !late.contains(test))
            .collect()
    }

    /// Returns the text that libtest would have printed at the end if the `late` tests had failed with `words` as
    /// their output.
    pub(crate) fn closing(&self, late: &[String], words: &str) -> String {
        let of = |result| {
            let those = self.ended.iter().filter(move |(_, ended)| *ended == result);
            those.map(|(test, _)| test.as_str())
        };
        let why = format!("did not end within {} s", self.limit.as_secs());
        let mut text = String::from("\n");
        for test in late {
            let _ = writeln!(text, "test {test} ... FAILED");
        }
        text.push_str("\nfailures:\n\n");
        let lost = "what it said is lost: the program was ended for another test";
        let failed = of(Result::Failed).map(|test| (test, lost, ""));
        let late = late.iter().map(|test| (test.as_str(), why.as_str(), words));
        let all: Vec<_> = late.chain(failed).collect();
        for (test, why, words) in &all {
            let _ = writeln!(text, "---- {test} stdout ----\n{why}");
            for line in words.lines() {
                let _ = writeln!(text, "  {line}");
            }
            text.push('\n');
        }
        let _ = writeln!(
            text,
            "failures:\n\ntest result: FAILED. {} passed; {} failed; {} ignored; 0 measured; \
             0 filtered out; ended by the lab\n",
            of(Result::Passed).count(),
            all.len(),
            of(Result::Ignored).count(),
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libtest::Parser;

    const LIMIT: Duration = Duration::from_secs(100);

    fn second(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn a_test_that_libtest_calls_slow_is_late_that_much_sooner() {
        let start = Instant::now() + second(1000);
        let mut watch = Watch::new(LIMIT, false);
        watch.read(b"running 3 tests\ntest a ... ok\n", start);
        assert_eq!(watch.deadline(), None);
        let slow = b"test b has been running for over 60 seconds\n";
        watch.read(slow, start + second(60));
        assert_eq!(watch.deadline(), Some(start + LIMIT));
        assert_eq!(watch.late(start + second(99)), Vec::<String>::new());
        assert_eq!(watch.late(start + LIMIT), ["b"]);
        watch.read(b"test b ... ok\n", start + LIMIT);
        assert_eq!(watch.deadline(), None);
    }

    #[test]
    fn a_test_whose_line_is_not_complete_has_begun() {
        let start = Instant::now();
        let mut watch = Watch::new(LIMIT, false);
        for byte in b"test a - should panic ... " {
            watch.read(&[*byte], start);
        }
        watch.read(b"", start + second(50));
        assert_eq!(watch.deadline(), Some(start + LIMIT));
        assert_eq!(watch.late(start + LIMIT), ["a"]);
        watch.read(b"ok\ntest b ... ", start + LIMIT);
        assert_eq!(watch.deadline(), Some(start + LIMIT + LIMIT));
    }

    #[test]
    fn a_program_that_says_nothing_is_late_as_a_whole_if_it_may_not() {
        let watch = Watch::new(LIMIT, true);
        assert_eq!(watch.deadline(), Some(watch.heard + LIMIT + SLOW));
        assert!(watch.late(watch.heard + LIMIT + SLOW).is_empty());
        assert_eq!(Watch::new(LIMIT, false).deadline(), None);
    }

    #[test]
    fn what_is_said_in_the_end_adds_up_and_the_rest_is_to_be_run() {
        let mut watch = Watch::new(LIMIT, false);
        let mut parser = Parser::default();
        let words = b"running 6 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ignored, slow\n\
            test d has been running for over 60 seconds\ntest e has been running for over 60 seconds\n";
        watch.read(words, Instant::now() - LIMIT);
        parser.read(words);
        let late = watch.late(Instant::now());
        assert_eq!(late, ["d", "e"]);
        let closing = watch.closing(&late, "Thread 1:\n#0 pause ()");
        parser.read(closing.as_bytes());
        let taken = parser.take();
        assert_eq!(taken.counts.to_string(), "1 passed, 3 failed, 1 skipped");
        let failures: Vec<_> = taken.failures.iter().map(|it| it.test.as_str()).collect();
        assert_eq!(failures, ["b", "d", "e"]);
        assert_eq!(taken.failures[1].why, "did not end within 100 s");
        assert!(taken.lines.iter().any(|line| line == "  #0 pause ()"));
        let all = ["a", "b", "c", "d", "e", "f"].map(str::to_owned).to_vec();
        assert_eq!(watch.unheard(all, &late), ["f"]);
    }
}
