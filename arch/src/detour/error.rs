//! Why no code can be made.

use super::capture::STACK_WORDS_MAX;
use super::cells::{MAX_RECORD_CELLS, RECORD_CELLS};
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
    /// Memory at a return.
    #[error("memory cannot be read without exits when a function returns")]
    FetchAtReturn,
    /// The stack in a ring of few cells.
    #[error(
        "a stack takes up to {MAX_RECORD_CELLS} cells, which a ring of {capacity} has no room for"
    )]
    RingForStacks {
        /// How many cells the ring has.
        capacity: u32,
    },
    /// A text that no pointer leads to.
    #[error("a text is behind a pointer")]
    TextOfNothing,
    /// Too many items that are read of memory.
    #[error("{count} items are read; a record has bits for 32")]
    TooManyItems {
        /// How many were asked for.
        count: usize,
    },
    /// A record of more cells than there are.
    #[error("a record of {words} words is too large for {RECORD_CELLS} cells")]
    TooLarge {
        /// How many words it would have.
        words: usize,
    },
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
