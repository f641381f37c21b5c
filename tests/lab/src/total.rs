//! Runs a job until each of its steps is settled, and adds up the results of all jobs.
//!
//! ```text
//!   due ──► several rigs at a time ──► passed
//!    │        └── failed, or not ended ──► due
//!    └──────► one rig that has this machine for itself ──► passed, or failed with no tries left
//! ```
//! An emulated machine keeps little more than one processor busy. So all steps, except those that compare times,
//! are first divided among several machines that run at the same time. A step that does not pass there is tried
//! again in a machine that runs alone.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use hvprobe_lab::verified::Counts;

use crate::groups;
use crate::job::{Job, Step};
use crate::kind::Kind;
use crate::outcome::{self, Finish};
use crate::progress;
use crate::report::Report;
use crate::retry::{self, Book, Due};
use crate::rig;
use crate::setup::Ready;
use crate::signals::{self, Signals};

/// How a job is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) rig: Kind,
    /// Number of rigs that run at a time.
    pub(crate) rigs: usize,
    pub(crate) deadline: Instant,
    /// How often a failure is run again.
    pub(crate) retries: u32,
    /// Time without output after which a rig counts as hung.
    pub(crate) silence: Option<Duration>,
    /// Whether all output is shown as it arrives.
    pub(crate) verbose: bool,
}

/// The results of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Total {
    counts: Counts,
    pub(crate) flaky: Vec<String>,
    pub(crate) failed: Vec<String>,
    /// Tests that said that they were skipped.
    pub(crate) skipped: Vec<String>,
    /// Why no more jobs are run; `None` if more may run.
    end: Option<&'static str>,
}

impl Total {
    /// Returns whether no more jobs are to be run.
    pub(crate) fn is_over(&self) -> bool {
        self.end.is_some()
    }

    /// Runs a job, and runs its failures again in fresh rigs, until the deadline. Returns the results of each step;
    /// `None` for a step that did not begin.
    pub(crate) fn run(
        &mut self,
        mut job: Job,
        ready: &Ready,
        how: &How,
    ) -> Result<Vec<Option<Counts>>> {
        if job.steps.is_empty() {
            progress::note(&format!("no tests for rig {}", how.rig.name()));
            return Ok(Vec::new());
        }
        job.silence = how.silence;
        let names = job.steps.iter().map(Step::name).collect();
        let mut book = Book::new(names, how.retries);
        let runner = Runner {
            job: &job,
            ready,
            how,
        };
        if how.rigs > 1 && job.steps.len() > how.rigs {
            self.end = runner.side_by_side(&mut book)?;
        }
        while self.end.is_none() && !book.due.is_empty() {
            self.end = end(&runner.start(&mut book, false)?);
            match book.due.len() {
                0 => {}
                1 => progress::note("once more, in a fresh rig: 1 step"),
                due => progress::note(&format!("once more, in a fresh rig: {due} steps")),
            }
        }
        book.give_up();
        self.counts += book.counts;
        self.flaky.extend(book.flaky);
        self.failed.extend(book.failed);
        self.skipped.extend(book.skipped);
        Ok(book.results)
    }

    /// Returns whether no test has a result.
    pub(crate) fn ran_nothing(&self) -> bool {
        self.counts == Counts::default()
    }

    /// Prints the closing lines. Returns success if the run was not cut short, and each test passed or was skipped,
    /// possibly after failed tries.
    pub(crate) fn close(&self) -> ExitCode {
        println!();
        if let Some(end) = self.end {
            println!("{end}");
        }
        for line in &self.flaky {
            println!("flaky: {line}");
        }
        for line in &self.failed {
            println!("failed: {line}");
        }
        println!("{}", self.counts);
        let is_good = self.end.is_none() && self.failed.is_empty() && self.counts.failed == 0;
        outcome::status(is_good)
    }
}

/// Returns why nothing more is run after a rig that ended with `finish`; `None` if more may run.
fn end(finish: &Finish) -> Option<&'static str> {
    match finish {
        Finish::Complete | Finish::Broken(_) => None,
        Finish::TimedOut => Some("the time was over (--timeout)"),
        Finish::Interrupted(_) => Some("interrupted"),
    }
}

/// Starts rigs for the due steps of a job.
struct Runner<'a> {
    job: &'a Job,
    ready: &'a Ready,
    how: &'a How,
}

