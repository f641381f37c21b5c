//! How a displaced instruction is copied into a detour, so that the copy does what the instruction did in its
//! own place. The length of a copy does not depend on its address.

use super::distance::reach;
use super::unfit::Unfit;
use crate::Gva;
use crate::detour::error::BuildError;
use crate::insn::{Displaced, MAX_LEN, Relocation, decode};
use iced_x86::{ConstantOffsets, FlowControl, Instruction, Mnemonic, OpKind, Register};

const JMP_REL32: u8 = 0xe9;
const JMP_REL8: u8 = 0xeb;
const PUSH_IMM32: u8 = 0x68;
/// `mov dword [rsp + 4], imm32`, without the constant.
const MOV_UPPER: [u8; 4] = [0xc7, 0x44, 0x24, 0x04];
/// Bits 3 to 5 of a ModRM byte, which select the operation of the opcode `ff`.
const FF_OPERATION: u8 = 7 << 3;
const FF_JMP: u8 = 4 << 3;

/// How a displaced instruction is copied into a detour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::detour) enum Copying {
    /// The instruction's bytes. `moved` has the offset of a 32-bit displacement to recompute, and its target.
    Bytes { moved: Option<(u8, Gva)> },
    /// `jcc rel32`.
    Branch { condition: u8, target: Gva },
    /// `jmp rel32`.
    Jump { target: Gva },
    /// `loop` and the like, which have only short forms: the branch goes to a `jmp rel32`; if it is not taken, a
    /// short jump skips that.
    Counted { target: Gva },
    /// A push of the original return address, then `jmp rel32`.
    Call { target: Gva },
    /// A push of the original return address, then a `jmp` that finds its target like the call. `modrm` is the
    /// offset of its ModRM byte.
    IndirectCall { modrm: u8, moved: Option<(u8, Gva)> },
}

impl Copying {
    /// Returns the address to which the copy may lead besides the next instruction, if the instruction itself
    /// contains that address.
    pub(in crate::detour) fn target(self) -> Option<Gva> {
        match self {
            Self::Bytes { .. } | Self::IndirectCall { .. } => None,
            Self::Branch { target, .. }
            | Self::Jump { target }
            | Self::Counted { target }
            | Self::Call { target } => Some(target),
        }
    }

    /// Chooses how to copy `displaced`.
    pub(super) fn of(displaced: &Displaced) -> Result<Self, Unfit> {
        let at = displaced.at();
        let unmovable = |_| Unfit::Undecodable { at };
        let (instruction, offsets) = decode(displaced.bytes(), at).map_err(unmovable)?;
        match instruction.mnemonic() {
            Mnemonic::Sti | Mnemonic::Popfq => return Err(Unfit::EnablesInterrupts { at }),
            Mnemonic::Endbr64 => return Err(Unfit::Endbr { at }),
            _ => {}
        }
        match displaced.copying() {
            Some(Relocation::Verbatim) => return Ok(Self::Bytes { moved: None }),
            Some(Relocation::Displacement { offset, target }) => {
                let moved = Some((offset, target));
                return Ok(Self::Bytes { moved });
            }
            Some(Relocation::Jcc { condition, target }) => {
                return Ok(Self::Branch { condition, target });
            }
            None => {}
        }
        // All other instructions have no copy in a slot, because a copy that ends in an int3 would not do the same:
        // the host emulates them.
        let target = Gva(instruction.near_branch_target());
        let moved = moved(&instruction, &offsets);
        Ok(match instruction.flow_control() {
            FlowControl::UnconditionalBranch => Self::Jump { target },
            FlowControl::ConditionalBranch => Self::Counted { target },
            FlowControl::Call => Self::Call { target },
            FlowControl::IndirectCall if uses_stack_pointer(&instruction) => {
                return Err(Unfit::StackCall { at });
            }
            FlowControl::IndirectCall => Self::IndirectCall {
                modrm: modrm(displaced.bytes()).ok_or(Unfit::Undecodable { at })?,
                moved,
            },
            // Returns, indirect jumps, `pushf` and `cli`. They can be copied here, because no int3 follows, and
            // interrupts are not held off around this copy.
            _ => Self::Bytes { moved },
        })
    }

    /// Returns the length of the copy in bytes.
    pub(in crate::detour) fn len(&self, displaced: &Displaced) -> usize {
        let own = displaced.bytes().len();
        let push = push_len(displaced.next());
        match self {
            Self::Bytes { .. } => own,
            Self::Branch { .. } => 6,
            Self::Jump { .. } => 5,
            Self::Counted { .. } => own + 2 + 5,
            Self::Call { .. } => push + 5,
            Self::IndirectCall { .. } => push + own,
        }
    }

