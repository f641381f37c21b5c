//! Which instructions are emulated, boosted or refused, and why: the tables.
//!
//! The rules, in the order in which they are tried; the first that applies wins:
//!
//! 1. [`ROWS`] that refuse: instructions that do something else, or something more, when a hit comes before them or
//!    when they run at another address. ([`ROWS`] that boost exempt their instructions from rule 2.)
//! 2. [`FORMS`]: instructions that are refused for the same reasons, but that the mnemonic alone does not identify.
//! 3. [`odd_encoding`]: prefixes and addressing that are refused because they differ between processors, or cannot
//!    be kept in a copy.
//! 4. [`ROWS`] that emulate. If the host does not reach the operands, the row says whether a copy works.
//! 5. Everything else is boosted, provided that it continues at the next instruction.
//!
//! A copy is followed only by a jump or an int3, and the guest may be interrupted in it. While a copy that ends in
//! an int3 runs, two things differ. Interrupts are held off with the guest's own flag, so instructions that read or
//! write the flag have no copy at all. Exceptions are delivered through another table, so instructions that read or
//! write the table's register (IDTR) are refused.

mod encoding;
mod operation;
mod refusal;

use super::decode::{DecodeFailure, MAX_LEN, decode};
use super::displaced::{Action, Displaced};
use super::emulate::{Emulated, Operation};
use super::gate::ENDBR64;
use super::relocation::Relocation;
use crate::Gva;
use encoding::Encoding;
use iced_x86::Mnemonic as M;
use iced_x86::{ConstantOffsets, FlowControl, Instruction, Register};
pub use refusal::Refusal;

/// How an instruction is treated.
#[derive(Clone, Copy)]
enum Treatment {
    /// The host carries it out. If the host does not reach its operands, or if a copy is required, it is copied.
    Emulate(Build),
    /// The host carries it out, because a copy would not do the same. If the host does not reach its operands, it
    /// is refused.
    EmulateOnly(Build, Refusal),
    /// The guest runs a copy.
    Boost,
    /// It takes no probe.
    Refuse(Refusal),
}
use Treatment::{Boost, Emulate, EmulateOnly, Refuse};

