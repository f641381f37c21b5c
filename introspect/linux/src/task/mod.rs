//! The task a hit belongs to, read from the guest's `task_struct`.
//!
//! Invariant: every read is bounds-checked and a failed one yields "no task", never an error: a
//! hit is an event even when the guest's own structures are nonsense.

mod current;
mod evidence;

pub use current::{COMM_LEN, Task};
pub use evidence::TaskUnknown;
