//! Compares how hvprobe and the guest's own kernel judge lines for tracefs files: whether they take a line, and if
//! not, the column and the words of the error.
//!
//! Invariant: each case has exactly one [`Verdict`]. A case in which the two differ is named by an exception, with
//! its reason, or fails the test.

use std::fmt;
use std::fmt::Write as _;

use hvprobe_spec::ParseError;
use hvprobe_tests::rig::{Running, assert_clean, guest, progress, values};

/// Number of lines that the guest answers at a time, the same as in `tests/workload/src/tracefs.rs`.
const GROUP: usize = 50;

/// The kernel's answer to a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// The kernel takes the line.
    Accepts,
    /// The kernel refuses the line, with the column and the words of its error log if it logs an error.
    Refuses(Option<(usize, String)>),
    /// The kernel has no such file.
    HasNoFile,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepts => f.write_str("taken"),
            Self::Refuses(None) => f.write_str("refused"),
            Self::Refuses(Some((column, words))) => write!(f, "{column} {words}"),
            Self::HasNoFile => f.write_str("no such file"),
        }
    }
}

/// A line, with the kernel's answer and ours.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) text: &'a str,
    pub(crate) kernel: Kernel,
    pub(crate) ours: Result<(), ParseError>,
    /// The kernel's version, major and minor.
    pub(crate) version: (u32, u32),
    /// Whether our errors have the kernel's words, and not only its columns.
    pub(crate) has_words: bool,
}

/// An intended difference.
pub(crate) struct Exception {
    /// Reason for the difference.
    pub(crate) reason: &'static str,
    /// Whether a case shows this difference.
    pub(crate) holds: fn(&Case<'_>) -> bool,
}

/// Result of the comparison for a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    BothTake,
    /// Both refuse the line: with the same words if our errors have the kernel's words, and at the same column if
    /// the kernel logs one.
    BothRefuse,
    /// The case differs, and the exception with this index names it.
    Named(usize),
    Differs,
}

impl Case<'_> {
    /// Returns the column of our error, and the part of its message before the first `; `, which has the kernel's
    /// words.
    pub(crate) fn our_error(&self) -> Option<(usize, &str)> {
        let error = self.ours.as_ref().err()?;
        let words = error.message.split("; ").next()?;
        Some((error.column, words))
    }

    /// Returns the column and the words of the kernel's error, if it logged one.
    pub(crate) fn kernel_error(&self) -> Option<(usize, &str)> {
        match &self.kernel {
            Kernel::Refuses(Some((column, words))) => Some((*column, words)),
            _ => None,
        }
    }

    /// Returns the text that the kernel's error points at, with the error's column and words.
    pub(crate) fn pointed_at(&self) -> Option<(&str, usize, &str)> {
        let (column, words) = self.kernel_error()?;
        Some((self.text.get(column..)?, column, words))
    }

    /// Returns whether we have no error before `column`.
    pub(crate) fn goes_on(&self, column: usize) -> bool {
        self.our_error().is_none_or(|(ours, _)| ours >= column)
    }

    /// Returns whether both take the line, or both refuse it with errors that match.
    fn agrees(&self) -> bool {
        let ours = self.our_error();
        match &self.kernel {
            Kernel::Accepts => ours.is_none(),
            Kernel::HasNoFile => false,
            // The kernel's error is unknown. Only that the kernel refuses the line is known.
            Kernel::Refuses(None) => ours.is_some() && !self.has_words,
            Kernel::Refuses(Some((column, words))) => ours.is_some_and(|(at, said)| {
                at == *column && (!self.has_words || said == words.as_str())
            }),
        }
    }

    pub(crate) fn verdict(&self, exceptions: &[Exception]) -> Verdict {
        if self.agrees() {
            return match self.ours {
                Ok(()) => Verdict::BothTake,
                Err(_) => Verdict::BothRefuse,
            };
        }
        let named = exceptions
            .iter()
            .position(|exception| (exception.holds)(self));
        named.map_or(Verdict::Differs, Verdict::Named)
    }
}

impl fmt::Display for Case<'_> {
    /// Formats the line, and both answers below it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, kernel, .. } = self;
        match &self.ours {
            Ok(()) => write!(f, "{text}\n  kernel: {kernel}\n  ours: taken"),
            Err(error) => {
                let (column, message) = (error.column, &error.message);
                write!(f, "{text}\n  kernel: {kernel}\n  ours: {column} {message}")
            }
        }
    }
}

/// Answers of a guest's kernel.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// The kernel's version, major and minor.
    pub(crate) version: (u32, u32),
    /// Whether the kernel has `hist` triggers.
    pub(crate) has_histograms: bool,
    /// One answer for each line, in the order of the lines.
    pub(crate) answers: Vec<Kernel>,
}

