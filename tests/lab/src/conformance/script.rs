//! Cases from shell scripts that write into files of tracefs, such as the kernel's tests. Understands `echo`,
//! `printf` and `ftrace_errlog_check`, functions with arguments, and variables that the script sets.
//!
//! ```text
//!   line ─► statements ─► a variable is set │ a function is called │ a file is written
//! ```
//! No command is run. A line that depends on the output of a command is left out, with the reason.

use std::collections::HashMap;

use super::cases::{Expected, Found, from_root};
use super::words::{self, Part, Statement, Word};

/// Values for variables that the kernel's tests compute while they run.
const KNOWN: [(&str, &str); 4] = [
    // The function has had several names; `ftracetest` looks up which of them the kernel has.
    ("FUNCTION_FORK", "kernel_clone"),
    // The tests take these from the symbols, or from a trace.
    ("SYMADDR", "0xffffffff81000000"),
    ("address", "ffffffff81000000"),
    ("target_func", "vfs_read"),
];

/// Maximum depth of nested function calls.
const DEEPEST: usize = 8;
/// Maximum number of lines in one quote.
const LONGEST_QUOTE: usize = 20;

/// Value of a word. If it is not known: its first unknown part, and the word with unknown parts as written.
type Value = Result<String, (String, String)>;

/// Context of a function call.
#[derive(Clone, Debug, Default)]
struct Call {
    arguments: Vec<Value>,
    /// File that the output is redirected to.
    to: Option<Value>,
    depth: usize,
}

/// State of a script while it is read.
#[derive(Debug)]
pub(super) struct Script<'a> {
    found: &'a mut Found,
    origin: String,
    variables: HashMap<String, Value>,
    functions: HashMap<String, Vec<Statement>>,
    /// Current folder, in which relative names are resolved.
    folder: Option<String>,
}

/// Reads the script `name`, whose contents are `text`.
pub(super) fn read(name: &str, text: &str, found: &mut Found) {
    let mut script = Script::new(found);
    let mut machine = Machine::Any;
    let mut lines = logical_lines(text).into_iter();
    while let Some((number, line)) = lines.next() {
        script.origin = format!("{name}:{number}");
        if let Some((function, rest)) = function(&line) {
            let body = match rest.trim().strip_suffix('}') {
                Some(whole) if !whole.trim().is_empty() => words::statements(whole),
                _ => lines
                    .by_ref()
                    .take_while(|(_, line)| !line.starts_with('}'))
                    .flat_map(|(_, line)| words::statements(&line))
                    .collect(),
            };
            script.functions.insert(function.to_owned(), body);
            continue;
        }
        if let Some(line) = machine.meant(&line) {
            script.line(line);
        }
    }
}

/// Returns the lines of a script with their numbers. A line is joined with its continuation lines.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<_> = text.lines().collect();
    let (mut all, mut at) = (Vec::new(), 0);
    while at < lines.len() {
        let (line, taken) = joined(&lines[at..]);
        all.push((at + 1, line));
        at += taken;
    }
    all
}

/// Joins the first of `lines` with its continuation lines, which follow a backslash or an open quote. Returns the
/// joined line and the number of lines that were joined.
pub(super) fn joined(lines: &[&str]) -> (String, usize) {
    let mut whole = String::new();
    for (taken, line) in (1..).zip(lines.iter().copied().take(LONGEST_QUOTE)) {
        let line = if taken == 1 { line } else { line.trim_start() };
        if let Some(part) = line.strip_suffix('\\') {
            whole.push_str(part);
            continue;
        }
        whole.push_str(line);
        if !words::is_open(&whole) {
            return (whole, taken);
        }
        whole.push('\n');
    }
    // The line does not end within `LONGEST_QUOTE` lines, so what looks like an open quote is probably none. Take
    // the line alone.
    let first = lines.first().copied().unwrap_or_default();
    (first.trim_end_matches('\\').to_owned(), 1)
}