    /// Appends the copy to `code`, which will be at `at`.
    pub(in crate::detour) fn emit(
        &self,
        displaced: &Displaced,
        at: Gva,
        code: &mut Vec<u8>,
    ) -> Result<(), BuildError> {
        let own = displaced.bytes();
        match *self {
            Self::Bytes { moved } => copied(own, moved, at, code),
            Self::Branch { condition, target } => {
                code.extend([0x0f, 0x80 | condition]);
                displacement(target, at, code)
            }
            Self::Jump { target } => jump(target, at, code),
            Self::Counted { target } => {
                let (_, head) = own.split_last().unwrap_or((&0, &[]));
                code.extend(head);
                code.extend([2, JMP_REL8, 5]);
                jump(target, at, code)
            }
            Self::Call { target } => {
                push(displaced.next(), code);
                jump(target, at, code)
            }
            Self::IndirectCall { modrm, moved } => {
                push(displaced.next(), code);
                let mut jump = [0; MAX_LEN];
                let jump = &mut jump[..own.len()];
                jump.copy_from_slice(own);
                if let Some(byte) = jump.get_mut(usize::from(modrm)) {
                    *byte = *byte & !FF_OPERATION | FF_JMP;
                }
                copied(jump, moved, at, code)
            }
        }
    }
}

/// Returns the offset and the target of a RIP-relative displacement, which has to be recomputed; `None` if the
/// instruction has none.
fn moved(instruction: &Instruction, offsets: &ConstantOffsets) -> Option<(u8, Gva)> {
    let offset = u8::try_from(offsets.displacement_offset()).ok()?;
    instruction
        .is_ip_rel_memory_operand()
        .then(|| (offset, Gva(instruction.ip_rel_memory_address())))
}

fn uses_stack_pointer(instruction: &Instruction) -> bool {
    match instruction.op0_kind() {
        OpKind::Register => instruction.op0_register().full_register() == Register::RSP,
        _ => instruction.memory_base().full_register() == Register::RSP,
    }
}

/// Returns the offset of the ModRM byte of an instruction whose opcode is `ff`. The first `ff` is the opcode,
/// because no prefix is `ff`.
fn modrm(bytes: &[u8]) -> Option<u8> {
    let opcode = bytes.iter().position(|byte| *byte == 0xff)?;
    u8::try_from(opcode + 1).ok()
}

/// Appends `bytes` to `code`, which is at `at`. If there is a displacement to recompute (`moved`), recomputes it
/// for the new address.
fn copied(
    bytes: &[u8],
    moved: Option<(u8, Gva)>,
    at: Gva,
    code: &mut Vec<u8>,
) -> Result<(), BuildError> {
    let begin = code.len();
    code.extend_from_slice(bytes);
    if let Some((offset, target)) = moved {
        let distance = reach(at, here(at, code), target)?;
        let from = begin + usize::from(offset);
        if let Some(field) = code.get_mut(from..from + 4) {
            field.copy_from_slice(&distance);
        }
    }
    Ok(())
}

/// Appends a `jmp rel32` that leads to `target`. `code` is at `at`.
pub(in crate::detour) fn jump(target: Gva, at: Gva, code: &mut Vec<u8>) -> Result<(), BuildError> {
    code.push(JMP_REL32);
    displacement(target, at, code)
}

/// Appends the displacement of a branch to `target`. It is the last part of the branch's encoding.
fn displacement(target: Gva, at: Gva, code: &mut Vec<u8>) -> Result<(), BuildError> {
    let from = here(at, code).wrapping_add(4);
    code.extend(reach(at, from, target)?);
    Ok(())
}

/// Returns the address after `code`, which is at `at`.
pub(in crate::detour) fn here(at: Gva, code: &[u8]) -> Gva {
    at.wrapping_add(u64::try_from(code.len()).unwrap_or(u64::MAX))
}

/// Appends instructions that push `value`, and change nothing else.
fn push(value: Gva, code: &mut Vec<u8>) {
    let [a, b, c, d, upper @ ..] = value.0.to_le_bytes();
    code.extend([PUSH_IMM32, a, b, c, d]);
    if !is_sign_extended(value) {
        code.extend(MOV_UPPER);
        code.extend(upper);
    }
}

fn push_len(value: Gva) -> usize {
    if is_sign_extended(value) { 5 } else { 5 + 8 }
}

/// Returns whether the address is the sign extension of its lower 32 bits.
fn is_sign_extended(value: Gva) -> bool {
    i32::try_from(value.0.cast_signed()).is_ok()
}
