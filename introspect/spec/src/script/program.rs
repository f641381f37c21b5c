//! What a script comes to: probes, histograms, and what is printed of their events.

use std::num::NonZeroU64;

use super::format::Format;
use super::syntax::{Builtin, Told};
use crate::definition::Definition;
use crate::parse_error::ParseError;

/// A script as it is carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The probes.
    pub probes: Vec<Planted>,
    /// The maps, by name.
    pub maps: Vec<Map>,
    /// What is done before everything else.
    pub begin: Vec<Action>,
    /// What is done behind everything else.
    pub end: Vec<Action>,
    /// What is done every so many milliseconds.
    pub intervals: Vec<(u64, Vec<Action>)>,
    /// How many probes a user counts that are none in the guest: `BEGIN`, `END` and intervals.
    pub others: usize,
}

/// A probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planted {
    /// Its definition, as it is sent.
    pub written: Written,
    /// The same, read.
    pub definition: Definition,
    /// Whether it records the kernel's stack.
    pub stacks: bool,
    /// What is done at each of its hits, but for counting.
    pub actions: Vec<Action>,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A line is printed.
    Printf {
        /// How.
        format: Format,
        /// What stands in the places of its directives.
        values: Vec<Said>,
    },
    /// A map is printed.
    Print {
        /// Its position among the maps.
        map: usize,
        /// How many entries, of the greatest; all when absent.
        top: Option<u64>,
    },
    /// A map is emptied.
    Clear {
        /// Its position among the maps.
        map: usize,
    },
    /// The time is printed.
    Time(String),
    /// The script ends.
    Exit,
}

/// A value that is printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
    /// What every hit has.
    Builtin(Builtin),
    /// The argument of that name.
    Argument(String),
    /// The symbol at the address in the argument of that name.
    Symbol(String),
    /// A number divided, towards zero.
    Divided {
        /// Which.
        of: Box<Said>,
        /// By what.
        by: NonZeroU64,
    },
}

/// A map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Its name, without the `@`.
    pub name: String,
    /// What is told of its entries.
    pub told: Told,
    /// Where they come from.
    pub counted: Vec<Counted>,
}

/// A histogram that a map has entries of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// What is counted by what.
    pub histogram: Written,
    /// Of which probes, by their positions in the program.
    pub probes: Vec<usize>,
    /// The keys of the map's entries.
    pub keys: Vec<KeyPart>,
}

/// A key of a map's entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// A number that is always the same.
    Number(i64),
    /// A text that is always the same.
    Text(String),
    /// The key of the histogram at this position.
    Key(usize),
    /// The symbol at the address in that key.
    Symbol(usize),
    /// The function of the probe in that key.
    Function(usize),
    /// The probe in that key, as it is written.
    Probe(usize),
}

/// A text that was made of a script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The text.
    pub text: String,
    /// Where its parts come from.
    places: Vec<Place>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    /// Where the part begins.
    at: usize,
    /// How many of its characters are those of the script.
    same: usize,
    /// Where it begins in the script.
    column: usize,
}

impl Written {
    /// Appends what is the script's `column` in other words.
    pub(super) fn push(&mut self, column: usize, text: &str) {
        self.push_place(column, text, 0);
    }

    /// Appends what stands at the script's `column`.
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

    /// An error in this text, as one in the script.
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

/// What the name of the argument begins with by which a probe's position in its program is known: a
/// pattern's probes have no names of their own.
const MARK: &str = "script_";

/// The argument that tells the probe at `position`.
pub(super) fn mark(position: usize) -> String {
    format!("{MARK}{position}=\\{position}:u32")
}

/// The position in its program of a probe with an argument of that `name`, if it is the one that tells.
#[must_use]
pub fn position(name: &str) -> Option<usize> {
    name.strip_prefix(MARK)?.parse().ok()
}
