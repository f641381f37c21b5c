//! Which instructions are emulated, stepped or refused, and why.
//!
//! The rules, in the order they are tried:
//!
//! 1. [`refusal_rule`]: instructions that do something else, or something more, when they run from
//!    another address, single-stepped, or with interrupts held off.
//! 2. [`encoding_rule`]: prefixes and addressing whose meaning differs between processors or
//!    cannot move.
//! 3. [`emulation_rule`]: instructions simple enough to be carried out by the host.
//! 4. [`step_rule`]: the rest runs out of line, provided that it is known where it continues and
//!    that it is not a privileged instruction nobody has thought about.

use super::slot::{Flow, Relocation};
use super::{DecodeFailure, Displaced, Emulated, MAX_LEN, Plan, decode};
use crate::Gva;
use crate::regs::Gpr;
use iced_x86::Mnemonic as M;
use iced_x86::{Code, ConstantOffsets, FlowControl, Instruction, Register};

/// Why no probe can be placed on an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Refusal {
    /// The bytes are no instruction.
    #[error("the bytes there are no instruction")]
    Undecodable,
    /// The code ends inside the instruction.
    #[error("the code ends inside the instruction, after {have} bytes")]
    Truncated {
        /// How many bytes there are.
        have: usize,
    },
    /// A prefix that processors disagree about, or that belongs to no known use.
    #[error("its prefixes have no meaning that holds on every processor")]
    OddPrefix,
    /// An operand relative to EIP.
    #[error("its operand is relative to a 32-bit instruction pointer, which a copy cannot keep")]
    EipRelative,
    /// `int3`, `int1`.
    #[error("it is a breakpoint of the kernel's own, which must trap at its own address")]
    Breakpoint,
    /// `int n`.
    #[error("a software interrupt pushes its own address")]
    SoftwareInterrupt,
    /// `ud0`, `ud1`, `ud2`.
    #[error("it marks a BUG or WARN, which the kernel looks up by the address of the trap")]
    Bug,
    /// `hlt`.
    #[error("hlt waits for an interrupt, and interrupts are held off during a step")]
    Halt,
    /// `sti`.
    #[error("sti holds interrupts off until after the next instruction, which a step would undo")]
    EnableInterrupts,
    /// `popf`.
    #[error("popf replaces the trap flag a step relies on")]
    LoadFlags,
    /// 16-bit `pushf`.
    #[error("a 16-bit pushf would store the trap flag of the step")]
    StoreFlags,
    /// `iret` and its kin.
    #[error("a return from interrupt replaces the trap flag a step relies on")]
    InterruptReturn,
    /// `syscall`, `sysret`, `sysenter`, `sysexit`.
    #[error("a system call or its return stores or replaces the address and flags of the step")]
    SystemCall,
    /// Far `jmp`, `call` and `ret`.
    #[error("a far transfer changes the code segment")]
    FarTransfer,
    /// Loading SS.
    #[error("loading SS suppresses the trap of a step")]
    LoadStackSegment,
    /// Moves to and from control registers, and instructions that change one.
    #[error("it accesses a control register, which can change how the next instruction is fetched")]
    ControlRegister,
    /// Moves to and from debug registers.
    #[error("it accesses a debug register, which a step uses")]
    DebugRegister,
    /// `lgdt`, `lidt`, `lldt`, `ltr`.
    #[error("it replaces a descriptor table under the running step")]
    DescriptorTable,
    /// `wrmsr` and its kin.
    #[error("it writes a model-specific register, which can change how a step behaves")]
    WriteMsr,
    /// `in`, `out`, `ins`, `outs`.
    #[error("port access leaves the guest before the step is over")]
    PortAccess,
    /// `rep` strings.
    #[error("a repeated string instruction traps once for each repetition")]
    RepeatedString,
    /// `loop`, `jrcxz`.
    #[error("loop and jrcxz have no form that reaches their target from a slot")]
    CounterBranch,
    /// `swapgs`, `wrgsbase`, `wrfsbase`, `lkgs`.
    #[error("it changes the base of FS or GS, through which per-CPU data is found")]
    SegmentBase,
    /// `xbegin`, `xend`, `xabort`, and suspending loads.
    #[error("a transaction aborts at every trap")]
    Transaction,
    /// VMX, SVM, TDX, SEV-SNP, SGX and SMX instructions.
    #[error("it enters or manages virtual machines, enclaves or measured code")]
    Virtualization,
    /// `monitor`, `mwait` and their kin.
    #[error("a monitored address is forgotten when a hit leaves the guest")]
    Monitor,
    /// `enter`.
    #[error("enter makes several stack accesses that are not proven to restart")]
    Enter,
    /// Changes of the shadow stack.
    #[error("it changes the shadow stack")]
    ShadowStack,
    /// x87 instructions that record their own address.
    #[error("an x87 instruction records its own address in the floating-point state")]
    X87Pointer,
    /// A privileged instruction or a branch without a rule.
    #[error("it is not proven to do the same when it is run from another address")]
    Unproven,
}

