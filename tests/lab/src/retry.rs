//! Decision which tests are run again, and the closing lines about them.
//!
//! A program is *due* until it is settled. At first it is due as a whole; if it has ended and named failed tests,
//! only these are due after that. A [`Book`] records the results of the due programs in one start of the rig. What
//! passed is settled. What failed, or did not end, stays due while it has tries left, and is settled as failed
//! after that. A program that did not begin uses up no try, unless no program began in that rig. So every start of
//! a rig uses up at least one try, and nothing that failed once is counted as passed without a line that says so.

use std::ffi::OsString;

use hvprobe_lab::verified::Counts;

use crate::libtest::Failure;
use crate::outcome::Finish;

/// Option of libtest that the lab passes to every test program: print the output of passed tests.
pub(crate) const SHOW: &str = "--show-output";

/// Result of a program in one start of the rig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ran {
    /// The rig ended before the program began.
    NotBegun,
    /// The program was still running when the rig ended; with the test that was running, if the output named one.
    Unfinished(Option<String>),
    Ended {
        status: u8,
        counts: Counts,
        failures: Vec<Failure>,
        /// The tests that said that they were skipped.
        skipped: Vec<String>,
    },
}

/// A program that is still to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// The index of its step in the job.
    pub(crate) step: usize,
    /// The tests that are due, with the reasons of their first failures. If empty, the whole program is due.
    pub(crate) again: Vec<Failure>,
    /// The first try that crashed or did not end: its test, if known, and the reason. `None` if there was no such
    /// try.
    fell: Option<(Option<String>, String)>,
    tries: u32,
}

impl Due {
    /// Returns whether the program was tried: it began, or was to run in a rig in which no program began.
    pub(crate) fn was_tried(&self) -> bool {
        self.tries > 0
    }
}

/// Record of the programs that are due, and of the results and closing lines of what is settled.
#[derive(Debug)]
pub(crate) struct Book {
    names: Vec<String>,
    retries: u32,
    pub(crate) due: Vec<Due>,
    pub(crate) counts: Counts,
    /// Results of each program; `None` for one that has not begun.
    pub(crate) results: Vec<Option<Counts>>,
    /// Lines about what passed, but only after a failed try.
    pub(crate) flaky: Vec<String>,
    pub(crate) failed: Vec<String>,
    /// Tests that said that they were skipped.
    pub(crate) skipped: Vec<String>,
}

