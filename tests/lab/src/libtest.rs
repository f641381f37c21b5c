//! Adds up what libtest binaries print.
//!
//! A test that cannot run where it is prints a line that starts with `skipped:` and passes;
//! libtest shows it under `successes:` when run with `--show-output`. Such a test is counted as
//! skipped, not as passed, and once however many such lines it prints.

use std::fmt;
use std::ops::AddAssign;

/// Longer lines are none of libtest's; their rest is dropped.
const LONGEST_LINE: usize = 4096;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Reads the output of one or more libtest binaries as it comes.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    counts: Counts,
    place: Place,
    skips: u64,
    failures: Vec<String>,
}

/// Where in a binary's output the parser is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Elsewhere,
    /// Under `successes:`, before a test's own output or after its line was counted.
    Successes,
    /// In the output of a passed test.
    Passed,
}

impl Parser {
    pub(crate) fn read(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.read_line(&String::from_utf8_lossy(&line));
            } else if self.line.len() < LONGEST_LINE {
                self.line.push(byte);
            }
        }
    }

    /// What was counted since the last call, and the names of the tests that failed.
    pub(crate) fn take(&mut self) -> (Counts, Vec<String>) {
        let Self {
            counts, failures, ..
        } = std::mem::take(self);
        (counts, failures)
    }

    fn read_line(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            let mut counts = parse_result(result);
            // A test that skipped itself is among those that passed.
            let skips = self.skips.min(counts.passed);
            counts.passed -= skips;
            counts.skipped += skips;
            self.counts += counts;
            self.skips = 0;
            self.place = Place::Elsewhere;
        } else if let Some(name) = failed_test(line) {
            self.failures.push(name.to_owned());
        } else if line == "successes:" {
            self.place = Place::Successes;
        } else if line == "failures:" {
            self.place = Place::Elsewhere;
        } else if self.place != Place::Elsewhere && line.starts_with("---- ") {
            self.place = Place::Passed;
        } else if self.place == Place::Passed && line.starts_with("skipped:") {
            self.skips += 1;
            self.place = Place::Successes;
        }
    }
}

/// The name in `test NAME ... FAILED`.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

/// Reads `ok. 5 passed; 0 failed; 1 ignored; …`.
fn parse_result(text: &str) -> Counts {
    let mut counts = Counts::default();
    let text = text.split_once(". ").map_or(text, |(_, numbers)| numbers);
    for part in text.split("; ") {
        let Some((number, what)) = part.split_once(' ') else {
            continue;
        };
        let number = number.parse().unwrap_or(0);
        match what {
            "passed" => counts.passed = number,
            "failed" => counts.failed = number,
            "ignored" => counts.skipped = number,
            _ => {}
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::{Expect, expect};

    fn check(output: &str, expect: Expect) {
        for size in [1, 7, output.len()] {
            let mut parser = Parser::default();
            for piece in output.as_bytes().chunks(size) {
                parser.read(piece);
            }
            let (counts, failures) = parser.take();
            expect.assert_eq(&[counts.to_string(), failures.concat()].join(";"));
        }
    }

    #[test]
    fn results_of_several_binaries_are_added() {
        check(
            "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 3 filtered out; \
             finished in 0.01s\n\
             test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; \
             finished in 0.00s\n",
            expect!["6 passed, 1 failed, 2 skipped;b"],
        );
    }

    #[test]
    fn test_that_says_it_skipped_is_skipped_once() {
        check(
            "successes:\n\n---- a stdout ----\nskipped: no KVM\nskipped: really\n\n\
             ---- b stdout ----\nhello\n\nsuccesses:\n    a\n    b\n\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
            expect!["1 passed, 0 failed, 1 skipped;"],
        );
    }

    #[test]
    fn word_outside_a_passed_tests_output_does_not_count() {
        check(
            "skipped: a\nfailures:\n\n---- a stdout ----\nskipped: but failed\n\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n",
            expect!["1 passed, 1 failed, 0 skipped;"],
        );
    }

    #[test]
    fn output_without_result_counts_nothing() {
        check(
            "thread panicked\n",
            expect!["0 passed, 0 failed, 0 skipped;"],
        );
    }
}
