//! Errors in generating code.

use super::capture::STACK_WORDS_MAX;
use super::cells::{MAX_RECORD_CELLS, RECORD_CELLS};
use crate::Gva;

/// Why code cannot be generated.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BuildError {
    /// An address that generated code cannot encode.
    #[error("{what} at {at} is not within the upper or lower 2 GiB, where detours reach it")]
    Unreachable {
        /// Name of what is at the address.
        what: &'static str,
        /// The address.
        at: Gva,
    },
    /// A ring of an impossible size.
    #[error(
        "a ring of {capacity} cells with its watermark at {watermark}; the number of cells must be a \
         power of two from 32 to 2^24, and the watermark in between"
    )]
    Ring {
        /// Number of cells of the ring.
        capacity: u32,
        /// Number of used cells at which the doorbell rings.
        watermark: u32,
    },
    /// A source with a number too large for a record.
    #[error("records cannot name source {number}, only those below 2^24")]
    Source {
        /// Number of the source.
        number: u32,
    },
    /// Too many words from the stack.
    #[error("{count} words of the stack; at most {STACK_WORDS_MAX} are possible")]
    TooManyWords {
        /// Number of words requested.
        count: usize,
    },
    /// A stack word so far from the stack pointer that it is never in the same page.
    #[error("word {index} above the stack pointer lies a page or more away from it")]
    FarWord {
        /// Number of the word.
        index: u16,
    },
    /// Stack words requested at a return.
    #[error("stack words cannot be read without exits when a function returns, only at its entry")]
    StackAtReturn,
    /// Memory requested at a return.
    #[error("memory cannot be read without exits when a function returns")]
    FetchAtReturn,
    /// A copy of the stack requested in a ring with too few cells.
    #[error(
        "a stack takes up to {MAX_RECORD_CELLS} cells, which a ring of {capacity} has no room for"
    )]
    RingForStacks {
        /// Number of cells of the ring.
        capacity: u32,
    },
    /// A text without a pointer that leads to it.
    #[error("a text is behind a pointer")]
    TextOfNothing,
    /// Too many items to read from memory.
    #[error("{count} items are read; a record has bits for 32")]
    TooManyItems {
        /// Number of items requested.
        count: usize,
    },
    /// A record of more cells than the maximum.
    #[error("a record of {words} words is too large for {RECORD_CELLS} cells")]
    TooLarge {
        /// Number of words the record would have.
        words: usize,
    },
    /// An impossible number of return instances.
    #[error(
        "{count} return instances whose stubs have numbers from {first} on; between 1 and 65536 \
         instances, and stub numbers below 2^23, are possible"
    )]
    Instances {
        /// Number of instances.
        count: u32,
        /// Number of the first instance's stub.
        first: u32,
    },
    /// The detour is too far from the function, or from an address to which a copy or a call in the detour leads.
    #[error("{target} is beyond ±2 GiB of the detour at {at}")]
    OutOfReach {
        /// The address that is out of reach.
        target: Gva,
        /// Address of the detour.
        at: Gva,
    },
    /// The assembler returned an error.
    #[error("cannot assemble the detour")]
    Assemble(#[from] iced_x86::IcedError),
}