impl Runner<'_> {
    /// Runs the due steps of `book` in one rig. `has_others` says whether other rigs run at the same time.
    fn start(&self, book: &mut Book, has_others: bool) -> Result<Finish> {
        let mut job = part(self.job, &book.due);
        let left = self.how.deadline.saturating_duration_since(Instant::now());
        job.timeout = left;
        let mut report = match has_others {
            true => Report::beside_others(&job.steps),
            false => Report::new(&job.steps, self.how.verbose),
        };
        let outcome = rig::run(self.how.rig, self.ready, &job, &mut report)?;
        book.record(report.finish(), &outcome.finish);
        if let Finish::Broken(reason) = &outcome.finish {
            progress::note(reason);
        }
        if let Some(log) = &outcome.log {
            progress::note(&format!("serial log: {}", log.display()));
        }
        Ok(outcome.finish)
    }

    /// Runs the due steps, each once, in several rigs at a time. Steps that did not pass are still due, and so are
    /// those that need a machine for themselves. Returns why nothing more is to be run, or `None` if more may run.
    fn side_by_side(&self, book: &mut Book) -> Result<Option<&'static str>> {
        // Take the signals before the threads start, which inherit the signal mask.
        let signals = Signals::take()?;
        let due = std::mem::take(&mut book.due);
        let (alone, shared): (Vec<_>, Vec<_>) = due.into_iter().partition(|due| self.is_alone(due));
        let shares = Mutex::new(self.shares(shared));
        let is_over = AtomicBool::new(false);
        let ran: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.how.rigs)
                .map(|_| book.lane(Vec::new()))
                .map(|lane| scope.spawn(|| self.lane(lane, &shares, &is_over)))
                .collect();
            threads
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect()
        });
        // Drop signals that were passed on to lanes that had already ended.
        if is_over.load(Ordering::Relaxed) {
            signals.forget();
        }
        let mut over = None;
        for lane in ran {
            let (lane, finish) = lane.map_err(|_| anyhow!("what ran a rig panicked"))??;
            book.take_in(lane);
            over = over.or(end(&finish));
        }
        // Shares that no lane has taken are still due.
        let shares = shares.into_inner().unwrap_or_else(PoisonError::into_inner);
        book.due.extend(shares.into_iter().flatten());
        book.due.extend(alone);
        book.due.sort_by_key(|due| due.step);
        Ok(over)
    }

    fn is_alone(&self, due: &Due) -> bool {
        let step = self.job.steps.get(due.step);
        let group = step.and_then(|step| step.group.as_ref());
        group.is_some_and(|group| group.is_alone)
    }

    /// Divides the due steps into shares, which lanes take one after another. On this machine a share is one step,
    /// because nothing has to be booted for it. For emulated machines there are as many shares as lanes, and all
    /// take about the same time.
    fn shares(&self, due: Vec<Due>) -> VecDeque<Vec<Due>> {
        if !self.how.rig.is_emulated() {
            return due.into_iter().map(|due| vec![due]).collect();
        }
        let seconds = |due: &Due| {
            let step = self.job.steps.get(due.step);
            let group = step.and_then(|step| step.group.as_ref());
            group.map_or(1, groups::seconds)
        };
        let mut shares = vec![(0, Vec::new()); self.how.rigs];
        let mut longest_first = due;
        longest_first.sort_by_key(|due| Reverse(seconds(due)));
        for due in longest_first {
            if let Some((sum, share)) = shares.iter_mut().min_by_key(|(sum, _)| *sum) {
                *sum += seconds(&due);
                share.push(due);
            }
        }
        shares.into_iter().map(|(_, share)| share).collect()
    }

    /// A lane: takes shares of the due steps one after another, and runs each step once. Returns the results, and
    /// how the last rig ended. Each rig ends at the job's deadline at the latest and tries at least one step, so a
    /// lane ends after at most as many rigs as it has steps.
    fn lane(
        &self,
        mut book: Book,
        shares: &Mutex<VecDeque<Vec<Due>>>,
        is_over: &AtomicBool,
    ) -> Result<(Book, Finish)> {
        let mut later = Vec::new();
        let mut last = Finish::Complete;
        let finish = loop {
            if book.due.is_empty() {
                let mut shares = shares.lock().unwrap_or_else(PoisonError::into_inner);
                match shares.pop_front() {
                    Some(share) => book.due = share,
                    None => break last,
                }
            }
            let finish = self.start(&mut book, true)?;
            let due = std::mem::take(&mut book.due);
            let (tried, fresh): (Vec<_>, Vec<_>) = due.into_iter().partition(Due::was_tried);
            later.extend(tried);
            book.due = fresh;
            if let Finish::Interrupted(signal) = finish
                && !is_over.swap(true, Ordering::Relaxed)
            {
                // Only this lane received the signal. Pass it on to the others.
                signals::pass_on(signal);
            }
            if end(&finish).is_some() || is_over.load(Ordering::Relaxed) {
                break finish;
            }
            last = finish;
        };
        book.due.extend(later);
        Ok((book, finish))
    }
}

/// Returns the part of a job that is due, with the programs that it needs.
fn part(job: &Job, due: &[Due]) -> Job {
    let mut part = job.clone();
    part.steps = due
        .iter()
        .filter_map(|due| {
            let mut step = job.steps.get(due.step)?.clone();
            if !due.again.is_empty() {
                let again = due.again.iter().map(|failure| failure.test.as_str());
                step.arguments = retry::only(&step.arguments, again);
            }
            Some(step)
        })
        .collect();
    let is_of = |steps: &[Step], name: &str| steps.iter().any(|step| step.program == name);
    part.programs
        .retain(|(name, _)| is_of(&part.steps, name) || !is_of(&job.steps, name));
    part
}
