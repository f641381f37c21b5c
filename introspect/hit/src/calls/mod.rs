//! Calls in flight: calls whose entry a return probe has seen, and that will return through the trampoline.
//!
//! Every call is remembered in an *instance* of its probe ([`Pool`]), and the instances of one task of the guest
//! form a list, newest first, at the task's *cell*. Invariants:
//!
//! - Every entry carries the real return address of its frame. Several entries of one frame (several probes on a
//!   function, or a function that left by a tail call to another probed one) are neighbours in the list and
//!   carry the same address, so any of them may be removed.
//! - Of the entries on one stack, a newer one has a lower slot, or the same slot if it belongs to the same frame.
//! - A cell is changed only by the thread that has it open. [`Calls::open`] acquires what the last holder
//!   released, so a task may move from one vCPU to another between two operations.
//! - A task with entries has exactly one cell, in the window of cells that its address hashes to. A cell without
//!   entries keeps the address of its task, but another task may take it over.
//!
//! ```text
//!              open(T): exchange            drop, no entries
//!   empty ───────────────────────▶ T busy ──────────────────▶ T idle
//!                                  ▲    │ ▲                     │
//!              open(T): exchange   │    │ └─────────────────────┘ open(any): exchange
//!                                  └──  T live ◀── drop, entries
//! ```
//!
//! A task of a sound guest runs on one vCPU at a time, so its operations never overlap, and the guest's own
//! scheduler orders them. A guest that breaks this rule finds its cell busy and loses the call, nothing else. No
//! operation waits for another vCPU, and none allocates, except that an [`MaxActive::Auto`] pool may grow.
//!
//! # Model checking
//!
//! Loom checks the orderings by trying all interleavings: `tests/loom_calls.rs` compiles this same source with
//! loom's atomics in `crate::atomics`.

mod cell;
mod frame;
mod pool;
mod record;
mod table;
mod task;

pub use frame::{Fate, Frame, LiveCall, Removed};
pub use pool::{AUTO_MAX, FIXED_MAX, MaxActive, Pool, PoolError};
pub use record::{DATA_MAX, Entry};
pub use table::{CELLS, Calls};
pub use task::{Call, Ended, ReturnAddress, TaskCalls};