/// Decodes the first instruction of `code`, which is at `at`, and decides how it is carried out
/// when a breakpoint displaces it. Up to 15 bytes of `code` are looked at; give that many where
/// they exist.
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

    refusal_rule(&instruction, &encoding)?;
    encoding_rule(&instruction, &encoding)?;
    let plan = match emulation_rule(&instruction) {
        Some(operation) => Plan::Emulate(operation),
        None => step_rule(&instruction, &encoding, &offsets)?,
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
        plan,
    })
}

/// Whether `code` begins with `endbr64`. A probe on the first byte of a function that does means
/// the instruction after it: the processor demands `endbr64` itself where an indirect branch
/// lands.
#[must_use]
pub fn is_endbr64(code: &[u8]) -> bool {
    code.starts_with(&[0xf3, 0x0f, 0x1e, 0xfa])
}

/// What the decoder does not keep of an instruction's bytes.
struct Encoding<'a> {
    operand_size: bool,
    repne: bool,
    rep: bool,
    /// The bytes from the opcode on.
    opcode: &'a [u8],
}

impl<'a> Encoding<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        // A REX prefix counts only just before the opcode, but is allowed, without effect, earlier.
        let is_prefix = |byte: &u8| {
            matches!(
                byte,
                0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
            )
        };
        let count = bytes.iter().take_while(|byte| is_prefix(byte)).count();
        let (prefixes, opcode) = bytes.split_at(count);
        Self {
            operand_size: prefixes.contains(&0x66),
            repne: prefixes.contains(&0xf2),
            rep: prefixes.contains(&0xf3),
            opcode,
        }
    }
}

