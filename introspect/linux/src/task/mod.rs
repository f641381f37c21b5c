//! Reads the task that a hit belongs to from the guest's `task_struct`.
//!
//! Invariant: every read is bounds-checked, and a failed one yields "no task", never an error: a hit is an
//! event even if the guest's own structures are nonsense.

mod current;
mod evidence;

pub use current::{COMM_LEN, Task};
pub use evidence::TaskUnknown;
