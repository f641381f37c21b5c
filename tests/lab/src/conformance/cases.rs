//! Lists of the cases to judge and of the lines that were left out. A case is a line that a source writes to a
//! tracefs file, with its origin.
//!
//! Invariant: every line that a source writes into a file of definitions, filters or triggers becomes a case, or is
//! listed as left out, with the reason.

use std::collections::BTreeSet;
use std::fmt;

/// Mount points of tracefs.
const FOLDERS: [&str; 2] = ["/sys/kernel/tracing/", "/sys/kernel/debug/tracing/"];

/// Outcome that a source expects of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    Nothing,
    /// The kernel refuses the line.
    Refused,
    /// The kernel refuses the line and points at this column.
    At(usize),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("-"),
            Self::Refused => f.write_str("refused"),
            Self::At(column) => write!(f, "{column}"),
        }
    }
}

/// A line to judge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// Path of the tracefs file, from the root of tracefs.
    pub(super) file: String,
    pub(super) expected: Expected,
    /// Source file and line number.
    pub(super) origin: String,
    pub(super) text: String,
}

impl fmt::Display for Case {
    /// Formats the case as the test reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            expected,
            origin,
            text,
        } = self;
        write!(f, "{file} {expected} {origin} {text}")
    }
}

/// A line that is not judged.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Left {
    pub(super) why: String,
    pub(super) origin: String,
    pub(super) text: String,
}

/// Cases and left-out lines of all sources.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) cases: Vec<Case>,
    pub(super) left: BTreeSet<Left>,
    known: BTreeSet<(String, String)>,
}

/// Purpose of a tracefs file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    Definitions,
    Filters,
    Triggers,
    /// Filters or triggers of more than one event.
    Several,
    Others,
}

impl For {
    fn of(file: &str) -> Self {
        if matches!(file, "kprobe_events" | "dynamic_events") {
            return Self::Definitions;
        }
        let parts: Vec<_> = file.split('/').collect();
        let (events, [.., name]) = (parts.first() == Some(&"events"), &parts[..]) else {
            return Self::Others;
        };
        match (*name, parts.len(), file.contains('*')) {
            ("filter", 4, false) if events => Self::Filters,
            ("trigger", 4, false) if events => Self::Triggers,
            ("filter" | "trigger", ..) if events => Self::Several,
            _ => Self::Others,
        }
    }
}

/// Returns a file's path from the root of tracefs. For a file in an instance, returns the path of the corresponding
/// file outside of the instance.
pub(super) fn from_root(name: &str) -> &str {
    let folder = FOLDERS.iter().find_map(|folder| name.strip_prefix(folder));
    let name = folder.unwrap_or(name);
    let inside = name
        .strip_prefix("instances/")
        .and_then(|it| it.split_once('/'));
    inside.map_or(name, |(_, name)| name)
}

impl Found {
    /// Records that `text` is written into `file`. `Err` means that the text is not fully known: it has the reason,
    /// and the text as far as known.
    pub(super) fn written(
        &mut self,
        file: &str,
        text: Result<&str, (&str, &str)>,
        expected: Expected,
        origin: &str,
    ) {
        let of = For::of(file);
        if of == For::Others {
            return;
        }
        let text = match text {
            Ok(text) => text.trim(),
            Err((why, text)) => return self.leave(why, origin, text),
        };
        if text.is_empty() {
            // Writing nothing clears the file.
            return;
        }
        let mut chars = text.chars();
        let first = chars.next();
        let takes_away = match of {
            For::Definitions => first == Some('-') || first == Some('!'),
            For::Filters => text == "0",
            _ => first == Some('!'),
        };
        if takes_away {
            return self.leave("takes away what there is", origin, text);
        }
        match of {
            For::Several => self.leave("is for more than one event", origin, text),
            For::Definitions if file == "dynamic_events" && !is_ours(text) => {
                self.leave("is an event of another kind", origin, text);
            }
            For::Triggers if !text.starts_with("hist:") => match text.split_once(" if ") {
                // The filters of all triggers have the same language, so this one is judged as a filter.
                Some((_, filter)) => {
                    let file = file.replace("/trigger", "/filter");
                    let expected = match expected {
                        Expected::At(_) => Expected::Refused,
                        expected => expected,
                    };
                    self.add(&file, expected, origin, filter.trim());
                }
                None => self.leave("is another trigger than a histogram", origin, text),
            },
            _ => self.add(file, expected, origin, text),
        }
    }