/// Returns the name of the function whose definition `line` begins, and the text after its `{`.
fn function(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.trim_start().split_once("()")?;
    let name = name.trim_start_matches("function ").trim();
    words::is_name(name).then_some((name, rest.trim_start().trim_start_matches('{')))
}

/// Architecture that a line is for. In a `case` over `uname -m`, only the lines of the arm for x86-64 are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machine {
    Any,
    Ours,
    Others,
}

impl Machine {
    /// Returns the part of `line` that x86-64 would run, or `None` if there is no such part.
    fn meant<'l>(&mut self, line: &'l str) -> Option<&'l str> {
        let trimmed = line.trim();
        if trimmed.starts_with("case ") && trimmed.contains("uname -m") {
            *self = Self::Others;
            return None;
        }
        if *self == Self::Any {
            return Some(line);
        }
        if trimmed.starts_with("esac") {
            *self = Self::Any;
            return None;
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "|[]_*-. ".contains(c);
        let arm = trimmed
            .split_once(')')
            .filter(|(arm, _)| arm.chars().all(plain));
        let rest = match arm {
            Some((arm, rest)) => {
                *self = match arm.contains("x86_64") {
                    true => Self::Ours,
                    false => Self::Others,
                };
                rest
            }
            None => line,
        };
        let meant = (*self == Self::Ours).then_some(rest);
        if trimmed.ends_with(";;") {
            *self = Self::Others;
        }
        meant
    }
}

impl<'a> Script<'a> {
    pub(super) fn new(found: &'a mut Found) -> Self {
        Self {
            found,
            origin: String::new(),
            variables: HashMap::new(),
            functions: HashMap::new(),
            folder: None,
        }
    }

    pub(super) fn found(&mut self) -> &mut Found {
        self.found
    }

    /// Interprets a line; `origin` names its file and line number.
    pub(super) fn line_at(&mut self, origin: String, line: &str) {
        self.origin = origin;
        self.line(line);
    }

    fn line(&mut self, line: &str) {
        for statement in words::statements(line) {
            self.statement(&statement, &Call::default());
        }
    }

    fn statement(&mut self, statement: &Statement, call: &Call) {
        let assigned = statement.words.iter().map_while(Word::assignment);
        let assigned: Vec<_> = assigned
            .map(|(name, value)| (name.to_owned(), self.value(&value, call)))
            .collect();
        let words = &statement.words[assigned.len()..];
        self.variables.extend(assigned);
        let Some((command, words)) = words.split_first() else {
            return;
        };
        let to = match &statement.to {
            Some(to) => Some(self.value(to, call)),
            None => call.to.clone(),
        };
        let expected = match statement.negated {
            true => Expected::Refused,
            false => Expected::Nothing,
        };
        match command.text() {
            Some("echo") => {
                let words = words.iter().filter(|word| word.text() != Some("-n"));
                let words: Vec<_> = words.map(|word| self.value(word, call)).collect();
                self.write(to, all(words, " "), expected);
            }
            Some("printf") => match words {
                [format, text] if matches!(format.text(), Some("%s" | "%s\\n")) => {
                    let text = self.value(text, call);
                    self.write(to, text, expected);
                }
                _ => {
                    let words: Vec<_> = words.iter().map(|word| self.value(word, call)).collect();
                    let text = all(words, " ").unwrap_or_else(|(_, text)| text);
                    self.write(to, Err(("printf".to_owned(), text)), expected);
                }
            },
            // The file `functions` of the kernel's tests describes this function.
            Some("ftrace_errlog_check") => {
                if let [_, text, file, ..] = words {
                    let (text, file) = (self.value(text, call), self.value(file, call));
                    let column = text.as_ref().ok().and_then(|text| text.rfind('^'));
                    let expected = column.map_or(expected, Expected::At);
                    self.write(Some(file), text.map(|text| text.replace('^', "")), expected);
                }
            }
            Some("cd") => {
                let folder = words.first().and_then(|word| self.value(word, call).ok());
                self.folder = folder.filter(|folder| !folder.contains(".."));
            }
            Some("for") => {
                // The loop is read once, with the first value.
                if let [name, _, first, ..] = words
                    && let Some(name) = name.text()
                {
                    let value = self.value(first, call);
                    self.variables.insert(name.to_owned(), value);
                }
            }
            Some(name) => self.call(name, words, to, call),
            None => {}
        }
    }

