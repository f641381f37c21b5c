//! Parser for the output of libtest binaries, which adds up their results.
//!
//! A test that cannot run on its machine prints a line that starts with `skipped:` and passes; libtest shows the
//! line under `successes:` when run with `--show-output`. Such a test is counted once as skipped, not as passed,
//! even if it prints several such lines. A test that leaves out only a part of its work prints a line that starts
//! with `skipped in part:`. It counts as passed, and the line is shown.
//!
//! The other output of passed tests is dropped. The rest is kept, because it says why a test failed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use hvprobe_lab::verified::Counts;

/// Maximum length of a line. Lines of libtest are shorter; the rest of a longer one is dropped.
const LONGEST_LINE: usize = 4096;
/// Maximum number of bytes that are kept of a program's output. The newest lines are kept.
const MOST_KEPT: usize = 1 << 20;

/// Returns whether `line` says that a test skipped its work, or a part of it.
pub(crate) fn is_skip_notice(line: &str) -> bool {
    line.starts_with("skipped:") || line.starts_with("skipped in part:")
}

/// Returns the names of the tests that the program at `path` would run with these arguments.
pub(crate) fn list(path: &Path, arguments: &[OsString]) -> Result<Vec<String>> {
    let output = Command::new(path)
        .args(arguments)
        .args(["--list", "--format=terse"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", path.display()))?;
    if !output.status.success() {
        bail!("{} does not list its tests", path.display());
    }
    let tests = String::from_utf8_lossy(&output.stdout);
    let tests = tests.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(tests.map(str::to_owned).collect())
}

/// Reads the output of one or more libtest binaries as it arrives.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    counts: Counts,
    place: Place,
    /// The passed test whose output is being read.
    shown: String,
    /// Number of tests of the running binary that said that they were skipped.
    skips: u64,
    skipped: Vec<String>,
    failures: Vec<String>,
    /// Tests that have a result, and the time at which the result was read.
    ended: Vec<(String, Instant)>,
    running: Option<String>,
    kept: VecDeque<String>,
    kept_bytes: usize,
}

/// Results since the last [`Parser::take`].
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) counts: Counts,
    /// The tests that failed.
    pub(crate) failures: Vec<Failure>,
    /// The tests that passed, but said that they were skipped.
    pub(crate) skipped: Vec<String>,
    /// The tests that have a result, in their order, and the time at which it was read.
    pub(crate) ended: Vec<(String, Instant)>,
    /// The test that began last, if it has no result yet.
    pub(crate) running: Option<String>,
    /// The lines to show: those that are not about passed tests, and those in which tests say what they skipped.
    pub(crate) lines: Vec<String>,
}

/// A test that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) test: String,
    /// Reason of the failure in one line.
    pub(crate) why: String,
}

/// Position of the parser in a binary's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Elsewhere,
    /// In the section `successes:`: either no test's output has begun there, or the current test's `skipped:` line
    /// has been counted.
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

    /// Returns the results since the last call.
    pub(crate) fn take(&mut self) -> Taken {
        let last = std::mem::take(&mut self.line);
        if !last.is_empty() {
            self.read_line(&String::from_utf8_lossy(&last));
        }
        let Self {
            counts,
            failures,
            skipped,
            ended,
            running,
            kept,
            ..
        } = std::mem::take(self);
        let lines: Vec<String> = kept.into();
        let failures = failures
            .into_iter()
            .map(|test| Failure {
                why: reason(&lines, &test),
                test,
            })
            .collect();
        Taken {
            counts,
            failures,
            skipped,
            ended,
            running,
            lines,
        }
    }

    /// Keeps a line. If there are more than [`MOST_KEPT`] bytes, drops the oldest lines.
    fn keep(&mut self, line: &str) {
        self.kept_bytes += line.len();
        self.kept.push_back(line.to_owned());
        while self.kept_bytes > MOST_KEPT {
            let oldest = self.kept.pop_front();
            self.kept_bytes -= oldest.map_or(0, |line| line.len());
        }
    }

    fn read_line(&mut self, line: &str) {
        let before = self.place;
        self.account(line);
        let skip = is_skip_notice(line);
        let passed = line.starts_with("test ") && line.ends_with(" ... ok");
        if skip || (before == Place::Elsewhere && self.place == before && !passed) {
            self.keep(line);
        }
    }

    fn account(&mut self, line: &str) {
        if let Some((test, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            let test = name(test);
            let over = ["ok", "FAILED", "ignored"].contains(&result);
            if over {
                self.ended.push((test.to_owned(), Instant::now()));
            }
            self.running = (!over).then(|| test.to_owned());
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            let mut counts = parse_result(result);
            // A test that skipped itself is among those that passed.
            let skips = self.skips.min(counts.passed);
            counts.passed -= skips;
            counts.skipped += skips;
            self.counts += counts;
            self.skips = 0;
            self.running = None;
            self.place = Place::Elsewhere;
        } else if let Some(name) = failed_test(line) {
            self.failures.push(name.to_owned());
        } else if line == "successes:" {
            self.place = Place::Successes;
        } else if line == "failures:" {
            self.place = Place::Elsewhere;
        } else if self.place != Place::Elsewhere
            && let Some(shown) = line.strip_prefix("---- ")
        {
            self.place = Place::Passed;
            shown
                .trim_end_matches(" stdout ----")
                .clone_into(&mut self.shown);
        } else if self.place == Place::Passed && line.starts_with("skipped:") {
            self.skips += 1;
            self.skipped.push(self.shown.clone());
            self.place = Place::Successes;
        }
    }
}

