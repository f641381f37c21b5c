//! Output while test programs run, and collection of their results.

use std::time::Instant;

use anyhow::Result;
use hvprobe_lab::verified::Counts;

use crate::job::Step;
use crate::libtest::{self, Parser};
use crate::outcome::Listener;
use crate::progress;
use crate::retry::Ran;

/// Properties of a step that are known before it runs.
#[derive(Debug)]
struct Title {
    name: String,
    /// Whether the step prints what libtest prints.
    is_tests: bool,
    /// Whether the step is a group of tests.
    is_group: bool,
}

impl Title {
    fn of(step: &Step) -> Self {
        Self {
            name: step.name(),
            is_tests: step.is_tests(),
            is_group: step.group.is_some(),
        }
    }
}

/// Listener for one start of a rig. It shows what failed tests print, and keeps the result of each step.
#[derive(Debug)]
pub(crate) struct Report {
    verbose: bool,
    /// Whether to print nothing about programs that pass.
    quiet: bool,
    /// Whether to print nothing at all.
    silent: bool,
    /// Whether to print a program's name only when it has ended, together with its result.
    beside_others: bool,
    parser: Parser,
    /// When the running program began.
    begun: Option<Instant>,
    /// Titles of the job's steps.
    titles: Vec<Title>,
    ran: Vec<Ran>,
    /// The running step.
    running: Option<usize>,
}

impl Report {
    /// Creates a report for a job of these steps. `verbose` shows all output as it arrives.
    pub(crate) fn new(steps: &[Step], verbose: bool) -> Self {
        let titles: Vec<_> = steps.iter().map(Title::of).collect();
        Self {
            verbose,
            quiet: false,
            silent: false,
            beside_others: false,
            parser: Parser::default(),
            begun: None,
            ran: vec![Ran::NotBegun; titles.len()],
            titles,
            running: None,
        }
    }

    /// Creates a report for a job whose programs run again and again: it shows only failures.
    pub(crate) fn quiet(steps: &[Step]) -> Self {
        Self {
            quiet: true,
            ..Self::new(steps, false)
        }
    }

    /// Creates a report for a job that runs beside others. It prints everything about a program when the program
    /// has ended.
    pub(crate) fn beside_others(steps: &[Step]) -> Self {
        Self {
            beside_others: true,
            ..Self::new(steps, false)
        }
    }

    /// Creates a report that prints nothing. For tests, where the output of a report would be mistaken for that of
    /// the test program.
    #[cfg(test)]
    pub(crate) fn silent(steps: &[Step]) -> Self {
        Self {
            silent: true,
            ..Self::quiet(steps)
        }
    }

    /// Returns the result of each program, after the rig has ended. Shows the output of a program that was still
    /// running.
    pub(crate) fn finish(mut self) -> Vec<Ran> {
        let taken = self.parser.take();
        let mut said = match self.running {
            Some(step) if self.beside_others => self.heading(step),
            _ => String::new(),
        };
        said.push_str(&self.shown(&taken.lines));
        print!("{said}");
        if let Some(step) = self.running {
            self.settle(step, Ran::Unfinished(taken.running));
        }
        self.ran
    }

    fn settle(&mut self, step: usize, ran: Ran) {
        if let Some(slot) = self.ran.get_mut(step) {
            *slot = ran;
        }
    }

    /// Returns the line that names a step.
    fn heading(&self, step: usize) -> String {
        match self.titles.get(step) {
            Some(title) if !self.quiet => format!("     Running {}\n", title.name),
            _ => String::new(),
        }
    }

    /// Returns a text with the names and times of the slowest tests of a group, at most three. The tests ran one
    /// after another.
    fn slowest(&self, step: usize, ended: &[(String, Instant)]) -> String {
        let is_group = self.titles.get(step).is_some_and(|title| title.is_group);
        let Some(begun) = self.begun.filter(|_| is_group && ended.len() > 1) else {
            return String::new();
        };
        let before = [begun].into_iter().chain(ended.iter().map(|(_, at)| *at));
        let mut took: Vec<_> = ended
            .iter()
            .zip(before)
            .map(|((test, at), before)| (at.saturating_duration_since(before), test))
            .collect();
        took.sort_by(|one, other| other.cmp(one));
        let named = took.iter().take(3).map(|(took, test)| {
            let name = test.rsplit("::").next().unwrap_or(test);
            format!("{name} {:.1}", took.as_secs_f64())
        });
        format!(", most of it: {}", named.collect::<Vec<_>>().join(", "))
    }

    /// Formats the kept lines of a program's output. Returns an empty text if they were shown when they arrived, or
    /// are not to be shown.
    fn shown(&self, lines: &[String]) -> String {
        match self.verbose || self.silent {
            true => String::new(),
            false => lines.iter().map(|line| format!("{line}\n")).collect(),
        }
    }
}

impl Listener for Report {
    fn begin(&mut self, step: usize) {
        self.begun = Some(Instant::now());
        self.running = Some(step);
        if !self.beside_others {
            print!("{}", self.heading(step));
        }
    }

    fn output(&mut self, bytes: &[u8]) -> Result<()> {
        self.parser.read(bytes);
        if !self.verbose {
            return Ok(());
        }
        progress::pass_on(bytes)
    }

    fn end(&mut self, step: usize, status: u8) {
        let mut taken = self.parser.take();
        let is_tests = self.titles.get(step).is_none_or(|title| title.is_tests);
        if !is_tests {
            // The step counts as one test, whatever results it prints. Its status says whether it failed.
            taken.counts = Counts {
                passed: u64::from(status == 0),
                ..Counts::default()
            };
            taken.failures.clear();
        }
        let seconds = self
            .begun
            .map_or(0.0, |begun| begun.elapsed().as_secs_f64());
        let mut said = match self.beside_others {
            true => self.heading(step),
            false => String::new(),
        };
        if !self.quiet {
            said.push_str(&format!(
                "             {} in {seconds:.1} s{}\n",
                taken.counts,
                self.slowest(step, &taken.ended)
            ));
        }
        if status == 0 && is_tests {
            taken
                .lines
                .retain(|line| libtest::is_skip_notice(line) && !self.quiet);
        }
        said.push_str(&self.shown(&taken.lines));
        // A single call, because others may print at the same time.
        print!("{said}");
        self.running = None;
        let ran = Ran::Ended {
            status,
            counts: taken.counts,
            failures: taken.failures,
            skipped: taken.skipped,
        };
        self.settle(step, ran);
    }
}