impl Book {
    /// Creates a book in which all programs are due, each with at most `1 + retries` tries.
    pub(crate) fn new(names: Vec<String>, retries: u32) -> Self {
        let due = (0..names.len())
            .map(|step| Due {
                step,
                again: Vec::new(),
                fell: None,
                tries: 0,
            })
            .collect();
        Self {
            results: vec![None; names.len()],
            names,
            retries,
            due,
            counts: Counts::default(),
            flaky: Vec::new(),
            failed: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Returns a book for one of several rigs that run in parallel. It has the same programs, but only `due` are
    /// due.
    pub(crate) fn lane(&self, due: Vec<Due>) -> Self {
        Self {
            due,
            ..Self::new(self.names.clone(), self.retries)
        }
    }

    /// Adds the contents of a [lane](Self::lane) of this book.
    pub(crate) fn take_in(&mut self, lane: Self) {
        self.due.extend(lane.due);
        self.counts += lane.counts;
        for (known, more) in self.results.iter_mut().zip(lane.results) {
            if let Some(more) = more {
                *known.get_or_insert_default() += more;
            }
        }
        self.flaky.extend(lane.flaky);
        self.failed.extend(lane.failed);
        self.skipped.extend(lane.skipped);
    }

    /// Adds `counts` to the results of a program.
    fn count(&mut self, step: usize, counts: Counts) {
        self.counts += counts;
        if let Some(known) = &mut self.results[step] {
            *known += counts;
        }
    }

    fn count_failed(&mut self, step: usize, failed: u64) {
        let counts = Counts {
            failed,
            ..Counts::default()
        };
        self.count(step, counts);
    }

    /// Records the results of the due programs in a rig that ended with `finish`. `ran` has the order of `due`.
    pub(crate) fn record(&mut self, ran: Vec<Ran>, finish: &Finish) {
        let reason = match finish {
            Finish::Complete => "the rig ended",
            Finish::TimedOut => "the time was over",
            Finish::Interrupted(_) => "interrupted",
            Finish::Broken(reason) => reason,
        };
        let in_program = ran.iter().any(|ran| matches!(ran, Ran::Unfinished(_)));
        if matches!(finish, Finish::Broken(_)) && !in_program {
            self.flaky.push(format!("the rig, between tests: {reason}"));
        }
        let none_began = ran.iter().all(|ran| *ran == Ran::NotBegun);
        for (mut due, ran) in std::mem::take(&mut self.due).into_iter().zip(ran) {
            if ran != Ran::NotBegun {
                self.results[due.step].get_or_insert_default();
            }
            let settled = match ran {
                Ran::NotBegun if none_began => {
                    due.tries += 1;
                    let over = due.tries > self.retries;
                    if over {
                        self.fail(&due, &format!("did not begin: {reason}"));
                    }
                    over
                }
                Ran::NotBegun => false,
                Ran::Unfinished(test) => {
                    self.fall(&mut due, test, &format!("did not end: {reason}"))
                }
                Ran::Ended {
                    status,
                    counts,
                    failures,
                    skipped,
                } => {
                    let name = &self.names[due.step];
                    let skipped = skipped.iter().map(|test| line(name, test));
                    self.skipped.extend(skipped);
                    self.ended(&mut due, status, counts, failures)
                }
            };
            if !settled {
                self.due.push(due);
            }
        }
    }

    /// Settles everything that is still due as failed. Called when nothing more is run.
    pub(crate) fn give_up(&mut self) {
        for due in std::mem::take(&mut self.due) {
            let what = match &due.fell {
                Some((Some(test), why)) => format!("in {test}: {why}"),
                Some((None, why)) => why.clone(),
                None if due.tries == 0 => "did not begin".to_owned(),
                None => "not run again".to_owned(),
            };
            self.fail(&due, &what);
        }
    }

    /// Records a try in which a program crashed or did not end. Returns whether the program is settled by it.
    fn fall(&mut self, due: &mut Due, test: Option<String>, reason: &str) -> bool {
        due.tries += 1;
        if due.tries > self.retries {
            let of_it = |test: &String| !self.names[due.step].ends_with(test.as_str());
            let place = test
                .filter(of_it)
                .map_or(String::new(), |test| format!("in {test}: "));
            self.fail(due, &format!("{place}{reason}"));
            return true;
        }
        if due.again.is_empty() && due.fell.is_none() {
            due.fell = Some((test, reason.to_owned()));
        }
        false
    }

    /// Records a try in which a program ended. Returns whether the program is settled by it.
    fn ended(&mut self, due: &mut Due, status: u8, counts: Counts, failures: Vec<Failure>) -> bool {
        let named = u64::try_from(failures.len()) == Ok(counts.failed);
        let asked = u64::try_from(due.again.len()).unwrap_or(u64::MAX);
        let all_ran = counts.passed + counts.failed + counts.skipped >= asked;
        if !named || !all_ran || (status == 0) != failures.is_empty() {
            // The program crashed, or did not run all that it was to run. Its numbers mean nothing.
            let reason = match status {
                0 if all_ran => "tests failed, but its status is 0".to_owned(),
                0 => "it ran too few tests".to_owned(),
                _ => format!("status {status}"),
            };
            return self.fall(due, None, &reason);
        }
        due.tries += 1;
        self.pass(due, &failures);
        let failed = counts.failed;
        self.count(
            due.step,
            Counts {
                failed: 0,
                ..counts
            },
        );
        let fell = due.fell.take();
        if due.tries <= self.retries && !failures.is_empty() {
            let first = std::mem::take(&mut due.again);
            due.again = failures
                .into_iter()
                .map(|mut failure| {
                    let before = first.iter().find(|first| first.test == failure.test);
                    failure.why = match (before, &fell) {
                        (Some(before), _) => before.why.clone(),
                        (None, Some((Some(test), why))) if *test == failure.test => why.clone(),
                        (None, _) => failure.why,
                    };
                    failure
                })
                .collect();
            return false;
        }
        self.count_failed(due.step, failed);
        for failure in failures {
            let name = &self.names[due.step];
            let tries = tries(due.tries);
            let line = line(name, &failure.test);
            self.failed.push(format!("{line}{tries}"));
        }
        true
    }

    /// Adds a line for each test, or for the program, that failed in an earlier try and passed in this one. All
    /// that was due has passed, except `failures`.
    fn pass(&mut self, due: &Due, failures: &[Failure]) {
        let name = &self.names[due.step];
        let at = nth(due.tries);
        let passes = |test: &str| failures.iter().all(|failure| failure.test != test);
        for Failure { test, why } in due.again.iter().filter(|first| passes(&first.test)) {
            let line = line(name, test);
            self.flaky
                .push(format!("{line} (passed at the {at} try; first: {why})"));
        }
        let line = match &due.fell {
            Some((Some(test), why)) if passes(test) => {
                format!(
                    "{} (passed at the {at} try; first: {why})",
                    line(name, test)
                )
            }
            Some((None, why)) => format!("{name} (ended at the {at} try; first: {why})"),
            _ => return,
        };
        self.flaky.push(line);
    }

    /// Settles a program, or those of its tests that are due, as failed.
    fn fail(&mut self, due: &Due, what: &str) {
        let tests = u64::try_from(due.again.len()).unwrap_or(u64::MAX);
        self.count_failed(due.step, tests.max(1));
        let name = &self.names[due.step];
        let tries = tries(due.tries);
        self.failed.push(format!("{name} ({what}){tries}"));
        for failure in &due.again {
            let line = line(name, &failure.test);
            self.failed.push(format!("{line} ({})", failure.why));
        }
    }
}

/// Returns the line about `test`. `name` is the name of its step: that of a program, or of a program and a group of
/// its tests.
pub(crate) fn line(name: &str, test: &str) -> String {
    match name.rsplit_once(": ") {
        Some((program, group)) if test.starts_with(group) => format!("{program}: {test}"),
        _ => format!("{name}: {test}"),
    }
}

/// Returns the end of a line, which gives the number of tries if there was more than one.
fn tries(tries: u32) -> String {
    if tries > 1 {
        format!(" ({tries} tries)")
    } else {
        String::new()
    }
}

fn nth(number: u32) -> String {
    match number {
        1 => "first".to_owned(),
        2 => "second".to_owned(),
        3 => "third".to_owned(),
        _ => format!("{number}th"),
    }
}

/// Returns a step's arguments, changed so that only `tests` run: without the user's filters, but with the options.
pub(crate) fn only<'a>(
    arguments: &[OsString],
    tests: impl IntoIterator<Item = &'a str>,
) -> Vec<OsString> {
    /// Options of libtest whose value is the next argument.
    const WITH_VALUE: [&str; 6] = [
        "--logfile",
        "--test-threads",
        "--color",
        "--format",
        "--shuffle-seed",
        "-Z",
    ];
    let own = arguments
        .iter()
        .position(|argument| argument == SHOW)
        .map_or(0, |position| position + 1);
    let (own, users) = arguments.split_at(own);
    let mut kept = own.to_vec();
    kept.push("--exact".into());
    let mut users = users.iter();
    while let Some(argument) = users.next() {
        let text = argument.to_string_lossy();
        if text == "--skip" {
            users.next();
        } else if WITH_VALUE.contains(&text.as_ref()) {
            kept.push(argument.clone());
            kept.extend(users.next().cloned());
        } else if text.starts_with('-') && text != "--exact" && !text.starts_with("--skip=") {
            kept.push(argument.clone());
        }
    }
    kept.extend(tests.into_iter().map(OsString::from));
    kept
}

#[cfg(test)]
mod tests;
