//! Types of a kernel and of its modules, from BTF.
//!
//! Invariants: nothing in the data is trusted. Ids and offsets are checked, and loops are bounded. Nonsense is left
//! out or shown as bytes; it never causes a panic or unbounded work.

mod error;
mod format;
mod functions;
mod kinds;
mod members;
mod names;
mod places;
mod print;
mod shape;
mod table;
#[cfg(test)]
mod tests;

pub use error::{BtfError, PrototypeError};
pub use functions::{Parameter, Prototype};
pub use kinds::{Argument, Enumerators, Field, Int, Kind, Members, Parameters, Value};
pub use members::Member;
pub(crate) use members::Structures;
pub use places::{Place, Returned};
pub use shape::Limits;
pub use table::{TypeId, Types};