/// Instructions that are refused for what they do.
fn refusal_rule(instruction: &Instruction, encoding: &Encoding<'_>) -> Result<(), Refusal> {
    let reason = match instruction.mnemonic() {
        // The exception frame holds the address of the trap, and the kernel acts on it.
        M::Int3 | M::Int1 => Refusal::Breakpoint,
        M::Int | M::Into => Refusal::SoftwareInterrupt,
        M::Ud0 | M::Ud1 | M::Ud2 => Refusal::Bug,

        // The interrupt flag and its shadow. `cli` is stepped: holding interrupts off is the
        // host's doing and leaves the flag alone, so `cli` clears it as it always does.
        M::Hlt => Refusal::Halt,
        M::Sti => Refusal::EnableInterrupts,

        // The trap flag. `pushfq` is emulated; `lahf` and `sahf` do not reach it.
        M::Popf | M::Popfd | M::Popfq => Refusal::LoadFlags,
        M::Pushf | M::Pushfd => Refusal::StoreFlags,
        M::Iret | M::Iretd | M::Iretq | M::Uiret | M::Eretu | M::Erets | M::Rsm => {
            Refusal::InterruptReturn
        }
        M::Syscall | M::Sysret | M::Sysretq | M::Sysenter | M::Sysexit | M::Sysexitq => {
            Refusal::SystemCall
        }

        // Far returns have mnemonics of their own; far jumps and calls share the near ones'.
        M::Retf => Refusal::FarTransfer,
        M::Jmp | M::Call
            if instruction.is_jmp_far_indirect() || instruction.is_call_far_indirect() =>
        {
            Refusal::FarTransfer
        }

        // `mov ss` blocks debug traps for one instruction (SDM vol. 3, "Masking Exceptions and
        // Interrupts When Switching Stacks"); `lss` is rare enough not to be told apart.
        M::Mov if instruction.op0_register() == Register::SS => Refusal::LoadStackSegment,
        M::Lss => Refusal::LoadStackSegment,

        // State that governs fetching, trapping and address translation.
        M::Mov if moves(instruction, Register::is_cr) => Refusal::ControlRegister,
        M::Clts | M::Lmsw | M::Xsetbv => Refusal::ControlRegister,
        M::Mov if moves(instruction, Register::is_dr) => Refusal::DebugRegister,
        M::Lgdt | M::Lidt | M::Lldt | M::Ltr => Refusal::DescriptorTable,
        // `rdmsr` is stepped: it has no effect but on RAX and RDX.
        M::Wrmsr | M::Wrmsrns | M::Wrmsrlist => Refusal::WriteMsr,
        M::Swapgs | M::Wrgsbase | M::Wrfsbase | M::Lkgs => Refusal::SegmentBase,

        // A step must end in one trap after one instruction.
        M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => {
            Refusal::PortAccess
        }
        _ if is_repeatable(instruction) && (encoding.rep || encoding.repne) => {
            Refusal::RepeatedString
        }
        M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz => Refusal::CounterBranch,
        M::Xbegin | M::Xend | M::Xabort | M::Xsusldtrk | M::Xresldtrk => Refusal::Transaction,
        M::Monitor | M::Mwait | M::Monitorx | M::Mwaitx | M::Umonitor | M::Umwait | M::Tpause => {
            Refusal::Monitor
        }
        M::Enter => Refusal::Enter,

        // The shadow stack, which a stepped call or return would use too. Reading its pointer is
        // harmless.
        M::Incsspd
        | M::Incsspq
        | M::Saveprevssp
        | M::Rstorssp
        | M::Setssbsy
        | M::Clrssbsy
        | M::Wrssd
        | M::Wrssq
        | M::Wrussd
        | M::Wrussq => Refusal::ShadowStack,

        M::Vmcall
        | M::Vmlaunch
        | M::Vmresume
        | M::Vmxon
        | M::Vmxoff
        | M::Vmread
        | M::Vmwrite
        | M::Vmptrld
        | M::Vmptrst
        | M::Vmclear
        | M::Vmfunc
        | M::Invept
        | M::Invvpid => Refusal::Virtualization,
        M::Vmmcall
        | M::Vmrun
        | M::Vmload
        | M::Vmsave
        | M::Stgi
        | M::Clgi
        | M::Skinit
        | M::Invlpga
        | M::Invlpgb
        | M::Tlbsync
        | M::Vmgexit
        | M::Psmash
        | M::Pvalidate
        | M::Rmpadjust
        | M::Rmpquery
        | M::Rmpupdate => Refusal::Virtualization,
        M::Tdcall
        | M::Seamret
        | M::Seamcall
        | M::Seamops
        | M::Encls
        | M::Enclu
        | M::Enclv
        | M::Getsec
        | M::Pconfig => Refusal::Virtualization,

        // FIP keeps the address of the last instruction that computes or moves data; those that
        // only control the unit leave it alone (SDM vol. 1, 8.1.8).
        M::Fninit
        | M::Fnclex
        | M::Fldcw
        | M::Fnstcw
        | M::Fnstsw
        | M::Fldenv
        | M::Fnstenv
        | M::Fnsave
        | M::Frstor => {
            return Ok(());
        }
        _ if matches!(encoding.opcode.first(), Some(0xd8..=0xdf)) => Refusal::X87Pointer,

        _ => return Ok(()),
    };
    Err(reason)
}

/// Whether the source or the destination is a register of the given kind.
fn moves(instruction: &Instruction, is_kind: fn(Register) -> bool) -> bool {
    is_kind(instruction.op0_register()) || is_kind(instruction.op1_register())
}

/// Whether a `rep` prefix repeats the instruction: strings, and the block ciphers of VIA.
fn is_repeatable(instruction: &Instruction) -> bool {
    let has_rep_form = instruction.op_code().can_use_rep_prefix();
    has_rep_form || instruction.is_string_instruction()
}

/// Encodings that are refused whatever the instruction does.
fn encoding_rule(instruction: &Instruction, encoding: &Encoding<'_>) -> Result<(), Refusal> {
    if instruction.memory_base() == Register::EIP {
        return Err(Refusal::EipRelative);
    }
    let is_branch = !matches!(instruction.flow_control(), FlowControl::Next);
    // On near branches an operand size prefix is ignored by Intel's processors and truncates the
    // target on AMD's; `bnd` depends on whether MPX is there; `rep` means nothing but is a
    // customary padding of `ret`. Segment prefixes are padding or hints, and address size and REX
    // prefixes padding, everywhere.
    let is_odd = encoding.operand_size
        || encoding.repne
        || encoding.rep && instruction.flow_control() != FlowControl::Return;
    if is_branch && is_odd {
        return Err(Refusal::OddPrefix);
    }
    Ok(())
}

