//! What a function's instructions refer to: constants that may be addresses, and per-CPU data.
//!
//! Invariant: only what is encoded in the code itself is reported. So hostile code leads to wrong addresses, but
//! not to unbounded work: one pass, up to the first bytes that are no instruction.

use super::decode::instructions;
use crate::Gva;
use iced_x86::{Instruction, OpAccess, OpKind, Register};

/// A load from per-CPU data into a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerCpuLoad {
    /// Offset that is added, modulo 2^64, to the base of GS.
    pub at: u64,
    /// Number of bytes that are loaded.
    pub size: usize,
}

/// Returns the constants that may be addresses in the function at `start`, whose code is `code`: immediate operands
/// of 64-bit instructions, and the addresses of memory operands that use no register but RIP. All are extended to
/// 64 bits as the processor does, and are in the order of the instructions.
#[must_use]
pub fn constants(code: &[u8], start: Gva) -> Vec<u64> {
    let mut found = Vec::new();
    for instruction in sound(code, start) {
        found.extend((0..instruction.op_count()).filter_map(|operand| {
            match instruction.op_kind(operand) {
                OpKind::Immediate8to64 | OpKind::Immediate32to64 | OpKind::Immediate64 => {
                    Some(instruction.immediate(operand))
                }
                OpKind::Memory if instruction.memory_segment() != Register::GS => {
                    fixed_address(&instruction)
                }
                _ => None,
            }
        }));
    }
    found
}

/// Returns the loads from per-CPU data at fixed offsets in the function at `start`, whose code is `code`. They are
/// in the order of the instructions.
#[must_use]
pub fn per_cpu_loads(code: &[u8], start: Gva) -> Vec<PerCpuLoad> {
    sound(code, start)
        .filter(|instruction| {
            instruction.memory_segment() == Register::GS
                && instruction.op_count() == 2
                && instruction.op0_kind() == OpKind::Register
                && instruction.op1_kind() == OpKind::Memory
                && op0_is_only_written(instruction)
        })
        .filter_map(|instruction| {
            Some(PerCpuLoad {
                at: fixed_address(&instruction)?,
                size: instruction.memory_size().size(),
            })
        })
        .collect()
}

/// Returns the address of the memory operand, if it uses no register but RIP.
fn fixed_address(instruction: &Instruction) -> Option<u64> {
    if instruction.is_ip_rel_memory_operand() {
        return Some(instruction.ip_rel_memory_address());
    }
    let free =
        instruction.memory_base() == Register::None && instruction.memory_index() == Register::None;
    free.then(|| instruction.memory_displacement64())
}

/// Returns whether the instruction only writes its first operand, like `mov` and unlike `add`.
fn op0_is_only_written(instruction: &Instruction) -> bool {
    let mut info = iced_x86::InstructionInfoFactory::new();
    info.info(instruction).op0_access() == OpAccess::Write
}

/// Iterates over the instructions, up to the first bytes that are no instruction.
fn sound(code: &[u8], start: Gva) -> impl Iterator<Item = Instruction> + use<'_> {
    instructions(code, start).map_while(|(_, found)| found.ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::bytes;
    use super::*;

    const AT: Gva = Gva(0xffff_ffff_8100_0000);

    #[test]
    fn addresses_are_found_however_they_are_written() {
        // mov rdi, imm32; sub rsi, imm32; lea rax, [rip+0x10]; mov rcx, [rax+8]; cmp [rip-4], 0;
        // movabs rdx, imm64; mov rax, [rcx*8-0x7e000000]; mov rax, [disp32]; mov edi, imm32; ret
        let code = "48c7c70000a082 4881ee0010a082 488d0510000000 488b4808 803dfcffffff00 \
            48ba8877665544332211 488b04cd00000082 488b042500000082 bf78563412 c3";
        assert_eq!(
            constants(&bytes(code), AT),
            [
                0xffff_ffff_82a0_0000,
                0xffff_ffff_82a0_1000,
                0xffff_ffff_8100_0025,
                0xffff_ffff_8100_001c,
                0x1122_3344_5566_7788,
                0xffff_ffff_8200_0000,
            ]
        );
    }

    #[test]
    fn per_cpu_data_is_found_with_its_place_and_size() {
        // mov rdi, gs:[0x1fb80]; mov eax, gs:[rip+0x100]; movsxd rax, dword gs:[rip+0x100];
        // add rax, gs:[0x10]; mov gs:[0x10], rax; mov rax, gs:[rcx]; mov rax, [0x10]
        let code = "65488b3c2580fb0100 658b0500010000 6548630500010000 6548030425 10000000 \
            654889042510000000 65488b01 488b042510000000";
        let load = |at, size| PerCpuLoad { at, size };
        assert_eq!(
            per_cpu_loads(&bytes(code), AT),
            [
                load(0x1fb80, 8),
                load(AT.0 + 16 + 0x100, 4),
                load(AT.0 + 24 + 0x100, 4),
            ]
        );
    }

    #[test]
    fn nothing_is_found_behind_bytes_that_are_no_instruction() {
        // An opcode that does not exist in 64-bit mode; mov rdi, imm32
        let code = bytes("06 48c7c70000a082");
        assert!(constants(&code, AT).is_empty() && per_cpu_loads(&code, AT).is_empty());
    }

    proptest! {
        #[test]
        fn garbage_is_never_a_panic(code in proptest::collection::vec(any::<u8>(), 0..64), at: u64) {
            let _ = (constants(&code, Gva(at)), per_cpu_loads(&code, Gva(at)));
        }
    }
}
