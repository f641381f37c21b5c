//! A guest with a shell on its console, and the cost of loops in it.

use std::io::Write;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hvprobe_lab::measure::median;
use hvprobe_lab::measure::running::Running;
use hvprobe_lab::measure::stream::Lines;

/// Text before the colon in the workload's error messages.
const COMPLAINT: &str = "workload";
/// Text that the guest's `/init` prints before it starts the shell.
const SHELL: &str = "hvprobe-guest: no command given";

/// Ticks of the guest's time stamp counter per call, in batches of a hundredth of the calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ticks {
    pub(crate) calls: u32,
    pub(crate) fastest: f64,
    pub(crate) median: f64,
    /// Mean over all batches.
    pub(crate) mean: f64,
}

impl Ticks {
    /// Combines the results of equal loops: the fastest of all batches, and for the other values the median of all
    /// loops. Returns `None` if there are no loops.
    pub(crate) fn of_all(loops: impl Iterator<Item = Self>) -> Option<Self> {
        let loops: Vec<Self> = loops.collect();
        let middle = |of: fn(&Self) -> f64| median(loops.iter().map(of).collect());
        Some(Self {
            calls: loops.first()?.calls,
            fastest: loops.iter().map(|it| it.fastest).reduce(f64::min)?,
            median: middle(|it| it.median)?,
            mean: middle(|it| it.mean)?,
        })
    }
}

/// A program that shows a guest's console on its stdout, and types its stdin there. It is killed when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Console {
    _program: Running,
    input: ChildStdin,
    output: Lines,
    errors: Lines,
    /// Time limit for one answer of the shell.
    patience: Duration,
}

impl Console {
    /// Starts `program` and waits for the guest's shell. `patience` is the time limit for that and for each
    /// answer.
    pub(crate) fn open(program: &mut Command, patience: Duration) -> Result<Self> {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.get_program().display()))?;
        let console = Self {
            input: child.stdin.take().context("no stdin")?,
            output: Lines::of(child.stdout.take().context("no stdout")?),
            errors: Lines::of(child.stderr.take().context("no stderr")?),
            _program: Running(child),
            patience,
        };
        if console.output.wait_for(SHELL, patience).is_none() {
            bail!("no guest came to its shell: {}", console.last_words());
        }
        Ok(console)
    }

    /// Describes why an expected line did not come: whether the console has ended, and the last lines of the
    /// console and of its program.
    fn last_words(&self) -> String {
        let (ended, patience) = (self.output.ended(), self.patience);
        let mut words = match ended {
            true => "the console has ended".to_owned(),
            false => format!("nothing of the kind within {patience:?}"),
        };
        for (of, lines) in [("its program", &self.errors), ("the console", &self.output)] {
            let lines = lines.tail();
            if !lines.is_empty() {
                words.push_str(&format!(
                    "\nthe last lines of {of}:\n  {}",
                    lines.join("\n  ")
                ));
            }
        }
        words
    }

    pub(crate) fn type_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}")
            .and_then(|()| self.input.flush())
            .context("cannot type on the guest's console")
    }

    /// Returns the rest of the next line that begins with `key` and a colon.
    pub(crate) fn value(&self, key: &str) -> Result<String> {
        self.output
            .find(self.patience, |line| {
                Some(line.strip_prefix(key)?.strip_prefix(": ")?.to_owned())
            })
            .with_context(|| {
                let words = self.last_words();
                format!("the guest does not print `{key}: ...`: {words}")
            })
    }

    /// Like [`Self::value`], but for output of the workload, which may print an error message instead. Returns that
    /// as an error.
    fn answer(&self, key: &str) -> Result<String> {
        let found = self.output.find(self.patience, |line| {
            let (before, value) = line.split_once(": ")?;
            let answers = before == key || before == COMPLAINT;
            answers.then(|| (before == key, value.to_owned()))
        });
        let found = found.with_context(|| {
            let words = self.last_words();
            format!("the workload does not print `{key}: ...`: {words}")
        });
        match found? {
            (true, value) => Ok(value),
            (false, complaint) => bail!("{COMPLAINT}: {complaint}"),
        }
    }

    /// Runs `workload tsc-loop` with `words`.
    pub(crate) fn tsc_loop(&mut self, words: &str) -> Result<Ticks> {
        self.type_line(&format!("workload tsc-loop {words}; echo \"over: $?\""))?;
        let calls = self.answer("calls")?;
        let ticks = self.answer("ticks")?;
        // The workload ends when it has removed the guest's own probes. Wait for that.
        let over = self.answer("over")?;
        ensure!(over == "0", "the loop ended with status {over}");
        parse_ticks(&calls, &ticks).with_context(|| format!("no ticks in {ticks:?}"))
    }
}

fn parse_ticks(calls: &str, ticks: &str) -> Option<Ticks> {
    let mut ticks = ticks.split(' ').map(|number| number.parse().ok());
    Some(Ticks {
        calls: calls.parse().ok()?,
        fastest: ticks.next()??,
        median: ticks.next()??,
        mean: ticks.next()??,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a console with the shell script `script` in the place of a guest.
    fn console(script: &str, patience: Duration) -> Result<Console> {
        Console::open(Command::new("sh").args(["-c", script]), patience)
    }

    #[test]
    fn a_guest_that_ends_amid_a_loop_is_distinguished_from_one_that_hangs() {
        let dies = format!("echo '{SHELL}'; read line; echo 'Kernel panic'; echo why >&2");
        let mut dead = console(&dies, Duration::from_secs(60)).unwrap();
        let error = dead.tsc_loop("out 100").unwrap_err().to_string();
        let first = "the workload does not print `calls: ...`: the console has ended";
        assert_eq!(error.lines().next(), Some(first));
        let console_said = format!("the last lines of the console:\n  {SHELL}\n  Kernel panic");
        assert!(error.ends_with(&console_said), "{error}");

        let hangs = format!("echo '{SHELL}'; exec sleep 1000");
        let mut stuck = console(&hangs, Duration::from_secs(1)).unwrap();
        let error = stuck.tsc_loop("out 100").unwrap_err().to_string();
        let first = "the workload does not print `calls: ...`: nothing of the kind within 1s";
        assert_eq!(error.lines().next(), Some(first));
    }

    #[test]
    fn a_guest_that_never_comes_to_its_shell_leaves_its_words() {
        let error = console("echo Oops", Duration::from_secs(60)).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("no guest came to its shell: the console has ended"));
        assert!(
            error.ends_with("the last lines of the console:\n  Oops"),
            "{error}"
        );
    }

    #[test]
    fn one_disturbed_loop_of_three_does_not_count() {
        let ticks = |fastest, median, mean| Ticks {
            calls: 101,
            fastest,
            median,
            mean,
        };
        let loops = [
            ticks(11.0, 12.0, 13.0),
            ticks(10.0, 90.0, 99.0),
            ticks(12.0, 13.0, 14.0),
        ];
        let expected = ticks(10.0, 13.0, 14.0);
        assert_eq!(Ticks::of_all(loops.into_iter()), Some(expected));
        assert_eq!(Ticks::of_all(std::iter::empty()), None);
    }

    #[test]
    fn ticks_are_read() {
        let expected = Ticks {
            calls: 101,
            fastest: 1011.18,
            median: 1093.7,
            mean: 1200.5,
        };
        let ticks = "1011.18 1093.70 1200.50";
        assert_eq!(parse_ticks("101", ticks), Some(expected));
        assert_eq!(parse_ticks("101", "many"), None);
    }
}