/// Boots a guest and asks its kernel about `lines`, each of the form `FILE TEXT`.
pub(crate) fn ask(lines: &[String]) -> Verdicts {
    let script = format!(
        "cat > /tmp/lines <<'END'\n{}\nEND\n\
         echo \"release: $(uname -r)\"; echo \"hist: $(grep -c hist:keys /sys/kernel/tracing/README)\"; \
         workload tracefs /tmp/lines",
        lines.join("\n")
    );
    let mut config = guest(1, &["sh", "-c", &script]);
    config.cmdline += " rcupdate.rcu_expedited=1";
    let mut running = Running::boot(config);
    // Waits in steps, so that a guest that makes progress is not taken for one that hangs.
    for number in (0..lines.len()).step_by(GROUP) {
        running.wait_for(&format!("\n{number} "));
        progress(&format!("{number} of {} lines", lines.len()));
    }
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let count = i64::try_from(lines.len()).expect("few");
    assert_eq!(values(&printed, "lines"), [count], "{printed}");
    let answers = answers(&printed);
    assert_eq!(answers.len(), lines.len(), "{printed}");
    Verdicts {
        version: version(&printed),
        has_histograms: values(&printed, "hist") != [0],
        answers,
    }
}

/// Returns the version of the kernel from a line such as `release: 6.1.0-13-cloud-amd64`.
fn version(printed: &str) -> (u32, u32) {
    let release = printed
        .lines()
        .find_map(|line| line.trim().strip_prefix("release: "));
    let release = release.unwrap_or_else(|| panic!("no release:\n{printed}"));
    let mut numbers = release.split('.').map(|number| number.parse().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor),
        _ => panic!("release {release}"),
    }
}

/// Returns the kernel's answer to each line.
fn answers(printed: &str) -> Vec<Kernel> {
    let mut answers = Vec::new();
    for line in printed.lines() {
        let mut words = line.trim_end().splitn(4, ' ');
        let number = words.next().and_then(|number| number.parse().ok());
        if number != Some(answers.len()) {
            continue;
        }
        let answer = match (words.next(), words.next(), words.next()) {
            (Some("ok"), ..) => Kernel::Accepts,
            (Some("absent"), ..) => Kernel::HasNoFile,
            (Some(_), Some(column), Some(message)) => {
                let column = column.parse().expect("a column");
                // Old kernels misspell the word.
                let message = message.replace("valiable", "variable");
                Kernel::Refuses(Some((column, message)))
            }
            _ => Kernel::Refuses(None),
        };
        answers.push(answer);
    }
    answers
}

/// Number of cases for each verdict, and the differences themselves.
#[derive(Debug)]
pub(crate) struct Tally {
    exceptions: &'static [Exception],
    pub(crate) both_take: usize,
    pub(crate) both_refuse: usize,
    /// Number of cases in `both_refuse` for which the kernel logs a column.
    pub(crate) same_column: usize,
    /// Cases of each exception, as printed.
    named: Vec<Vec<String>>,
    /// Cases that differ and that no exception names.
    pub(crate) unnamed: Vec<String>,
}

impl fmt::Debug for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl Tally {
    pub(crate) fn new(exceptions: &'static [Exception]) -> Self {
        Self {
            exceptions,
            both_take: 0,
            both_refuse: 0,
            same_column: 0,
            named: vec![Vec::new(); exceptions.len()],
            unnamed: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, case: &Case<'_>) {
        match case.verdict(self.exceptions) {
            Verdict::BothTake => self.both_take += 1,
            Verdict::BothRefuse => {
                self.both_refuse += 1;
                self.same_column += usize::from(case.kernel_error().is_some());
            }
            Verdict::Named(index) => self.named[index].push(case.to_string()),
            Verdict::Differs => self.unnamed.push(case.to_string()),
        }
    }

    /// Returns the number of cases that differ and that an exception names.
    pub(crate) fn named(&self) -> usize {
        self.named.iter().map(Vec::len).sum()
    }

    /// Returns the number of differences for each reason, and with `shown` also the cases themselves.
    pub(crate) fn differences(&self, shown: bool) -> String {
        let mut text = String::new();
        for (exception, cases) in self.exceptions.iter().zip(&self.named) {
            if cases.is_empty() && shown {
                continue;
            }
            writeln!(text, "{:5} differ: {}", cases.len(), exception.reason)
                .expect("writing to memory");
            for case in cases.iter().filter(|_| shown) {
                writeln!(text, "{case}").expect("writing to memory");
            }
        }
        text
    }
}
