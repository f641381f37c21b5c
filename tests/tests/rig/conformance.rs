//! Compares how hvprobe and the guest's own kernel judge definitions, filters and histograms that others wrote.
//! hvprobe must accept what the kernel accepts, and refuse what it refuses. If the kernel reports a column, hvprobe
//! must report the same one.
//!
//! `HVPROBE_CONFORMANCE` names a file of lines from the kernel's own tests and documentation, which
//! `cargo lab conformance` makes. Without it, a few lines of our own are judged in the same way. Intended
//! differences are listed, with their reasons, in `filters`, in `histograms` and, for definitions, in
//! `definitions::exceptions`.

mod filters;
mod histograms;

use std::env;
use std::fmt::Write as _;
use std::fs;

use hvprobe_spec::ParseError;
use hvprobe_spec::definition;
use hvprobe_spec::fetch::read_filter;
use hvprobe_spec::histogram::read_histogram;
use hvprobe_tests::rig::rig;

use crate::definitions;
use crate::verdicts::{self, Case, Exception, Kernel, Tally};

/// Our own lines, each of the form `FILE TEXT`.
const SAMPLE: &str = include_str!("conformance/sample.txt");

/// Kind of a line, determined by the tracefs file that the line is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Definition,
    Filter,
    Histogram,
}

impl Kind {
    const ALL: [(Self, &str, &[Exception]); 3] = [
        (Self::Definition, "definitions", definitions::EXCEPTIONS),
        (Self::Filter, "filters", filters::EXCEPTIONS),
        (Self::Histogram, "histograms", histograms::EXCEPTIONS),
    ];

    fn of(file: &str) -> Self {
        match file.rsplit('/').next() {
            Some("filter") => Self::Filter,
            Some("trigger") => Self::Histogram,
            _ => Self::Definition,
        }
    }

    /// Parses `text` with hvprobe's parser for this kind.
    fn judge(self, text: &str) -> Result<(), ParseError> {
        match self {
            Self::Definition => definition::parse(text).map(drop),
            Self::Filter => read_filter(text).map(drop),
            Self::Histogram => read_histogram(text).map(drop),
        }
    }
}

/// Outcome that a line's source expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Nothing,
    /// The kernel refuses the line.
    Refused,
    /// The kernel refuses the line and points at this column.
    At(usize),
}

/// A line to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked<'a> {
    /// The tracefs file that the line is for.
    file: &'a str,
    expected: Expected,
    /// Source file and line number.
    origin: &'a str,
    text: &'a str,
}

impl<'a> Asked<'a> {
    /// Reads a line of our own: `FILE TEXT`.
    fn ours(line: &'a str) -> Option<Self> {
        let (file, text) = line.split_once(' ')?;
        Some(Self {
            file,
            expected: Expected::Nothing,
            origin: "sample.txt",
            text,
        })
    }

    /// Reads a line that the lab wrote: `FILE EXPECTED ORIGIN TEXT`.
    fn given(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(4, ' ');
        let file = words.next()?;
        let expected = match words.next()? {
            "-" => Expected::Nothing,
            "refused" => Expected::Refused,
            column => Expected::At(column.parse().ok()?),
        };
        Some(Self {
            file,
            expected,
            origin: words.next()?,
            text: words.next()?,
        })
    }

    /// Returns whether the kernel does what the line's source expects.
    fn is_as_expected(&self, kernel: &Kernel) -> bool {
        match (self.expected, kernel) {
            (Expected::Nothing, _) | (Expected::Refused, Kernel::Refuses(_)) => true,
            (Expected::At(wanted), Kernel::Refuses(Some((column, _)))) => wanted == *column,
            _ => false,
        }
    }
}

#[test]
fn lines_of_others_are_taken_and_refused_as_by_the_guests_kernel() {
    if rig("conformance with the guest's kernel").is_none() {
        return;
    }
    let given = env::var_os("HVPROBE_CONFORMANCE").map(|path| {
        let read = fs::read_to_string(&path);
        read.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    });
    let text = given.as_deref().unwrap_or(SAMPLE);
    let all: Option<Vec<_>> = match given {
        Some(_) => text.lines().map(Asked::given).collect(),
        None => text.lines().map(Asked::ours).collect(),
    };
    let all = all.expect("each line has a file and a text");
    judge(&all, given.is_some());
}

/// Judges all lines, prints a table and the differences, and fails if a difference is not named by an exception.
fn judge(all: &[Asked<'_>], shown: bool) {
    let lines: Vec<_> = all
        .iter()
        .map(|asked| format!("{} {}", asked.file, asked.text))
        .collect();
    let guest = verdicts::ask(&lines);
    let mut table = format!(
        "{:<12}{:>10}{:>13}{:>16}{:>15}{:>17}{:>15}\n",
        "",
        "both take",
        "both refuse",
        "with the column",
        "differ: named",
        "differ: unnamed",
        "no such event"
    );
    let (mut differences, mut unnamed) = (String::new(), Vec::new());
    for (kind, name, exceptions) in Kind::ALL {
        let (mut tally, mut absent) = (Tally::new(exceptions), Vec::new());
        for (asked, kernel) in all.iter().zip(&guest.answers) {
            if Kind::of(asked.file) != kind {
                continue;
            }
            if *kernel == Kernel::HasNoFile || kind == Kind::Histogram && !guest.has_histograms {
                absent.push(asked.file);
                continue;
            }
            tally.add(&Case {
                text: asked.text,
                kernel: kernel.clone(),
                ours: kind.judge(asked.text),
                version: guest.version,
                has_words: false,
            });
        }
        writeln!(
            table,
            "{name:<12}{:>10}{:>13}{:>16}{:>15}{:>17}{:>15}",
            tally.both_take,
            tally.both_refuse,
            tally.same_column,
            tally.named(),
            tally.unnamed.len(),
            absent.len()
        )
        .expect("writing to memory");
        absent.dedup();
        if !absent.is_empty() {
            writeln!(differences, "not in this kernel: {}", absent.join(", "))
                .expect("writing to memory");
        }
        differences.push_str(&tally.differences(shown));
        unnamed.extend(tally.unnamed);
    }
    if !guest.has_histograms {
        eprintln!("skipped in part: the guest's kernel has no histograms");
    }
    eprint!(
        "{differences}{}\n{table}",
        judged_by_its_tests(all, &guest.answers)
    );
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
    assert!(all.len() > 50, "only {} lines", all.len());
}

#[test]
fn every_difference_has_its_reason_in_the_reference() {
    let page = include_str!("../../../docs/reference.md").replace("\\|", "|");
    for (_, name, exceptions) in Kind::ALL {
        for exception in exceptions {
            let row = format!("\n| {name} | {} |\n", exception.reason);
            assert!(page.contains(&row), "docs/reference.md lacks{row}");
        }
    }
}

/// Returns a report that says how often the kernel does what its own tests expect, and lists the lines where it
/// does not.
fn judged_by_its_tests(all: &[Asked<'_>], answers: &[Kernel]) -> String {
    let (mut as_expected, mut text) = (0, String::new());
    for (asked, kernel) in all.iter().zip(answers) {
        if asked.expected == Expected::Nothing || *kernel == Kernel::HasNoFile {
            continue;
        }
        if asked.is_as_expected(kernel) {
            as_expected += 1;
            continue;
        }
        let Asked {
            expected,
            origin,
            text: line,
            ..
        } = asked;
        writeln!(
            text,
            "its own test says {expected:?}, the kernel {kernel}: {line} ({origin})"
        )
        .expect("writing to memory");
    }
    format!("{text}{as_expected} times the kernel does what its own tests say\n")
}
