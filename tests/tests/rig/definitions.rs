//! Definitions with fetch arguments, held against the guest's own kernel: what its `kprobe_events` takes, we
//! take; what it refuses for how it is written, we refuse with its words, at its column.
//!
//! Where we mean to differ is listed in `exceptions`, with the reason.

mod beginnings;
mod exceptions;
mod generate;
mod values;

use std::fmt::Write as _;

use hvprobe_spec::ParseError;
use hvprobe_spec::definition::{self, Definition};
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, guest, rig, rounds, values};

use exceptions::EXCEPTIONS;

/// How many definitions are made up, besides those that are written down.
const MADE_UP: usize = 1700;

/// What the kernel says of a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kernel {
    /// It takes it.
    Accepts,
    /// It does not, with the column and the words of its log, if it says anything there.
    Refuses(Option<(usize, String)>),
}

/// A definition, and what both say of it.
#[derive(Debug)]
struct Case<'a> {
    text: &'a str,
    kernel: Kernel,
    ours: Result<Definition, ParseError>,
    /// The kernel's version, as far as it counts.
    version: (u32, u32),
}

impl Case<'_> {
    /// Our error's column, and its words that are the kernel's.
    fn our_error(&self) -> Option<(usize, &str)> {
        let error = self.ours.as_ref().err()?;
        let words = error.message.split("; ").next()?;
        Some((error.column, words))
    }

    /// The kernel's error, if it says one.
    fn kernel_error(&self) -> Option<(usize, &str)> {
        match &self.kernel {
            Kernel::Refuses(Some((column, words))) => Some((*column, words)),
            _ => None,
        }
    }

    /// Whether we say what the kernel says.
    fn agrees(&self) -> bool {
        match (&self.kernel, self.our_error()) {
            (Kernel::Accepts, ours) => ours.is_none(),
            (Kernel::Refuses(said), ours) => {
                ours.is_some() && said.as_ref().map(|(at, words)| (*at, words.as_str())) == ours
            }
        }
    }

    /// Why we differ, if we mean to: which of the exceptions.
    fn exception(&self) -> Option<usize> {
        EXCEPTIONS
            .iter()
            .position(|exception| (exception.holds)(self))
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

/// What the kernel said of each definition.
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

#[test]
fn definitions_are_taken_and_refused_as_by_the_guests_kernel() {
    if rig("definitions held against the kernel's").is_none() {
        return;
    }
    let function = "vfs_read";
    let definitions =
        generate::definitions(function, names::behind_entry(function), rounds(MADE_UP));
    let script = format!(
        "cat > /tmp/definitions <<'END'\n{}\nEND\n\
         echo \"release: $(uname -r)\"; workload kprobe-events /tmp/definitions",
        definitions.join("\n")
    );
    let mut config = guest(1, &["sh", "-c", &script]);
    config.cmdline += " rcupdate.rcu_expedited=1";
    let mut running = Running::boot(config);
    // In steps, so that a guest that goes on is not taken for one that hangs.
    for number in (0..definitions.len()).step_by(50) {
        running.wait_for(&format!("\n{number} "));
    }
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let count = i64::try_from(definitions.len()).expect("few");
    assert_eq!(values(&printed, "definitions"), [count], "{printed}");
    let version = version(&printed);
    let answers = answers(&printed);
    assert_eq!(answers.len(), definitions.len(), "{printed}");
    let cases = definitions.iter().zip(answers).map(|(text, kernel)| Case {
        text,
        kernel,
        ours: definition::parse(text),
        version,
    });
    compare(cases);
}

/// Compares what was said, and tells how often what was.
fn compare<'a>(cases: impl Iterator<Item = Case<'a>>) {
    let (mut both_take, mut both_refuse, mut differ) = (0, 0, String::new());
    let mut excused = vec![0; EXCEPTIONS.len()];
    for case in cases {
        if case.agrees() {
            match case.kernel {
                Kernel::Accepts => both_take += 1,
                Kernel::Refuses(_) => both_refuse += 1,
            }
        } else if let Some(index) = case.exception() {
            excused[index] += 1;
        } else {
            let ours = match &case.ours {
                Ok(_) => "taken".to_owned(),
                Err(error) => format!("{} {}", error.column, error.message),
            };
            let text = case.text;
            writeln!(
                differ,
                "{text}\n  kernel: {:?}\n  ours: {ours}",
                case.kernel
            )
            .expect("writing to memory");
        }
    }
    eprintln!("both take {both_take}, both refuse {both_refuse}, with the same words and caret");
    for (exception, count) in EXCEPTIONS.iter().zip(&excused) {
        eprintln!("{count:5} differ: {}", exception.reason);
    }
    assert!(differ.is_empty(), "{differ}");
    assert!(both_take >= 100 && both_refuse >= 100);
}
