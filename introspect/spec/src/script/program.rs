//! A compiled script: probes, histograms, and the actions at their events.

use std::num::NonZeroU64;

use super::format::Format;
use super::syntax::{Builtin, MapFunction};
use crate::definition::Definition;
use crate::parse_error::ParseError;

/// Compiled script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Probes.
    pub probes: Vec<Planted>,
    /// Maps, sorted by name.
    pub maps: Vec<Map>,
    /// Actions at the start.
    pub begin: Vec<Action>,
    /// Actions at the end.
    pub end: Vec<Action>,
    /// Intervals in milliseconds, with their actions.
    pub intervals: Vec<(u64, Vec<Action>)>,
    /// Number of the script's probes that are not planted in the guest: `BEGIN`, `END` and intervals.
    pub others: usize,
}

/// Probe of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planted {
    /// Definition as it is sent to the server.
    pub written: Written,
    /// Parsed definition.
    pub definition: Definition,
    /// Whether the probe records the kernel's stack.
    pub stacks: bool,
    /// Actions at each hit, except for counting.
    pub actions: Vec<Action>,
}

/// Action of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Prints a line.
    Printf {
        /// Format of the line.
        format: Format,
        /// Values of the format's directives.
        values: Vec<Said>,
    },
    /// Prints a map.
    Print {
        /// Position of the map in the program.
        map: usize,
        /// Number of greatest entries to print; all when absent.
        top: Option<u64>,
    },
    /// Empties a map.
    Clear {
        /// Position of the map in the program.
        map: usize,
    },
    /// Prints the time in this format.
    Time(String),
    /// Ends the script.
    Exit,
}

/// Value that is printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Number.
    Number(i64),
    /// Text.
    Text(String),
    /// Value that every hit has.
    Builtin(Builtin),
    /// Argument with this name.
    Argument(String),
    /// Symbol at the address in the argument with this name.
    Symbol(String),
    /// Number divided, rounded towards zero.
    Divided {
        /// Dividend.
        of: Box<Said>,
        /// Divisor.
        by: NonZeroU64,
    },
}

/// Map of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Name, without the `@`.
    pub name: String,
    /// Result that is printed for each entry.
    pub aggregate: MapFunction,
    /// Histograms that provide the entries.
    pub counted: Vec<Counted>,
}

/// Histogram that provides entries of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Text of the histogram.
    pub histogram: Written,
    /// Counted probes, by their positions in the program.
    pub probes: Vec<usize>,
    /// Rules by which the histogram's keys become the keys of the map's entries.
    pub keys: Vec<KeyPart>,
}

/// Part of the key of a map's entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// Constant number.
    Number(i64),
    /// Constant text.
    Text(String),
    /// Key of the histogram at this position.
    Key(usize),
    /// Symbol at the address in this key of the histogram.
    Symbol(usize),
    /// Function of the probe in this key of the histogram.
    Function(usize),
    /// Probe in this key of the histogram, in the syntax of scripts.
    Probe(usize),
}

/// Text that was generated from a script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Generated text.
    pub text: String,
    /// Origins of the parts of the text.
    places: Vec<Place>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    /// Column of the part in the text.
    at: usize,
    /// Number of the part's characters if the part is a copy from the script, else 0.
    same: usize,
    /// Column in the script.
    column: usize,
}

impl Written {
    /// Appends text that was generated from the script's `column`.
    pub(super) fn push(&mut self, column: usize, text: &str) {
        self.push_place(column, text, 0);
    }

    /// Appends text that is copied from the script's `column`.
    pub(super) fn push_same(&mut self, column: usize, text: &str) {
        self.push_place(column, text, text.chars().count());
    }

    fn push_place(&mut self, column: usize, text: &str, same: usize) {
        self.places.push(Place {
            at: self.text.chars().count(),
            same,
            column,
        });
        self.text.push_str(text);
    }

    /// Converts an error in this text to one in the script.
    #[must_use]
    pub fn in_script(&self, error: ParseError) -> ParseError {
        let before = self.places.iter().rev().find(|it| it.at <= error.column);
        let column = before.or(self.places.first()).map_or(0, |place| {
            place.column + (error.column.saturating_sub(place.at)).min(place.same)
        });
        ParseError {
            column,
            message: error.message,
        }
    }
}
