//! Probes without exits: a jump in place of the probed instructions leads to generated code that
//! records what was asked for into a ring shared with the host, carries out copies of the displaced
//! instructions, and jumps back.
//!
//! ```text
//!   function          detour (Recorder)                               ring
//!   ────────          ──────────────────────────────────────          ────
//!   at: jmp ────────▶ save flags and 4 registers
//!                     would a stack word leave the page? ─▶ escape: restore; int3
//!                     each member: conditions ─ no ─▶ vetoed += 1
//!                                  reserve cells ─ full ─▶ lost += 1
//!                                  fill, publish ────────────────────▶ record
//!                                  watermark passed ─▶ out doorbell
//!                     restore
//!                     tail: copies of the displaced instructions
//!   end: ◀─────────── jmp
//! ```
//!
//! What a detour keeps true: at `tail` every register, every flag and all of the stack at and above
//! the stack pointer are as they were at the probepoint; x87, SSE and AVX state is never touched; no
//! memory is read that could fault, but by the copies; no lock is taken. So it may be interrupted
//! anywhere, by an NMI whose handler runs into the same detour too.
//!
//! The memory a detour refers to, and the detour, lie where 32 bits, sign-extended, tell the address:
//! the upper 2 GiB of the address space, where the kernel is (or the lower 2 GiB, in tests).
//!
//! [`Span`] tells what a jump displaces and where it may lead; [`Recorder`] makes detours;
//! [`Layout`] is what their records look like. [`ReturnCode`] and [`Instances`] are the same for
//! return probes.

mod emit;
mod instance;
mod record;
mod recorder;
mod returns;
mod span;

pub use instance::{BY_HOST, ENTERED_MAX, EntryCapture, Instance, InstanceLayout, Instances};
pub use record::{
    CELL, Call, Capture, Header, Layout, MAX_RECORD_CELLS, Malformed, Record, Ring,
    STACK_WORDS_MAX, StackWords, Task, TaskFields,
};
pub use recorder::{Detour, Member, Part, Recorder};
pub use returns::{Exit, ReturnCode, STUB};
pub use span::{JUMP, OutOfReach, Span, Unfit};

use crate::Gva;

/// Why no code can be made.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BuildError {
    /// An address that generated code cannot name.
    #[error("{what} at {at} is not within the upper or lower 2 GiB, where detours reach it")]
    Unreachable {
        /// What is there.
        what: &'static str,
        /// Its address.
        at: Gva,
    },
    /// A ring of an impossible size.
    #[error(
        "a ring of {capacity} cells with its watermark at {watermark}; the number of cells must be a \
         power of two from 32 to 2^24, and the watermark in between"
    )]
    Ring {
        /// How many cells it has.
        capacity: u32,
        /// At how many the doorbell rings.
        watermark: u32,
    },
    /// More sources than records can tell apart.
    #[error("records cannot name source {number}, only those below 2^24")]
    Source {
        /// Which one.
        number: u32,
    },
    /// Too many words from the stack.
    #[error("{count} words of the stack; at most {STACK_WORDS_MAX} are possible")]
    TooManyWords {
        /// How many were asked for.
        count: usize,
    },
    /// A word that is never in the stack pointer's page.
    #[error("word {index} above the stack pointer lies a page or more away from it")]
    FarWord {
        /// Which one.
        index: u16,
    },
    /// Words of the stack at a return.
    #[error("stack words cannot be read without exits when a function returns, only at its entry")]
    StackAtReturn,
    /// Return instances in impossible number.
    #[error(
        "{count} return instances whose stubs have numbers from {first} on; between 1 and 65536 \
         instances, and stub numbers below 2^23, are possible"
    )]
    Instances {
        /// How many.
        count: u32,
        /// The number of the first one's stub.
        first: u32,
    },
    /// A copy or a jump does not reach its target from where the code was to lie.
    #[error("{target} is beyond ±2 GiB of the detour at {at}")]
    OutOfReach {
        /// What was to be reached.
        target: Gva,
        /// Where the detour was to be.
        at: Gva,
    },
    /// The assembler refused something.
    #[error("cannot assemble the detour")]
    Assemble(#[from] iced_x86::IcedError),
}

#[cfg(test)]
mod tests;
