//! Files of definitions: lines in the format of `kprobe_events`, and commands that write the filters and triggers
//! of the defined events.
//!
//! Each line is a definition, as in the kernel (`trace_parse_run_command` in kernel/trace/trace.c), a command that
//! writes a definition into `kprobe_events`, or a command that writes into a file of an event that an earlier line
//! defines. A `#` begins a comment everywhere except in the quoted text of `echo`. Empty lines are skipped.

use std::collections::HashMap;

use super::line::{Definition, Kind};
use super::parse::parse;
use super::written::{self, Event, To, Written};
use crate::fetch::read_filter_at;
use crate::histogram::read_histogram;
use crate::parse_error::{ParseError, error};

/// Error for an event that has both a filter in its `filter` file and a histogram. In the kernel, such a filter
/// keeps hits from the trace, but not from the histogram.
const BOTH: &str = "an event is filtered or counted; write `if FILTER` behind the histogram";
/// Prefix of a histogram's trigger.
const HIST: &str = "hist:";

/// Contents of a file of definitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Definitions, each with the filter that the file writes for it.
    pub definitions: Vec<Line>,
    /// Histograms.
    pub histograms: Vec<Trigger>,
}

/// A definition and its line number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Line number, from 1.
    pub number: usize,
    /// The definition.
    pub definition: Definition,
}

/// A histogram of an event and its position in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// Line number, from 1.
    pub number: usize,
    /// The whole line.
    pub line: String,
    /// Column in the line at which the histogram begins.
    pub column: usize,
    /// The event, with its group.
    pub event: String,
    /// The histogram's trigger as written.
    pub histogram: String,
}

impl Trigger {
    /// Converts an error in the histogram into an error in the file, at this line.
    #[must_use]
    pub fn refused(&self, error: ParseError) -> FileError {
        FileError {
            number: self.number,
            text: self.line.clone(),
            source: behind(self.column, error),
        }
    }
}

/// Error in a file of definitions or in a script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {number}: {source}")]
pub struct FileError {
    /// Line number, from 1.
    pub number: usize,
    /// The line.
    pub text: String,
    /// The error in that line.
    pub source: ParseError,
}

impl FileError {
    /// Formats the line with a caret under the error, as two lines that are safe to print.
    #[must_use]
    pub fn render(&self) -> String {
        self.source.render(&self.text)
    }
}

/// Reads a file of definitions.
///
/// # Errors
/// Returns the error of the first invalid line. Valid lines are empty lines, comments, definitions, and commands
/// that write a definition, a filter or a trigger. Removing an event (`-:EVENT`) is also an error, because a file
/// lists the events that are to exist.
pub fn parse_file(text: &str) -> Result<Events, FileError> {
    let mut reading = Reading::default();
    for (number, text) in (1..).zip(text.lines()) {
        if let Err(source) = reading.read(number, text) {
            let text = text.to_owned();
            return Err(FileError {
                number,
                text,
                source,
            });
        }
    }
    Ok(reading.events)
}

/// State of a file while it is read.
#[derive(Default)]
struct Reading {
    events: Events,
    /// Events for which a line has written a filter.
    filtered: Vec<String>,
    /// Line numbers of the definitions. In each key, the name is replaced by the event's full path, so that
    /// definitions that differ only in how they spell that path are equal.
    defined: HashMap<Definition, usize>,
    /// Index of the first definition of each event.
    first: HashMap<String, usize>,
}

impl Reading {
    fn read(&mut self, number: usize, line: &str) -> Result<(), ParseError> {
        if !written::is_written(line) {
            let (text, _) = line.split_once('#').unwrap_or((line, ""));
            return match text.trim() {
                "" => Ok(()),
                _ => self.define(number, text),
            };
        }
        let Written { to, column, text } = written::read(line)?;
        match to {
            To::Definitions => {
                let read = self.define(number, text);
                read.map_err(|error| behind(column, error))
            }
            To::Filter(event) => self.filter(event, column, text),
            To::Trigger(event) => {
                let event = self.checked_trigger(event, column, text)?;
                self.events.histograms.push(Trigger {
                    number,
                    line: line.to_owned(),
                    column,
                    event,
                    histogram: text.to_owned(),
                });
                Ok(())
            }
        }
    }

