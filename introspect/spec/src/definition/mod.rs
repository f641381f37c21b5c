//! Probe definitions: the line in which a user says what to probe.
//!
//! The language is that of the kernel's `kprobe_events` (Documentation/trace/kprobetrace.rst), with a
//! filter behind it:
//!
//! ```text
//! definition = probe blanks target ["%return"] {blanks ARGUMENT} [blanks "if" blanks FILTER]
//! probe      = "p" [":" NAME] | "r" [MAXACTIVE] [":" NAME] | "f" [MAXACTIVE] [":" NAME]
//! NAME       = identifier | identifier "/" [identifier]    (group and event)
//! target     = [MODULE ":"] SYMBOL ["+" OFFSET] | [MODULE ":"] PATTERN | "0x" HEX
//! OFFSET, MAXACTIVE = decimal | "0x" HEX
//! ```
//!
//! `f` is `p` at a function, whose event has the name that the kernel gives those of function probes.
//! `r` and `%return` both ask for a return probe; `%return` belongs to a symbol, and the offset of
//! a return probe is 0, unless it counts from where the kernel's [text begins](BEGINNINGS). A
//! PATTERN, as ftrace and perf have it, stands for many functions: `*`, `?` and `[...]` mean what
//! they mean to a shell; it has neither an offset nor the NAME of an event. ARGUMENT and FILTER are those of
//! [`fetch`](crate::fetch). Blanks are spaces and tabs, also around the whole. What is kept true:
//! the printed form of a [`Definition`] that came out of [`parse`] parses to that same definition;
//! everything else of that language is refused by name, never read as something it is not.

mod file;
mod line;
mod names;
mod parse;
mod pattern;
#[cfg(test)]
mod tests;
mod written;

pub use file::{Events, FileError, Line, Trigger, parse_file};
pub use line::{BEGINNINGS, Definition, Kind, Marks, Target, event_path};
pub use names::{KERNEL, is_event_name, is_symbol_name};
pub(crate) use parse::begins_filter;
pub use parse::parse;
pub(crate) use pattern::{is_pattern, read_pattern};
