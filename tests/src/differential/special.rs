//! Operands for instructions that would otherwise have no effect, or harm the bench.

use hvprobe_arch::regs::rflags;
use iced_x86::{Mnemonic as M, OpKind, Register};

use super::draft::{Draft, Exactness, gpr};
use super::layout::ARENA;
use super::system::DATA;

/// IA32_KERNEL_GS_BASE, which nothing on the bench uses.
const KERNEL_GS_BASE: u64 = 0xc000_0102;
/// Number that no MSR has.
const NO_MSR: u64 = 0x1234_5678;
/// Flags that `popfq` may load without ending the run: neither the trap flag nor the flags of virtual-8086
/// mode.
const POPPED: u64 = rflags::ARITHMETIC
    | rflags::IF
    | rflags::DF
    | rflags::IOPL
    | rflags::NT
    | rflags::AC
    | rflags::ID;

/// Gives `draft` the operands that its instruction needs. Returns the reason if the bench cannot run the
/// instruction.
pub(super) fn prepare(draft: &mut Draft<'_>) -> Result<(), &'static str> {
    let instruction = draft.instruction;
    let register = |operand| {
        (instruction.op_count() > operand && instruction.op_kind(operand) == OpKind::Register)
            .then(|| instruction.op_register(operand))
    };
    match instruction.mnemonic() {
        // Makes the quotient fit more often than not; the divisor is random.
        M::Div | M::Idiv if draft.random.chance(60) => {
            draft.regs.rdx = 0;
            draft.regs.rax &= 0xff;
        }
        M::Cmpxchg if draft.random.chance(50) => equal(draft),
        M::Cmpxchg8b | M::Cmpxchg16b if draft.random.chance(50) => {
            let width = match instruction.mnemonic() {
                M::Cmpxchg8b => 4,
                _ => 8,
            };
            let low = draft.regs.rax.to_le_bytes();
            let high = draft.regs.rdx.to_le_bytes();
            draft.patch_operand(&[&low[..width], &high[..width]].concat());
        }
        M::Bt | M::Bts | M::Btr | M::Btc => {
            if instruction.op0_kind() == OpKind::Memory
                && let Some(bit) = register(1)
                && bit.full_register() != instruction.memory_base().full_register()
                && bit.full_register() != instruction.memory_index().full_register()
            {
                let value = draft.random.below(0x400).wrapping_sub(0x100);
                draft.set(bit, value);
            }
        }
        M::Popfq => {
            let flags = draft.random.next() & POPPED;
            draft.patch(draft.regs.rsp, &flags.to_le_bytes());
        }
        M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => {
            // A port that is none of the bench's own.
            draft.regs.rdx = 0x400 + draft.random.below(0xf000);
        }
        M::Rdtsc | M::Rdtscp => draft.exactness = Exactness::Clock,
        M::Rdpmc => {
            draft.regs.rcx = draft.random.pick(&[0, NO_MSR]);
            draft.exactness = Exactness::Clock;
        }
        M::Rdrand | M::Rdseed => {
            let destination = register(0).and_then(gpr).ok_or("it has no destination")?;
            draft.exactness = Exactness::Random(destination);
        }
        M::Cpuid => {
            draft.regs.rax = draft.random.below(0x20) | draft.random.pick(&[0, 1]) << 31;
            draft.regs.rcx = draft.random.below(4);
        }
        M::Rdmsr | M::Wrmsr => {
            draft.regs.rcx = draft.random.pick(&[KERNEL_GS_BASE, KERNEL_GS_BASE, NO_MSR]);
            draft.regs.rax = draft.random.next() & 0xffff_ffff;
            draft.regs.rdx = 0xffff_8880;
        }
        M::Xsetbv => {
            draft.regs.rcx = draft.random.pick(&[0, 0, 7]);
            (draft.regs.rax, draft.regs.rdx) = (1, 0);
        }
        M::Xgetbv | M::Rdpkru | M::Wrpkru => {
            (draft.regs.rcx, draft.regs.rdx) = (0, 0);
        }
        M::Mov => return prepare_mov(draft),
        M::Lldt => {
            if let Some(selector) = register(0) {
                draft.set(selector, 0);
            } else {
                draft.patch_operand(&[0, 0]);
            }
        }
        M::Lmsw => {
            let value = draft.host.cr0 & 0xffff;
            if let Some(source) = register(0) {
                draft.set(source, value);
            } else {
                draft.patch_operand(&value.to_le_bytes()[..2]);
            }
        }
        M::Ldmxcsr if draft.random.chance(70) => {
            let exceptions = draft.random.next() & 0x3f;
            draft.patch_operand(&(0x1f80 | exceptions).to_le_bytes()[..4]);
        }
        M::Fxrstor | M::Fxrstor64 | M::Xrstor | M::Xrstor64 | M::Xrstors | M::Xrstors64 => {
            let area: Vec<u8> = draft.host.extended[..144]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            draft.patch_operand(&area);
            (draft.regs.rax, draft.regs.rdx) = (3, 0);
        }
        M::Xsave
        | M::Xsave64
        | M::Xsaveopt
        | M::Xsaveopt64
        | M::Xsavec
        | M::Xsavec64
        | M::Xsaves
        | M::Xsaves64 => {
            (draft.regs.rax, draft.regs.rdx) = (3, 0);
        }
        M::Invpcid => {
            if let Some(kind) = register(0) {
                let value = draft.random.below(5);
                draft.set(kind, value);
            }
            draft.patch_operand(&[[0; 8], ARENA.to_le_bytes()].concat());
        }
        M::Tpause | M::Umwait => (draft.regs.rax, draft.regs.rdx) = (0, 0),
        M::Wrgsbase | M::Wrfsbase => {
            if let Some(base) = register(0) {
                draft.set(base, ARENA);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Makes the accumulator equal to the destination of `cmpxchg`.
fn equal(draft: &mut Draft<'_>) {
    let instruction = draft.instruction;
    if instruction.op0_kind() == OpKind::Register {
        let value = draft.get(instruction.op0_register());
        draft.regs.rax = value;
    } else if !instruction.memory_base().full_register().eq(&Register::RAX)
        && !instruction
            .memory_index()
            .full_register()
            .eq(&Register::RAX)
    {
        let value = draft.regs.rax.to_le_bytes();
        let width = instruction.memory_size().size().min(8);
        draft.patch_operand(&value[..width]);
    }
}

/// Prepares a `mov` to a control, debug or segment register: makes it write a value with which the bench still
/// works.
fn prepare_mov(draft: &mut Draft<'_>) -> Result<(), &'static str> {
    let instruction = draft.instruction;
    if instruction.op0_kind() != OpKind::Register {
        return Ok(());
    }
    let to = instruction.op0_register();
    let from = if instruction.op1_kind() == OpKind::Register {
        Some(instruction.op1_register())
    } else {
        None
    };
    let value = if to.is_cr() {
        match to {
            Register::CR0 => draft.host.cr0,
            Register::CR2 => draft.random.value(),
            Register::CR3 => draft.host.cr3,
            Register::CR4 => draft.host.cr4,
            Register::CR8 => draft.random.below(16),
            _ => return Err("it writes a control register that does not exist"),
        }
    } else if to.is_dr() {
        match to {
            Register::DR6 => 0xffff_0ff0,
            Register::DR7 => 0x400,
            _ => ARENA,
        }
    } else if to.is_segment_register() {
        let selector = draft.random.pick(&[0, DATA, DATA, 0x58]);
        if from.is_none() {
            draft.patch_operand(&selector.to_le_bytes());
        }
        u64::from(selector)
    } else {
        return Ok(());
    };
    if let Some(from) = from {
        if matches!(to, Register::CR3) {
            // In the other address space, the move would change CR3.
            draft.is_full = true;
        }
        draft.set(from, value);
    }
    Ok(())
}
