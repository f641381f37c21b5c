//! Lines for files of tracefs, held against the guest's own kernel: whether it takes them, and if not, where it
//! points and with which words.
//!
//! What is kept true: a case is in one [`Verdict`] only, and one in which both differ is named by an exception,
//! with its reason, or it fails the test.

use std::fmt;
use std::fmt::Write as _;

use hvprobe_spec::ParseError;
use hvprobe_tests::rig::{Running, assert_clean, guest, progress, values};

/// How many lines the guest answers at a time, as its program has it.
const GROUP: usize = 50;

/// What the kernel says of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// It takes it.
    Accepts,
    /// It does not, with the column and the words of its log, if it says anything there.
    Refuses(Option<(usize, String)>),
    /// It has no such file.
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

/// A line, and what both say of it.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) text: &'a str,
    pub(crate) kernel: Kernel,
    pub(crate) ours: Result<(), ParseError>,
    /// The kernel's version, as far as it counts.
    pub(crate) version: (u32, u32),
    /// Whether we have its words for what is wrong, and not only its columns.
    pub(crate) has_words: bool,
}

/// A difference that is meant.
pub(crate) struct Exception {
    /// Why it is.
    pub(crate) reason: &'static str,
    /// Whether it is what a case shows.
    pub(crate) holds: fn(&Case<'_>) -> bool,
}

/// What is to be said of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    BothTake,
    /// With the same words, where we have the kernel's, and the same column, where it says one.
    BothRefuse,
    /// Which of the exceptions it is.
    Named(usize),
    Differs,
}

impl Case<'_> {
    /// Our error's column, and its words that are the kernel's.
    pub(crate) fn our_error(&self) -> Option<(usize, &str)> {
        let error = self.ours.as_ref().err()?;
        let words = error.message.split("; ").next()?;
        Some((error.column, words))
    }

    /// The kernel's error, if it says one.
    pub(crate) fn kernel_error(&self) -> Option<(usize, &str)> {
        match &self.kernel {
            Kernel::Refuses(Some((column, words))) => Some((*column, words)),
            _ => None,
        }
    }

    /// What the kernel points at, its column and its words.
    pub(crate) fn pointed_at(&self) -> Option<(&str, usize, &str)> {
        let (column, words) = self.kernel_error()?;
        Some((self.text.get(column..)?, column, words))
    }

    /// Whether we have nothing to say, or only of what comes at `column` or later.
    pub(crate) fn goes_on(&self, column: usize) -> bool {
        self.our_error().is_none_or(|(ours, _)| ours >= column)
    }

    /// Whether both take it, or we say what the kernel says.
    fn agrees(&self) -> bool {
        let ours = self.our_error();
        match &self.kernel {
            Kernel::Accepts => ours.is_none(),
            Kernel::HasNoFile => false,
            // Nothing is known but that it refuses.
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
    /// The line, and below it what both say.
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

/// What a guest's kernel said.
#[derive(Debug)]
pub(crate) struct Told {
    /// Its version, as far as it counts.
    pub(crate) version: (u32, u32),
    /// Whether it has `hist` triggers.
    pub(crate) has_histograms: bool,
    /// Its answers, in the order of the lines.
    pub(crate) answers: Vec<Kernel>,
}

/// Boots a guest and asks its kernel about `lines`, each `FILE TEXT`.
pub(crate) fn ask(lines: &[String]) -> Told {
    let script = format!(
        "cat > /tmp/lines <<'END'\n{}\nEND\n\
         echo \"release: $(uname -r)\"; echo \"hist: $(grep -c hist:keys /sys/kernel/tracing/README)\"; \
         workload tracefs /tmp/lines",
        lines.join("\n")
    );
    let mut config = guest(1, &["sh", "-c", &script]);
    config.cmdline += " rcupdate.rcu_expedited=1";
    let mut running = Running::boot(config);
    // In steps, so that a guest that goes on is not taken for one that hangs.
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
    Told {
        version: version(&printed),
        has_histograms: values(&printed, "hist") != [0],
        answers,
    }
}

/// The version of the kernel that printed `release: 6.1.0-13-cloud-amd64`.
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

/// What the kernel said of each line.
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
                // As old kernels spell it.
                let message = message.replace("valiable", "variable");
                Kernel::Refuses(Some((column, message)))
            }
            _ => Kernel::Refuses(None),
        };
        answers.push(answer);
    }
    answers
}

/// How many cases there are of each verdict, and the differences themselves.
#[derive(Debug)]
pub(crate) struct Tally {
    exceptions: &'static [Exception],
    pub(crate) both_take: usize,
    pub(crate) both_refuse: usize,
    /// Of these, how many at a column that the kernel says.
    pub(crate) same_column: usize,
    /// The cases of each exception, as they are printed.
    named: Vec<Vec<String>>,
    /// Those that differ and have no name.
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

    /// How many differ and are named.
    pub(crate) fn named(&self) -> usize {
        self.named.iter().map(Vec::len).sum()
    }

    /// How many differ for which reason, with the cases themselves if they are to be shown.
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
