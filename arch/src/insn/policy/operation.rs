//! Converts a decoded instruction to the operation that the host carries out.
//!
//! Each function returns `None` for operands that the host does not reach: memory other than the stack and the
//! targets of jumps and calls, anything based on FS or GS, and registers that are not general ones.

use super::super::emulate::{
    Address, Binary, Condition, Count, Operation, Register, Source, Target, Unary, Width,
};
use super::encoding::Encoding;
use crate::Gva;
use crate::regs::{Gpr, rflags};
use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register as Name};

pub(super) fn nop(_: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    // The long forms name memory but never touch it.
    Some(Operation::Nop)
}

pub(super) fn push(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    Some(Operation::Push(match instruction.code() {
        Code::Push_r64 | Code::Push_rm64 => Source::Register(register(instruction, 0)?),
        Code::Pushq_imm8 | Code::Pushq_imm32 => Source::Constant(instruction.immediate(0)),
        _ => return None,
    }))
}

pub(super) fn pop(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    match instruction.code() {
        Code::Pop_r64 | Code::Pop_rm64 => Some(Operation::Pop(register(instruction, 0)?.gpr)),
        _ => None,
    }
}

pub(super) fn mov(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    Some(Operation::Move {
        to: register(instruction, 0)?,
        from: source(instruction, 1)?,
    })
}

pub(super) fn lea(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    Some(Operation::Lea {
        to: register(instruction, 0)?,
        address: address(instruction)?,
    })
}

pub(super) fn binary(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    let operation = match instruction.mnemonic() {
        Mnemonic::Add => Binary::Add,
        Mnemonic::Sub => Binary::Sub,
        Mnemonic::And => Binary::And,
        Mnemonic::Or => Binary::Or,
        Mnemonic::Xor => Binary::Xor,
        Mnemonic::Cmp => Binary::Cmp,
        Mnemonic::Test => Binary::Test,
        _ => return None,
    };
    Some(Operation::Binary {
        operation,
        to: register(instruction, 0)?,
        from: source(instruction, 1)?,
    })
}

pub(super) fn unary(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    let operation = match instruction.mnemonic() {
        Mnemonic::Inc => Unary::Inc,
        Mnemonic::Dec => Unary::Dec,
        Mnemonic::Neg => Unary::Neg,
        Mnemonic::Not => Unary::Not,
        _ => return None,
    };
    Some(Operation::Unary {
        operation,
        to: register(instruction, 0)?,
    })
}

pub(super) fn flags(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    let (clear, set, flip) = match instruction.mnemonic() {
        Mnemonic::Clc => (rflags::CF, 0, 0),
        Mnemonic::Stc => (0, rflags::CF, 0),
        Mnemonic::Cmc => (0, 0, rflags::CF),
        Mnemonic::Cld => (rflags::DF, 0, 0),
        Mnemonic::Std => (0, rflags::DF, 0),
        Mnemonic::Cli => (rflags::IF, 0, 0),
        Mnemonic::Sti => return Some(Operation::EnableInterrupts),
        Mnemonic::Pushfq => return Some(Operation::PushFlags),
        Mnemonic::Popfq => return Some(Operation::PopFlags),
        _ => return None,
    };
    Some(Operation::Flags { clear, set, flip })
}

pub(super) fn leave(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    (instruction.code() == Code::Leaveq).then_some(Operation::Leave)
}

pub(super) fn transfer(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    let near = || Target::Known(Gva(instruction.near_branch_target()));
    let indirect = || match instruction.op0_kind() {
        OpKind::Register => Some(Target::Register(register(instruction, 0)?.gpr)),
        OpKind::Memory if !is_based_on_segment(instruction) => {
            Some(Target::Memory(address(instruction)?))
        }
        _ => None,
    };
    Some(match instruction.code() {
        Code::Call_rel32_64 => Operation::Call(near()),
        Code::Call_rm64 => Operation::Call(indirect()?),
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => Operation::Jump(near()),
        Code::Jmp_rm64 => Operation::Jump(indirect()?),
        Code::Retnq => Operation::Return { release: 0 },
        Code::Retnq_imm16 => Operation::Return {
            release: instruction.immediate16(),
        },
        _ => return None,
    })
}