    /// Adds a case, unless one with the same file and text is known. A text of several lines is left out.
    fn add(&mut self, file: &str, expected: Expected, origin: &str, text: &str) {
        if text.contains('\n') {
            return self.leave("has several lines", origin, &text.replace('\n', "\\n"));
        }
        if !self.known.insert((file.to_owned(), text.to_owned())) {
            return;
        }
        self.cases.push(Case {
            file: file.to_owned(),
            expected,
            origin: origin.to_owned(),
            text: text.to_owned(),
        });
    }

    pub(super) fn leave(&mut self, why: &str, origin: &str, text: &str) {
        self.left.insert(Left {
            why: why.to_owned(),
            origin: origin.to_owned(),
            text: text.to_owned(),
        });
    }

    /// Lists the lines that were left out, by reason.
    pub(super) fn left_out(&self) -> String {
        let mut text = String::new();
        let mut before = None;
        for left in &self.left {
            if before != Some(&left.why) {
                let count = self.left.iter().filter(|it| it.why == left.why).count();
                text.push_str(&format!("left out, as it {}: {count}\n", left.why));
                before = Some(&left.why);
            }
            text.push_str(&format!("  {}  ({})\n", left.text, left.origin));
        }
        text
    }
}

/// Returns whether `text` begins like the definition of a kind of probe that hvprobe has.
fn is_ours(text: &str) -> bool {
    let rest = text.strip_prefix(['p', 'r', 'f']);
    let rest = rest.map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    rest.is_some_and(|rest| rest.starts_with([':', ' ']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(lines: &[(&str, &str)]) -> Found {
        let mut found = Found::default();
        for (file, text) in lines {
            found.written(file, Ok(text), Expected::Nothing, "a.tc:1");
        }
        found
    }

    #[test]
    fn what_is_written_is_a_case_or_left_out_with_the_reason() {
        const FILTER: &str = "events/sched/sched_switch/filter";
        const TRIGGER: &str = "events/sched/sched_switch/trigger";
        let found = found(&[
            ("kprobe_events", "p vfs_read"),
            ("kprobe_events", "p vfs_read"),
            ("kprobe_events", ""),
            ("kprobe_events", "-:mine"),
            ("dynamic_events", "f:x vfs_read"),
            ("dynamic_events", "s:synth u64 x"),
            (FILTER, "prev_pid == 1"),
            (FILTER, "0"),
            (TRIGGER, "hist:keys=prev_pid"),
            (TRIGGER, "!hist:keys=prev_pid"),
            (TRIGGER, "traceoff if prev_pid = 1"),
            (TRIGGER, "traceoff:1"),
            ("events/sched/filter", "prev_pid == 1"),
            ("events/sched/sched_switch/enable", "1"),
            ("trace", "x"),
        ]);
        let cases: Vec<_> = found.cases.iter().map(Case::to_string).collect();
        assert_eq!(
            cases,
            [
                "kprobe_events - a.tc:1 p vfs_read",
                "dynamic_events - a.tc:1 f:x vfs_read",
                "events/sched/sched_switch/filter - a.tc:1 prev_pid == 1",
                "events/sched/sched_switch/trigger - a.tc:1 hist:keys=prev_pid",
                "events/sched/sched_switch/filter - a.tc:1 prev_pid = 1",
            ]
        );
        let left: Vec<_> = found.left.iter().map(|it| it.text.as_str()).collect();
        assert_eq!(left.len(), 6, "{left:?}");
    }
}