    fn define(&mut self, number: usize, text: &str) -> Result<(), ParseError> {
        let definition = parse(text)?;
        let path = definition.event_path();
        let same = Definition {
            name: Some(path.clone()),
            ..definition.clone()
        };
        if let Some(line) = self.defined.insert(same, number) {
            let message = format!("There is already the exact same probe event, in line {line}");
            return error(definition.marks.target.0, message);
        }
        let index = self.events.definitions.len();
        let first = *self.first.entry(path).or_insert(index);
        if let Some(first) = self.events.definitions.get(first) {
            check_alike(first, &definition, text)?;
        }
        self.events.definitions.push(Line { number, definition });
        Ok(())
    }

    fn filter(&mut self, event: Event<'_>, column: usize, text: &str) -> Result<(), ParseError> {
        let definitions = self.of(event)?;
        let filter = read_filter_at(column, text)?;
        if definitions.iter().any(|it| it.filter.is_some()) {
            let message = format!("`{}` has a filter already", event.path);
            return error(event.column, message);
        }
        for definition in definitions {
            definition.filter = Some(filter.clone());
        }
        if self
            .events
            .histograms
            .iter()
            .any(|it| it.event == event.path)
        {
            return error(event.column, BOTH);
        }
        self.filtered.push(event.path.to_owned());
        Ok(())
    }

    /// Checks that `event` can have the histogram's trigger `text`. Returns the event's path.
    fn checked_trigger(
        &mut self,
        event: Event<'_>,
        column: usize,
        text: &str,
    ) -> Result<String, ParseError> {
        self.of(event)?;
        if self.filtered.iter().any(|it| it == event.path) {
            return error(event.column, BOTH);
        }
        if text.starts_with('!') {
            return error(
                column,
                "not supported: removing a trigger; leave out both lines",
            );
        }
        if !text.starts_with(HIST) {
            return error(column, "of triggers there is `hist:keys=...` only");
        }
        read_histogram(text).map_err(|error| behind(column, error))?;
        Ok(event.path.to_owned())
    }

    /// Returns the definitions of `event`.
    fn of(&mut self, event: Event<'_>) -> Result<Vec<&mut Definition>, ParseError> {
        let lines = self.events.definitions.iter_mut();
        let all = lines.map(|line| &mut line.definition);
        let found: Vec<_> = all
            .filter(|definition| definition.event_path() == event.path)
            .collect();
        match found.is_empty() {
            true => error(
                event.column,
                "No such file or directory; no line before this defines such an event",
            ),
            false => Ok(found),
        }
    }
}

/// Checks that `next`, whose text is `text`, can add a probepoint to the event that `other` defines. Both must be
/// the same kind of probe, and their arguments must have the same names and types (`append_trace_kprobe` in
/// kernel/trace/trace_kprobe.c).
fn check_alike(other: &Line, next: &Definition, text: &str) -> Result<(), ParseError> {
    let (number, other) = (other.number, &other.definition);
    let is_return = |it: &Definition| matches!(it.kind, Kind::Return { .. });
    if is_return(other) != is_return(next) {
        let column = text.len() - text.trim_start().len();
        let message = format!("Probe type is different from existing probe, in line {number}");
        return error(column, message);
    }
    let named = |it: &Definition| {
        let arguments = it.arguments.iter().enumerate();
        let named = arguments.map(|(before, it)| (it.shown_name(before), it.ty.clone()));
        named.collect::<Vec<_>>()
    };
    let (theirs, ours) = (named(other), named(next));
    let most = theirs.len().max(ours.len());
    // An argument without a type gets its type from the kernel's type information. It may be the same type as the
    // other argument's.
    let alike = |index: &usize| match (theirs.get(*index), ours.get(*index)) {
        (Some((name, ty)), Some((other, other_ty))) => {
            name == other && (ty.is_none() || other_ty.is_none() || ty == other_ty)
        }
        _ => false,
    };
    if let Some(differs) = (0..most).find(|index| !alike(index)) {
        let column = next.arguments.get(differs).map(|it| it.column.0);
        let message =
            format!("Argument type or name is different from existing probe, in line {number}");
        return error(column.unwrap_or(text.trim_end().len()), message);
    }
    Ok(())
}

/// Adds `column`, at which the parsed text begins in its line, to the column of `error`.
fn behind(column: usize, mut error: ParseError) -> ParseError {
    error.column += column;
    error
}

#[cfg(test)]
mod tests;
