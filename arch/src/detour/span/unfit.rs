//! Why a jump is not possible.

use crate::Gva;
use crate::insn::Refusal;

/// Why a jump cannot take the place of the instructions at a probepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// No instruction of the function begins at the probepoint.
    #[error("no instruction of the function at {start} begins at {at}")]
    NotAnInstruction {
        /// The probepoint.
        at: Gva,
        /// Start of the function.
        start: Gva,
    },
    /// The function has fewer than five bytes from the probepoint on.
    #[error("a jump at {at} would run past the function's end at {end}")]
    PastEnd {
        /// The probepoint.
        at: Gva,
        /// The end of the function.
        end: Gva,
    },
    /// An instruction that takes no probe, and therefore has no copy.
    #[error("the instruction at {at} cannot be moved")]
    Refused {
        /// The instruction.
        at: Gva,
        /// The reason.
        #[source]
        reason: Refusal,
    },
    /// `sti` and `popf`.
    #[error(
        "the instruction at {at} may enable interrupts, which takes effect one instruction later"
    )]
    EnablesInterrupts {
        /// The instruction.
        at: Gva,
    },
    /// `endbr64`.
    #[error("indirect branches land on the endbr64 at {at}")]
    Endbr {
        /// The instruction.
        at: Gva,
    },
    /// A call before the last instruction.
    #[error("the call at {at} would return into the jump")]
    Call {
        /// The call.
        at: Gva,
    },
    /// A call that finds its target through the stack pointer. A copy first pushes the return address, which moves
    /// the stack pointer.
    #[error("the call at {at} finds its target with the stack pointer")]
    StackCall {
        /// The call.
        at: Gva,
    },
    /// A branch to an interior boundary, or to the inside of an instruction.
    #[error("the branch at {from} leads to {to}, inside the jump")]
    Branch {
        /// The branch.
        from: Gva,
        /// Target of the branch.
        to: Gva,
    },
    /// A jump whose targets are not known.
    #[error("the indirect jump at {at} may lead inside the jump")]
    Indirect {
        /// The jump.
        at: Gva,
    },
    /// Bytes that are no instruction, and may hide a branch.
    #[error("the bytes at {at} are no instruction, so that branches beyond are not known")]
    Undecodable {
        /// Where decoding ended.
        at: Gva,
    },
}