    /// Calls the function `name`, if the script defines it. A function that contains `shift` runs once for each
    /// argument, each time without the arguments before that one.
    fn call(&mut self, name: &str, words: &[Word], to: Option<Value>, from: &Call) {
        let Some(body) = self.functions.get(name).cloned() else {
            return;
        };
        if from.depth == DEEPEST {
            return;
        }
        let arguments: Vec<_> = words.iter().map(|word| self.value(word, from)).collect();
        let is_shift = |it: &Statement| it.words.first().and_then(Word::text) == Some("shift");
        let rounds = match body.iter().any(is_shift) {
            true => arguments.len().max(1),
            false => 1,
        };
        for round in 0..rounds {
            let call = Call {
                arguments: arguments.iter().skip(round).cloned().collect(),
                to: to.clone(),
                depth: from.depth + 1,
            };
            for statement in &body {
                self.statement(statement, &call);
            }
        }
    }

    fn value(&self, word: &Word, call: &Call) -> Value {
        let parts = word.0.iter().map(|part| match part {
            Part::Text(text) => Ok(text.clone()),
            Part::Variable(name) => self.variable(name, call),
            Part::Other(text) => Err((text.clone(), text.clone())),
        });
        all(parts.collect(), "")
    }

    fn variable(&self, name: &str, call: &Call) -> Value {
        let unknown = || {
            let shown = format!("${name}");
            Err((shown.clone(), shown))
        };
        if let Ok(number) = name.parse::<usize>() {
            let argument = number.checked_sub(1).and_then(|it| call.arguments.get(it));
            return argument.cloned().unwrap_or_else(unknown);
        }
        let known = || KNOWN.iter().find(|(known, _)| *known == name);
        match (self.variables.get(name), known()) {
            (Some(Ok(value)), _) => Ok(value.clone()),
            (_, Some((_, value))) => Ok((*value).to_owned()),
            _ => unknown(),
        }
    }

    fn write(&mut self, to: Option<Value>, text: Value, expected: Expected) {
        let Some(Ok(file)) = to else {
            // The text goes into no file, or into an unknown file. In the latter case a text that looks like a
            // histogram is reported as left out.
            if let (Some(Err((why, _))), Ok(text)) = (to, text)
                && text.starts_with("hist:")
            {
                let why = format!("is for a file that is known only when the script runs ({why})");
                self.found.leave(&why, &self.origin, &text);
            }
            return;
        };
        let file = match &self.folder {
            Some(folder) if !file.contains('/') => format!("{folder}/{file}"),
            _ => file,
        };
        let text = text.map_err(|(why, text)| {
            (
                format!("needs what is known only when the script runs: {why}"),
                text,
            )
        });
        let text = match &text {
            Ok(text) => Ok(text.as_str()),
            Err((why, text)) => Err((why.as_str(), text.as_str())),
        };
        let file = from_root(file.trim_start_matches("./"));
        self.found.written(file, text, expected, &self.origin);
    }
}