pub(super) fn jcc(instruction: &Instruction, encoding: &Encoding<'_>) -> Option<Operation> {
    let (condition, target) = condition(instruction, encoding)?;
    Some(Operation::Branch {
        condition: Condition(condition),
        target,
    })
}

/// Returns the condition of a conditional jump, as the low half of the opcode, and the target.
pub(super) fn condition(instruction: &Instruction, encoding: &Encoding<'_>) -> Option<(u8, Gva)> {
    let condition = match *encoding.opcode {
        [short @ 0x70..=0x7f, ..] | [0x0f, short @ 0x80..=0x8f, ..] => short & 0xf,
        _ => return None,
    };
    Some((condition, Gva(instruction.near_branch_target())))
}

pub(super) fn counted(instruction: &Instruction, _: &Encoding<'_>) -> Option<Operation> {
    let (count, width) = match instruction.code() {
        Code::Jrcxz_rel8_64 => (Count::Zero, Width::Quad),
        Code::Jecxz_rel8_64 => (Count::Zero, Width::Double),
        Code::Loop_rel8_64_RCX => (Count::Down, Width::Quad),
        Code::Loop_rel8_64_ECX => (Count::Down, Width::Double),
        Code::Loope_rel8_64_RCX => (Count::DownWhileEqual, Width::Quad),
        Code::Loope_rel8_64_ECX => (Count::DownWhileEqual, Width::Double),
        Code::Loopne_rel8_64_RCX => (Count::DownWhileNotEqual, Width::Quad),
        Code::Loopne_rel8_64_ECX => (Count::DownWhileNotEqual, Width::Double),
        _ => return None,
    };
    Some(Operation::CountedBranch {
        count,
        counter: Register {
            gpr: Gpr::Rcx,
            width,
            is_high: false,
        },
        target: Gva(instruction.near_branch_target()),
    })
}

/// Returns the register or constant that is the operand `index`.
fn source(instruction: &Instruction, index: u32) -> Option<Source> {
    Some(match instruction.op_kind(index) {
        OpKind::Register => Source::Register(register(instruction, index)?),
        OpKind::Immediate8
        | OpKind::Immediate16
        | OpKind::Immediate32
        | OpKind::Immediate64
        | OpKind::Immediate8to16
        | OpKind::Immediate8to32
        | OpKind::Immediate8to64
        | OpKind::Immediate32to64 => Source::Constant(instruction.immediate(index)),
        _ => return None,
    })
}

/// Returns the general register that is the operand `index`.
fn register(instruction: &Instruction, index: u32) -> Option<Register> {
    if instruction.op_kind(index) != OpKind::Register {
        return None;
    }
    let name = instruction.op_register(index);
    let width = match () {
        () if name.is_gpr64() => Width::Quad,
        () if name.is_gpr32() => Width::Double,
        () if name.is_gpr16() => Width::Word,
        () if name.is_gpr8() => Width::Byte,
        () => return None,
    };
    Some(Register {
        gpr: gpr(name)?,
        width,
        is_high: matches!(name, Name::AH | Name::CH | Name::DH | Name::BH),
    })
}

fn address(instruction: &Instruction) -> Option<Address> {
    let base = instruction.memory_base();
    let index = instruction.memory_index();
    let optional = |name: Name| match name {
        // The displacement of a RIP-relative operand is the target.
        Name::None | Name::RIP => Some(None),
        name => gpr(name).map(Some),
    };
    let scale = u8::try_from(instruction.memory_index_scale()).ok()?;
    Some(Address {
        base: optional(base)?,
        index: optional(index)?.map(|index| (index, scale)),
        displacement: instruction.memory_displacement64(),
        is_narrow: match (base, index) {
            (Name::None, Name::None) => instruction.memory_displ_size() == 4,
            _ => base.is_gpr32() || index.is_gpr32(),
        },
    })
}

/// Returns whether the memory operand is relative to FS or GS, the only segments whose base is used.
fn is_based_on_segment(instruction: &Instruction) -> bool {
    matches!(instruction.memory_segment(), Name::FS | Name::GS)
}

/// Returns the general register that `name` is, or is part of.
fn gpr(name: Name) -> Option<Gpr> {
    if !name.is_gpr() {
        return None;
    }
    Gpr::ALL.get(name.full_register().number()).copied()
}
