//! Probes without exits. A jump takes the place of the probed instructions. It leads to generated code that writes
//! a record into a ring shared with the host, runs copies of the displaced instructions, and jumps back.
//!
//! ```text
//!   function          detour (Recorder)                               ring
//!   ────────          ──────────────────────────────────────          ────
//!   at: jmp ────────▶ save flags and 4 registers
//!                     would a stack word leave the page? ─▶ escape: restore; int3
//!                     can memory be read here? ─ no ──────▶ escape
//!                     is the task's own stack copied whole? ▶ escape
//!                     each member: conditions ─ no ─▶ vetoed += 1
//!                                  reserve cells ─ full ─▶ out room port ─ more ─▶ reserve again
//!                                                       └────────────────┴ none ─▶ lost += 1
//!                                  fill, read memory, copy the
//!                                  stack, publish ───────────────────▶ record
//!                                  watermark passed ─▶ out doorbell
//!                     restore
//!                     tail: copies of the displaced instructions
//!   end: ◀─────────── jmp
//! ```
//!
//! Invariants:
//!
//! - At `tail`, every register, every flag, and the stack at and above the stack pointer are as they were at the
//!   probepoint.
//! - x87, SSE and AVX state is never touched.
//! - No memory is read that could fault, except by the copies and by the guest's own code for such reads
//!   (`load.rs`, `text.rs`).
//! - No lock is taken.
//!
//! So a detour may be interrupted anywhere, even by an NMI whose handler runs into the same detour.
//!
//! The addresses of a detour, and of the memory that it refers to, are the sign extension of their lower 32 bits:
//! they are in the upper 2 GiB of the address space, where the kernel is (or in the lower 2 GiB, in tests).
//!
//! [`Span`] says what a jump displaces and where it may lead; [`Recorder`] makes detours; [`Layout`] describes
//! their records. For return probes, [`ReturnCode`] makes the code to which calls return, and [`InstanceLayout`]
//! describes the data of the calls in flight.

mod capture;
mod cells;
mod cold;
mod emit;
mod error;
mod fetching;
mod instance;
mod load;
mod record;
mod recorder;
mod returns;
mod span;
mod stack;
mod stack_copy;
mod text;

pub use capture::{BY_HOST, EntryCapture, STACK_WORDS_MAX};
pub use cells::{CELL, MAX_RECORD_CELLS, Malformed, RECORD_CELLS};
pub use error::BuildError;
pub use fetching::{Fetching, Readers};
pub use instance::{ENTERED_MAX, Instance, InstanceLayout, Instances};
pub use record::{Call, Capture, Header, Layout, Record, Ring, StackWords, Task, TaskFields};
pub use recorder::{Detour, Member, Part, Recorder};
pub use returns::{Exit, ReturnCode, STUB};
pub use span::{JUMP, OutOfReach, Span, Unfit};
pub use stack::{STACK_MAX, StackCopy, StackFields};

#[cfg(test)]
mod tests;
