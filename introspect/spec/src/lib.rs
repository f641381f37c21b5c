//! Requests of users: definitions of probes, their actions at hits, budgets for their cost, and the limits of such
//! requests.
//!
//! Nothing here depends on a kernel or a machine. Clients and the engine share these types.

mod actions;
pub mod aggregate;
mod argument;
mod budget;
mod chain;
mod column;
mod cursor;
pub mod definition;
pub mod errno;
mod error;
pub mod fetch;
pub mod histogram;
mod id;
mod item;
pub mod language;
mod limits;
pub mod line_range;
mod mechanism;
mod number;
mod parse_error;
pub mod perf_probe;
pub mod point;
pub mod predicate;
mod probe;
mod registers;
pub mod script;
pub mod shape;
mod symbol;

pub use actions::{Actions, Change, Comparison, Condition, Decision, Hold, RegisterSet, Then};
pub use argument::{Argument, Bits, Common, Source};
pub use budget::{Budget, Excess};
pub use chain::chain;
pub use column::Column;
pub use error::SpecError;
pub use id::ProbeId;
pub use item::{Base, FRAME, Fetched, Item, Memory, Pointer, Read, TextHeader};
pub use limits::{CAPTURE_MAX, CHANGES_MAX, DEADLINE_MAX, FRAMES_MAX, ITEMS_MAX, POINTERS_MAX};
pub use mechanism::Mechanism;
pub use parse_error::{ParseError, bounded};
pub use probe::ProbeSpec;
pub use registers::REGISTERS;