/// Returns the name in `test NAME ... FAILED`.
fn failed_test(line: &str) -> Option<&str> {
    let shown = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
    Some(name(shown))
}

/// Returns the name of a test that libtest shows as `shown`.
pub(crate) fn name(shown: &str) -> &str {
    let shown = shown.strip_suffix(" - should panic").unwrap_or(shown);
    shown.strip_suffix(" - compile fail").unwrap_or(shown)
}

/// Maximum length of a reason, in characters.
const LONGEST_REASON: usize = 160;

/// Returns why `test` failed: the place and message of its panic, or else the first line that it printed.
fn reason(lines: &[String], test: &str) -> String {
    let heading = format!("---- {test} stdout ----");
    let mut own = lines
        .iter()
        .map(|line| line.trim())
        .skip_while(|line| *line != heading)
        .skip(1)
        .take_while(|line| !line.starts_with("---- ") && *line != "failures:")
        .filter(|line| !line.is_empty());
    let Some(first) = own.next() else {
        return "it printed nothing".to_owned();
    };
    let panic = std::iter::once(first)
        .chain(&mut own)
        .find_map(|line| line.strip_suffix(':')?.split_once(" panicked at "));
    let words = match panic {
        Some((_, place)) => format!("{place}: {}", own.next().unwrap_or_default()),
        None => first.to_owned(),
    };
    words.chars().take(LONGEST_REASON).collect()
}

/// Parses `ok. 5 passed; 0 failed; 1 ignored; ...`.
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
            let taken = parser.take();
            let failures: Vec<_> = taken.failures.iter().map(|it| it.test.as_str()).collect();
            expect.assert_eq(&[taken.counts.to_string(), failures.concat()].join(";"));
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
    fn the_name_of_a_failed_test_has_no_note_of_libtest() {
        check(
            "running 1 test\ntest a - should panic ... FAILED\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n",
            expect!["0 passed, 1 failed, 0 skipped;a"],
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
    fn what_passed_tests_say_is_not_kept_but_their_skips_and_failures_are() {
        let mut parser = Parser::default();
        parser.read(
            b"running 3 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ok\n\nsuccesses:\n\n\
              ---- a stdout ----\nchatter\nskipped in part: no kernel\n\n\
              ---- c stdout ----\nskipped: no KVM\n\n\
              successes:\n    a\n    c\n\nfailures:\n\n---- b stdout ----\npanicked\n\n\
              failures:\n    b\n\n\
              test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\nend",
        );
        let taken = parser.take();
        assert_eq!(taken.counts.to_string(), "1 passed, 1 failed, 1 skipped");
        assert_eq!(taken.skipped, ["c"]);
        let lines = taken.lines.join("\n");
        expect![[r#"
            running 3 tests
            test b ... FAILED

            skipped in part: no kernel
            skipped: no KVM

            ---- b stdout ----
            panicked

            failures:
                b

            test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
            end"#]]
        .assert_eq(&lines);
    }

    #[test]
    fn reason_is_what_the_panic_said_and_where_or_the_first_line() {
        let mut parser = Parser::default();
        parser.read(
            b"test a ... FAILED\ntest b ... FAILED\ntest c ... FAILED\n\nfailures:\n\n\
              ---- a stdout ----\nchatter\n\n\
              thread 'a' (7) panicked at tests/tests/a.rs:3:5:\nleft: 1\nright: 2\n\n\
              ---- b stdout ----\nError: no guest\n\nfailures:\n    a\n    b\n    c\n",
        );
        let failures = parser.take().failures;
        let reasons: Vec<_> = failures.iter().map(|it| it.why.as_str()).collect();
        assert_eq!(
            reasons,
            [
                "tests/tests/a.rs:3:5: left: 1",
                "Error: no guest",
                "it printed nothing"
            ]
        );
    }

    #[test]
    fn test_without_result_is_running() {
        let mut parser = Parser::default();
        parser.read(b"running 3 tests\ntest a ... ok\ntest b ... ");
        assert_eq!(parser.take().running.as_deref(), Some("b"));
        parser.read(b"test b ... ok\n");
        assert_eq!(parser.take().running, None);
    }

    #[test]
    fn only_the_newest_lines_are_kept() {
        let mut parser = Parser::default();
        for number in 0..MOST_KEPT / 8 {
            parser.read(format!("{number:011}\n").as_bytes());
        }
        let lines = parser.take().lines;
        assert_eq!(lines.len(), MOST_KEPT / 11);
        assert_eq!(lines.last(), Some(&format!("{:011}", MOST_KEPT / 8 - 1)));
    }

    #[test]
    fn output_without_result_counts_nothing() {
        check(
            "thread panicked\n",
            expect!["0 passed, 0 failed, 0 skipped;"],
        );
    }
}