/// Builds the operation, if the host reaches the operands.
type Build = fn(&Instruction, &Encoding<'_>) -> Option<Operation>;

/// One line of the policy.
struct Row {
    mnemonics: &'static [M],
    treatment: Treatment,
}

const fn row(mnemonics: &'static [M], treatment: Treatment) -> Row {
    Row {
        mnemonics,
        treatment,
    }
}

/// The policy by mnemonic. A mnemonic that is not listed is boosted.
#[rustfmt::skip]
const ROWS: &[Row] = &[
    // The most common instructions: the first ones of functions, and the ways into and out of functions.
    row(&[M::Nop, M::Endbr64], Emulate(operation::nop)),
    row(&[M::Push], Emulate(operation::push)),
    row(&[M::Pop], Emulate(operation::pop)),
    row(&[M::Mov], Emulate(operation::mov)),
    row(&[M::Lea], Emulate(operation::lea)),
    row(&[M::Add, M::Sub, M::And, M::Or, M::Xor, M::Cmp, M::Test], Emulate(operation::binary)),
    row(&[M::Inc, M::Dec, M::Neg, M::Not], Emulate(operation::unary)),
    row(&[M::Clc, M::Stc, M::Cmc, M::Cld, M::Std], Emulate(operation::flags)),
    row(&[M::Leave], Emulate(operation::leave)),
    row(&[M::Jo, M::Jno, M::Jb, M::Jae, M::Je, M::Jne, M::Jbe, M::Ja,
          M::Js, M::Jns, M::Jp, M::Jnp, M::Jl, M::Jge, M::Jle, M::Jg], Emulate(operation::jcc)),

    // A copy would store the slot's address, leave the slot before its end, or not reach its target.
    row(&[M::Call, M::Jmp], EmulateOnly(operation::transfer, Refusal::SegmentBranch)),
    row(&[M::Ret], EmulateOnly(operation::transfer, Refusal::Unproven)),
    row(&[M::Loop, M::Loope, M::Loopne, M::Jecxz, M::Jrcxz],
        EmulateOnly(operation::counted, Refusal::Unproven)),

    // A copy would see the interrupt flag, which is held clear around it, or a change of the flag would be lost.
    row(&[M::Cli, M::Sti, M::Pushfq, M::Popfq],
        EmulateOnly(operation::flags, Refusal::Unproven)),
    row(&[M::Pushf, M::Popf], Refuse(Refusal::NarrowFlags)),

    // The exception frame holds the address of the trap, and the kernel acts on it.
    row(&[M::Int3, M::Int1], Refuse(Refusal::Breakpoint)),
    row(&[M::Int], Refuse(Refusal::SoftwareInterrupt)),
    row(&[M::Ud0, M::Ud1, M::Ud2], Refuse(Refusal::Bug)),

    // Each relies on state from just before it, which a hit ends: the shadow of `sti`, the armed monitor, the
    // transaction.
    row(&[M::Hlt], Refuse(Refusal::Halt)),
    row(&[M::Mwait, M::Mwaitx, M::Umwait], Refuse(Refusal::MonitorWait)),
    row(&[M::Xbegin, M::Xend, M::Xabort, M::Xsusldtrk, M::Xresldtrk],
        Refuse(Refusal::Transaction)),

    // These change privilege, flags, stack and code segment together, and some store an address.
    row(&[M::Iret, M::Iretd, M::Iretq, M::Uiret, M::Eretu, M::Erets, M::Rsm],
        Refuse(Refusal::InterruptReturn)),
    row(&[M::Syscall, M::Sysret, M::Sysretq, M::Sysenter, M::Sysexit, M::Sysexitq],
        Refuse(Refusal::SystemCall)),
    row(&[M::Retf], Refuse(Refusal::FarTransfer)),

    // These change or show state with which exceptions are delivered. (`lldt`, `str`, `sgdt` do not.)
    row(&[M::Lss], Refuse(Refusal::LoadStackSegment)),
    row(&[M::Lgdt, M::Lidt, M::Sidt, M::Ltr], Refuse(Refusal::DescriptorTable)),
    row(&[M::Swapgs, M::Wrgsbase, M::Wrfsbase, M::Lkgs], Refuse(Refusal::SegmentBase)),
    row(&[M::Incsspd, M::Incsspq, M::Saveprevssp, M::Rstorssp, M::Setssbsy, M::Clrssbsy,
          M::Wrssd, M::Wrssq, M::Wrussd, M::Wrussq], Refuse(Refusal::ShadowStack)),

    // VMX, SVM and SEV-SNP, TDX, SGX and SMX. (KVM even rewrites `vmcall` where it ran.)
    row(&[M::Vmcall, M::Vmlaunch, M::Vmresume, M::Vmxon, M::Vmxoff, M::Vmread, M::Vmwrite,
          M::Vmptrld, M::Vmptrst, M::Vmclear, M::Vmfunc, M::Invept, M::Invvpid],
        Refuse(Refusal::Virtualization)),
    row(&[M::Vmmcall, M::Vmrun, M::Vmload, M::Vmsave, M::Stgi, M::Clgi, M::Skinit, M::Invlpga,
          M::Vmgexit, M::Psmash, M::Pvalidate, M::Rmpadjust, M::Rmpquery, M::Rmpupdate],
        Refuse(Refusal::Virtualization)),
    row(&[M::Tdcall, M::Seamret, M::Seamcall, M::Seamops, M::Encls, M::Enclu, M::Enclv,
          M::Getsec, M::Pconfig], Refuse(Refusal::Virtualization)),

    // x87 instructions that only control the unit leave the recorded address alone (SDM vol. 1,
    // 8.1.8). The others are refused by their form.
    row(&[M::Fninit, M::Fnclex, M::Fldcw, M::Fnstcw, M::Fnstsw, M::Fldenv, M::Fnstenv,
          M::Fnsave, M::Frstor], Boost),
];

/// Test whether an instruction has a certain form.
type Form = fn(&Instruction, &Encoding<'_>) -> bool;

/// The policy by form, where the mnemonic is not enough.
#[rustfmt::skip]
const FORMS: &[(Form, Refusal)] = &[
    // Far returns have mnemonics of their own; far jumps and calls share the near ones'.
    (|insn, _| insn.is_jmp_far_indirect() || insn.is_call_far_indirect(), Refusal::FarTransfer),
    (|insn, _| insn.op0_register() == Register::SS, Refusal::LoadStackSegment),
    (|_, encoding| matches!(encoding.opcode.first(), Some(0xd8..=0xdf)), Refusal::X87Pointer),
];

/// For each mnemonic, one more than the index of its row in [`ROWS`]; zero if it has no row.
static LOOKUP: [u8; 2048] = {
    let mut lookup = [0; 2048];
    let mut index = 0;
    let mut number = 0;
    while index < ROWS.len() {
        number += 1;
        let mnemonics = ROWS[index].mnemonics;
        let mut which = 0;
        while which < mnemonics.len() {
            let entry = &mut lookup[mnemonics[which] as usize];
            assert!(*entry == 0, "a mnemonic has two rows");
            *entry = number;
            which += 1;
        }
        index += 1;
    }
    lookup
};

/// Returns the treatment in the mnemonic's row.
fn treatment(mnemonic: M) -> Option<Treatment> {
    let number = LOOKUP.get(mnemonic as usize)?;
    let row = ROWS.get(usize::from(*number).checked_sub(1)?)?;
    Some(row.treatment)
}

/// Decodes the first instruction of `code`, which is at `at`, and decides how it is carried out when a breakpoint
/// displaces it. Up to 15 bytes of `code` are read; pass that many if they exist.
///
/// # Errors
/// When no probe can be placed on it, with the reason.
pub fn classify(code: &[u8], at: Gva) -> Result<Displaced, Refusal> {
    let (instruction, offsets) = decode(code, at).map_err(|failure| match failure {
        DecodeFailure::Invalid => Refusal::Undecodable,
        DecodeFailure::Truncated => Refusal::Truncated { have: code.len() },
    })?;
    let own = code.get(..instruction.len()).ok_or(Refusal::Undecodable)?;
    let encoding = Encoding::of(own);
    let treatment = treatment(instruction.mnemonic());

    match treatment {
        Some(Refuse(reason)) => return Err(reason),
        Some(Boost) => {}
        Some(Emulate(_) | EmulateOnly(..)) | None => {
            if let Some((_, reason)) = FORMS.iter().find(|(is, _)| is(&instruction, &encoding)) {
                return Err(*reason);
            }
        }
    }
    odd_encoding(&instruction, &encoding)?;
    let copy = || relocation(&instruction, &encoding, &offsets);
    let (operation, relocation) = match treatment {
        Some(EmulateOnly(build, otherwise)) => {
            let operation = build(&instruction, &encoding).ok_or(otherwise)?;
            (Some(operation), None)
        }
        Some(Emulate(build)) => (build(&instruction, &encoding), Some(copy()?)),
        Some(Boost | Refuse(_)) | None => (None, Some(copy()?)),
    };
    let mut bytes = [0; MAX_LEN];
    bytes
        .get_mut(..own.len())
        .ok_or(Refusal::Undecodable)?
        .copy_from_slice(own);
    Ok(Displaced {
        at,
        bytes,
        len: u8::try_from(own.len()).map_err(|_| Refusal::Undecodable)?,
        action: operation.map_or(Action::Boost, |operation| {
            Action::Emulate(Emulated(operation))
        }),
        relocation,
    })
}

/// Returns whether `code` begins with `endbr64`, or with what the kernel puts in its place when no indirect branch
/// leads there (`gen_endbr_poison` in arch/x86/include/asm/ibt.h: one form up to Linux 6.13, another since). A
/// probe on the first byte of such a function applies to the instruction after it, because the processor demands an
/// `endbr64` where an indirect branch lands.
#[must_use]
pub fn is_endbr64(code: &[u8]) -> bool {
    const POISONS: [[u8; 4]; 2] = [[0x66, 0x0f, 0x1f, 0x00], [0x0f, 0x1f, 0x40, 0xd6]];
    code.starts_with(&ENDBR64) || POISONS.iter().any(|poison| code.starts_with(poison))
}

/// Returns whether `code` begins with a nop of four bytes. The kernel may have put it in place of an `endbr64`, but
/// not every such nop replaces one.
#[must_use]
pub fn is_nop4(code: &[u8]) -> bool {
    code.starts_with(&[0x0f, 0x1f, 0x40]) && code.len() >= 4
}

/// Refuses certain encodings, independent of the mnemonic.
fn odd_encoding(instruction: &Instruction, encoding: &Encoding<'_>) -> Result<(), Refusal> {
    if instruction.memory_base() == Register::EIP {
        return Err(Refusal::EipRelative);
    }
    let is_branch = !matches!(instruction.flow_control(), FlowControl::Next);
    // On near branches, Intel's processors ignore an operand-size prefix, and AMD's truncate the target. The
    // meaning of `bnd` depends on MPX. `rep` has no meaning, but is a customary padding of `ret`. On all
    // processors, segment prefixes are padding or hints, and address-size and REX prefixes are padding.
    let is_odd = encoding.operand_size
        || encoding.repne
        || encoding.rep && instruction.flow_control() != FlowControl::Return;
    if is_branch && is_odd {
        return Err(Refusal::OddPrefix);
    }
    Ok(())
}

/// Determines how an instruction that passed every other rule is changed when it moves to a slot.
fn relocation(
    instruction: &Instruction,
    encoding: &Encoding<'_>,
    offsets: &ConstantOffsets,
) -> Result<Relocation, Refusal> {
    if let Some((condition, target)) = operation::condition(instruction, encoding) {
        return Ok(Relocation::Jcc { condition, target });
    }
    if instruction.flow_control() != FlowControl::Next {
        return Err(Refusal::Unproven);
    }
    if !instruction.is_ip_rel_memory_operand() {
        return Ok(Relocation::Verbatim);
    }
    if offsets.displacement_size() != 4 {
        return Err(Refusal::Unproven);
    }
    Ok(Relocation::Displacement {
        offset: u8::try_from(offsets.displacement_offset()).map_err(|_| Refusal::Unproven)?,
        target: Gva(instruction.ip_rel_memory_address()),
    })
}

#[cfg(test)]
mod tests;
