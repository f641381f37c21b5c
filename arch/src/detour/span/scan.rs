//! Targets of a function's branches.

use super::unfit::Unfit;
use crate::Gva;
use crate::insn::{boundary, instructions};
use iced_x86::{FlowControl, Instruction, OpKind};

/// Returns whether an instruction begins at `at` if `code` is decoded from `start`.
pub(super) fn is_boundary(code: &[u8], start: Gva, at: Gva) -> bool {
    boundary(code, start, at).is_ok()
}

/// Checks that no branch of `code`, at `start`, leads to an address for which `must_not` holds.
pub(super) fn branches(
    code: &[u8],
    start: Gva,
    must_not: impl Fn(Gva) -> bool,
) -> Result<(), Unfit> {
    for (at, found) in instructions(code, start) {
        let instruction = found.map_err(|_| Unfit::Undecodable { at })?;
        branch(&instruction, at, &must_not)?;
    }
    Ok(())
}

fn branch(
    instruction: &Instruction,
    at: Gva,
    must_not: &impl Fn(Gva) -> bool,
) -> Result<(), Unfit> {
    match instruction.flow_control() {
        FlowControl::IndirectBranch => return Err(Unfit::Indirect { at }),
        FlowControl::UnconditionalBranch
        | FlowControl::ConditionalBranch
        | FlowControl::Call
        | FlowControl::XbeginXabortXend => {}
        _ => return Ok(()),
    }
    // Any other operand is that of a far branch, or of an instruction that does not branch.
    if instruction.op0_kind() == OpKind::NearBranch64 {
        let to = Gva(instruction.near_branch_target());
        if must_not(to) {
            return Err(Unfit::Branch { from: at, to });
        }
    }
    Ok(())
}
