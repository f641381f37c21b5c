//! Where the branches of a function lead.

use super::unfit::Unfit;
use crate::Gva;
use crate::insn::{boundary, decode};
use iced_x86::{FlowControl, Instruction, OpKind};

/// Whether an instruction begins at `at`, decoded from `start`.
pub(super) fn is_boundary(code: &[u8], start: Gva, at: Gva) -> bool {
    boundary(code, start, at).is_ok()
}

/// Checks that no branch of `code`, at `start`, leads to where one must not.
pub(super) fn branches(
    code: &[u8],
    start: Gva,
    must_not: impl Fn(Gva) -> bool,
) -> Result<(), Unfit> {
    let mut offset = 0;
    while let Some(rest) = code.get(offset..).filter(|rest| !rest.is_empty()) {
        let at = start.wrapping_add(u64::try_from(offset).unwrap_or(u64::MAX));
        let (instruction, _) = decode(rest, at).map_err(|_| Unfit::Undecodable { at })?;
        branch(&instruction, at, &must_not)?;
        offset += instruction.len();
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
    // What is left is far, or no branch.
    if instruction.op0_kind() == OpKind::NearBranch64 {
        let to = Gva(instruction.near_branch_target());
        if must_not(to) {
            return Err(Unfit::Branch { from: at, to });
        }
    }
    Ok(())
}
