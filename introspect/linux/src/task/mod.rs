//! Reads from the guest's `task_struct` which task a hit belongs to.
//!
//! Invariant: every read is bounds-checked. A read that fails yields "no task", never an error, because a hit is an
//! event even if the guest's own structures are nonsense.

mod current;
mod evidence;

pub use current::{COMM_LEN, Task};
pub use evidence::TaskUnknown;