/// Joins `values` with `between`. If a value is unknown, returns the first unknown part with the joined text.
fn all(values: Vec<Value>, between: &str) -> Value {
    let why = values.iter().find_map(|value| value.as_ref().err());
    let why = why.map(|(why, _)| why.clone());
    let texts: Vec<_> = values
        .into_iter()
        .map(|value| value.unwrap_or_else(|(_, text)| text))
        .collect();
    let text = texts.join(between);
    match why {
        Some(why) => Err((why, text)),
        None => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::super::cases::Case;
    use super::*;

    fn check(text: &str, expect: Expect) {
        let mut found = Found::default();
        read("a.tc", text, &mut found);
        let cases: Vec<_> = found.cases.iter().map(Case::to_string).collect();
        let text = format!("{}\n{}", cases.join("\n"), found.left_out());
        expect.assert_eq(&text);
    }

    #[test]
    fn variables_are_expanded_where_they_have_values() {
        check(
            "PLACE=$FUNCTION_FORK\n\
             ADDR=0x`grep x y`\n\
             echo \"p:mine ${PLACE}+4 \\$arg1\" > kprobe_events\n\
             ! echo p $PLACE $unknown >> kprobe_events\n\
             echo p $ADDR > kprobe_events\n\
             echo 'hist:keys=pid' > $trigger\n\
             echo $x > trace\n",
            expect![[r#"
                kprobe_events - a.tc:3 p:mine kernel_clone+4 $arg1
                left out, as it is for a file that is known only when the script runs ($trigger): 1
                  hist:keys=pid  (a.tc:6)
                left out, as it needs what is known only when the script runs: $ADDR: 1
                  p $ADDR  (a.tc:5)
                left out, as it needs what is known only when the script runs: $unknown: 1
                  p kernel_clone $unknown  (a.tc:4)
            "#]],
        );
    }

    #[test]
    fn functions_are_called_with_their_arguments() {
        check(
            "check_error() { # command-with-error-pos-by-^\n\
             \x20   ftrace_errlog_check 'trace_kprobe' \"$1\" 'kprobe_events'\n\
             }\n\
             good()\n\
             {\n\
             \x20 while [ \"$1\" ]; do\n\
             \x20   echo \"p f $1\" > kprobe_events\n\
             \x20   shift 1\n\
             \x20 done;\n\
             }\n\
             gen() { echo \"p:$1 f\"; }\n\
             check_error 'p ^foo'\t# BAD\n\
             good \"\\$stack\" \"@x+10\" \\\n\
             \x20    %ax\n\
             for i in 64 32; do\n\
             \x20 gen e$i > kprobe_events\n\
             done\n",
            expect![[r#"
                kprobe_events 2 a.tc:12 p foo
                kprobe_events - a.tc:13 p f $stack
                kprobe_events - a.tc:13 p f @x+10
                kprobe_events - a.tc:13 p f %ax
                kprobe_events - a.tc:16 p:e64 f
            "#]],
        );
    }

    #[test]
    fn of_several_machines_ours_is_meant() {
        check(
            "case `uname -m` in\n\
             x86_64|i[3456]86)\n\
             \x20 REG=%ax\n\
             \x20 OFFSET=5;;\n\
             aarch64) REG=%x0 ;;\n\
             *)\n\
             \x20 REG=%r0\n\
             esac\n\
             echo \"p f+$OFFSET $REG\" > kprobe_events\n",
            expect![[r#"
                kprobe_events - a.tc:9 p f+5 %ax
            "#]],
        );
    }

    #[test]
    fn lines_go_on_behind_a_backslash_and_in_quotes() {
        check(
            "echo 'hist:keys=pid:\\\n\
             \x20    vals=prio if \\\n\
             \x20    comm==\"x\"' > \\\n\
             \x20 /sys/kernel/tracing/events/sched/sched_wakeup/trigger\n\
             cd /sys/kernel/debug/tracing/events/sched/sched_switch\n\
             echo prev_pid == 0 > filter\n",
            expect![[r#"
                events/sched/sched_wakeup/trigger - a.tc:1 hist:keys=pid:vals=prio if comm=="x"
                events/sched/sched_switch/filter - a.tc:6 prev_pid == 0
            "#]],
        );
    }
}