/// Instructions the host carries out itself: those that the first bytes of functions are made of.
fn emulation_rule(instruction: &Instruction) -> Option<Emulated> {
    let target = || Gva(instruction.near_branch_target());
    let (to, from) = (instruction.op0_register(), instruction.op1_register());
    Some(match instruction.code() {
        // The long forms name memory but never touch it.
        Code::Nopw
        | Code::Nopd
        | Code::Nopq
        | Code::Nop_rm16
        | Code::Nop_rm32
        | Code::Nop_rm64
        | Code::Endbr64 => Emulated::Nop,
        Code::Push_r64 | Code::Push_rm64 => Emulated::Push(gpr(to)?),
        Code::Pop_r64 | Code::Pop_rm64 => Emulated::Pop(gpr(to)?),
        Code::Mov_rm64_r64 | Code::Mov_r64_rm64 => Emulated::Move {
            to: gpr(to)?,
            from: gpr(from)?,
        },
        Code::Mov_rm32_r32 | Code::Mov_r32_rm32 => Emulated::MoveLow {
            to: gpr(to)?,
            from: gpr(from)?,
        },
        Code::Add_rm64_imm8 | Code::Add_rm64_imm32 if to == Register::RSP => {
            Emulated::AddRsp(instruction.immediate(1))
        }
        Code::Sub_rm64_imm8 | Code::Sub_rm64_imm32 if to == Register::RSP => {
            Emulated::SubRsp(instruction.immediate(1))
        }
        // A copy would push the slot's address.
        Code::Call_rel32_64 => Emulated::Call { target: target() },
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => Emulated::Jump { target: target() },
        // A copy would push the trap flag of the step.
        Code::Pushfq => Emulated::PushFlags,
        _ => return None,
    })
}

/// How an instruction that passed every other rule moves to a slot and where it continues.
fn step_rule(
    instruction: &Instruction,
    encoding: &Encoding<'_>,
    offsets: &ConstantOffsets,
) -> Result<Plan, Refusal> {
    let flow = match instruction.code() {
        Code::Retnq | Code::Retnq_imm16 | Code::Jmp_rm64 => Flow::Anywhere,
        Code::Call_rm64 => Flow::Call,
        _ if instruction.is_jcc_short_or_near() => Flow::Branch {
            target: Gva(instruction.near_branch_target()),
        },
        _ if instruction.flow_control() != FlowControl::Next => return Err(Refusal::Unproven),
        _ if instruction.is_privileged() && !is_privileged_but_movable(instruction.mnemonic()) => {
            return Err(Refusal::Unproven);
        }
        _ => Flow::Next,
    };
    let relocation = if let Flow::Branch { target } = flow {
        let condition = match encoding.opcode {
            [0x0f, near, ..] => near & 0xf,
            [short, ..] => short & 0xf,
            [] => return Err(Refusal::Unproven),
        };
        Relocation::Jcc { condition, target }
    } else if instruction.is_ip_rel_memory_operand() {
        if offsets.displacement_size() != 4 {
            return Err(Refusal::Unproven);
        }
        Relocation::Displacement {
            offset: u8::try_from(offsets.displacement_offset()).map_err(|_| Refusal::Unproven)?,
            target: Gva(instruction.ip_rel_memory_address()),
        }
    } else {
        Relocation::Verbatim
    };
    Ok(Plan::Step { relocation, flow })
}

/// Privileged instructions that do the same from anywhere: each changes a flag, reads a register,
/// or flushes or saves something, and then goes on to the next instruction.
fn is_privileged_but_movable(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Cli
            | M::Clac
            | M::Stac
            | M::Rdmsr
            | M::Invlpg
            | M::Invpcid
            | M::Wbinvd
            | M::Wbnoinvd
            | M::Xsaves
            | M::Xsaves64
            | M::Xrstors
            | M::Xrstors64
    )
}

/// The general registers in the order of their encoding.
const GPRS: [Gpr; 16] = [
    Gpr::Rax,
    Gpr::Rcx,
    Gpr::Rdx,
    Gpr::Rbx,
    Gpr::Rsp,
    Gpr::Rbp,
    Gpr::Rsi,
    Gpr::Rdi,
    Gpr::R8,
    Gpr::R9,
    Gpr::R10,
    Gpr::R11,
    Gpr::R12,
    Gpr::R13,
    Gpr::R14,
    Gpr::R15,
];

/// The general register that `register` is, or is the lower half of.
fn gpr(register: Register) -> Option<Gpr> {
    (register.is_gpr64() || register.is_gpr32())
        .then(|| GPRS.get(register.number()).copied())
        .flatten()
}

#[cfg(test)]
mod tests;
