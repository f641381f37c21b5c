//! Probe definitions: lines in which users say what to probe.
//!
//! The language is that of the kernel's `kprobe_events` (Documentation/trace/kprobetrace.rst), followed by an
//! optional filter:
//!
//! ```text
//! definition = probe blanks target ["%return"] {blanks ARGUMENT} [blanks "if" blanks FILTER]
//! probe      = "p" [":" NAME] | "r" [MAXACTIVE] [":" NAME] | "f" [MAXACTIVE] [":" NAME]
//! NAME       = identifier | identifier "/" [identifier]    (group and event)
//! target     = [MODULE ":"] SYMBOL ["+" OFFSET] | [MODULE ":"] PATTERN | "0x" HEX
//! OFFSET, MAXACTIVE = decimal | "0x" HEX
//! ```
//!
//! `f` is like `p` at a function's entry, but its event has the name that the kernel gives to the events of
//! function probes. `r` and `%return` both select a return probe; with `f`, a MAXACTIVE needs `%return`. `%return`
//! follows a SYMBOL or a PATTERN. The offset of a return probe is 0, unless it counts from the [beginning of the
//! kernel's text](BEGINNINGS). A PATTERN, as in ftrace and perf, matches many functions: `*`, `?` and `[...]` mean
//! the same as in a shell. With a PATTERN, there is no offset, and NAME can only be a group. ARGUMENT and FILTER
//! are those of [`fetch`](crate::fetch). Blanks are spaces and tabs. They may also surround the whole definition,
//! and may be missing between `if` and a `(` or `!`. Invariants: printing a [`Definition`] that [`parse()`]
//! returned, and parsing the result, gives the same definition. All other constructs of the kernel's language are
//! refused, never misread; the error names the construct.

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
