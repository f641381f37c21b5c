//! Functions of the kernel that load from memory and survive a fault (`__get_user_nocheck_*` in
//! arch/x86/lib/getuser.S), in a form that generated code can call.
//!
//! ```text
//!   [endbr64] {nop}  { nop | stac | lfence }  mov[zx] edx/rdx, [rax]  xor eax, eax  { nop | clac }  ret
//!                    └─ entry                 └─ load
//! ```
//!
//! Only this form is accepted, so calls to either address do what [`Readers`](crate::detour::Readers) says: the
//! address is in RAX, only RAX, RDX and flags change, and a fault of the only load leads to the fixup that the
//! kernel's exception table has for it.

use super::decode::decode;
use crate::Gva;
use iced_x86::{Instruction, Mnemonic, OpKind, Register};

/// Maximum length in bytes of these functions, including padding and mitigations.
const LONGEST: usize = 64;

/// A function of the kernel that loads from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loader {
    /// The first instruction that has an effect. Calls to this address may load from memory of the process.
    pub entry: Gva,
    /// The load. Calls to this address may load from memory of the kernel.
    pub load: Gva,
    /// Length in bytes, from the beginning of the function to the end of its return.
    pub len: usize,
    /// Target of the jump with which the function ends, if it does not end with `ret`. The caller of
    /// [`Loader::analyse`] has to check that this is a return thunk.
    pub thunk: Option<Gva>,
}

impl Loader {
    /// Analyses the function at `at`, with which `code` begins. Returns `None` unless it loads `size` bytes and
    /// does nothing else.
    #[must_use]
    pub fn analyse(code: &[u8], at: Gva, size: usize) -> Option<Self> {
        let (mut entry, mut load) = (None, None);
        let mut cleared = false;
        let mut offset = 0;
        while offset < LONGEST {
            let here = at.wrapping_add(offset as u64);
            let (instruction, _) = decode(code.get(offset..)?, here).ok()?;
            offset += instruction.len();
            match instruction.mnemonic() {
                Mnemonic::Nop => {}
                Mnemonic::Endbr64 if entry.is_none() => {}
                Mnemonic::Stac | Mnemonic::Lfence if load.is_none() => {
                    entry.get_or_insert(here);
                }
                Mnemonic::Mov | Mnemonic::Movzx if load.is_none() && loads(&instruction, size) => {
                    entry.get_or_insert(here);
                    load = Some(here);
                }
                Mnemonic::Xor if load.is_some() && clears_eax(&instruction) => cleared = true,
                Mnemonic::Clac if cleared => {}
                Mnemonic::Ret | Mnemonic::Jmp if cleared && leaves(&instruction) => {
                    return Some(Self {
                        entry: entry?,
                        load: load?,
                        len: offset,
                        thunk: (instruction.mnemonic() == Mnemonic::Jmp)
                            .then(|| Gva(instruction.near_branch_target())),
                    });
                }
                _ => return None,
            }
        }
        None
    }
}

/// Returns whether `instruction` loads `size` bytes from the address in RAX into RDX, zero-extended:
/// `mov rdx, [rax]` and the like.
fn loads(instruction: &Instruction, size: usize) -> bool {
    let into = match size {
        8 => Register::RDX,
        _ => Register::EDX,
    };
    let widens = instruction.mnemonic() == Mnemonic::Movzx;
    instruction.op0_register() == into
        && instruction.op1_kind() == OpKind::Memory
        && instruction.memory_base() == Register::RAX
        && instruction.memory_index() == Register::None
        && instruction.memory_displacement64() == 0
        && instruction.segment_prefix() == Register::None
        && instruction.memory_size().size() == size
        && widens == (size < 4)
}

fn clears_eax(instruction: &Instruction) -> bool {
    instruction.op0_register() == Register::EAX && instruction.op1_register() == Register::EAX
}

/// Returns whether `instruction` returns, or jumps to code that may return.
fn leaves(instruction: &Instruction) -> bool {
    match instruction.mnemonic() {
        Mnemonic::Ret => instruction.op_count() == 0,
        _ => instruction.op0_kind() == OpKind::NearBranch64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insn::testing::bytes;

    const AT: Gva = Gva(0xffff_ffff_81c0_1000);

    /// Analyses the function `hex`, and returns the offsets of its entry and of its load, and its length.
    fn load(hex: &str, size: usize) -> Option<(u64, u64, usize)> {
        let loader = Loader::analyse(&bytes(hex), AT, size)?;
        Some((loader.entry.0 - AT.0, loader.load.0 - AT.0, loader.len))
    }

    #[test]
    fn the_kernels_functions_are_recognized() {
        // With SMAP and speculation barriers, as in Linux 6.1; without SMAP, as on other processors; without SMAP
        // and barriers; with ENDBR64 and a return thunk, as in 6.12.
        let with_smap = "0f01cb 0faee8 488b10 31c0 0f01ca c3";
        assert_eq!(load(with_smap, 8), Some((0, 6, 15)));
        let without = "909090 0faee8 488b10 31c0 909090 c3";
        assert_eq!(load(without, 8), Some((3, 6, 15)));
        let plain = "0f1f00 0f1f00 8b10 31c0 0f1f00 c3";
        assert_eq!(load(plain, 4), Some((6, 6, 14)));
        assert_eq!(
            load("f30f1efa 0f01cb 0faee8 0fb710 31c0 0f01ca e900000010", 2),
            Some((4, 10, 23))
        );
        assert_eq!(load("0fb610 31c0 c3", 1), Some((0, 0, 6)));
        let by_thunk = Loader::analyse(&bytes("488b10 31c0 e9f6feffff"), AT, 8).unwrap();
        assert_eq!(by_thunk.thunk, Some(Gva(AT.0 - 0x100)));
    }

    #[test]
    fn what_does_anything_else_is_none() {
        for (hex, size) in [
            // Another size, another address, another register, a segment, a sign.
            ("8b10 31c0 c3", 8),
            ("488b10 31c0 c3", 4),
            ("488b5008 31c0 c3", 8),
            ("488b11 31c0 c3", 8),
            ("488b08 31c0 c3", 8),
            ("65488b10 31c0 c3", 8),
            ("0fbe10 31c0 c3", 1),
            // No load, two loads, no load before the result (`xor eax, eax`), no result, no end.
            ("31c0 c3", 8),
            ("488b10 488b10 31c0 c3", 8),
            ("31c0 488b10 c3", 8),
            ("488b10 c3", 8),
            ("488b10 31c0", 8),
            // Other instructions. One that checks the address is refused because a call to the load would skip it.
            ("488b10 31c0 48ffc1 c3", 8),
            ("4839c2 488b10 31c0 c3", 8),
            ("488b10 31c0 ffe0", 8),
            ("488b10 31c0 c20800", 8),
        ] {
            assert_eq!(load(hex, size), None, "{hex}");
        }
    }
}
