//! The head of the guest's #BP entry, whose first bytes are replaced by a port access.
//!
//! On hosts that deliver a guest's int3 to the guest itself, the first two bytes of the guest's #BP entry (Linux:
//! `asm_exc_int3`) are replaced by `out imm8, al`, which exits to the host. The host then carries out the
//! instructions of which the patch replaces bytes. Only instructions that do nothing, or clear one flag, are
//! accepted, so carrying them out cannot fail:
//!
//! ```text
//!   [endbr64]  { nop nop nop | nop3 | clac }  cld  push -1 …
//!              └─ GateHead: whole instructions, at least 2 bytes ─┘
//! ```
//!
//! An `endbr64` at the beginning of the entry stays: where indirect branches are tracked (IBT), a processor that
//! delivers an exception to any other instruction raises #CP.
//!
//! Patching is safe if no processor is between the covered instructions. The entry is an interrupt gate, so only an
//! NMI or a machine check can interrupt a processor there.

use super::decode::{DecodeFailure, decode};
use super::text::text;
use crate::Gva;
use crate::regs::{Regs, rflags};
use iced_x86::Mnemonic;

/// `out imm8, al`.
const OUT_IMM8_AL: u8 = 0xe6;

/// `endbr64`: the instruction that exceptions and indirect branches may land on.
pub const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The length in bytes of the patch.
const PATCH_LEN: usize = 2;

/// The instructions that the gate's patch covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateHead {
    entry: Gva,
    at: Gva,
    original: [u8; PATCH_LEN],
    len: u8,
    /// Flags that the covered instructions clear.
    cleared: u64,
}

/// Why an entry cannot be made a gate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// An instruction does more than the host would carry out.
    #[error(
        "the breakpoint entry has `{text}` at {at}; only nop, endbr64, clac and cld can be replaced"
    )]
    Unsuitable {
        /// Address of the instruction.
        at: Gva,
        /// The instruction.
        text: String,
    },
    /// The bytes end before the patch does.
    #[error("the breakpoint entry is cut short at {at}")]
    Truncated {
        /// Address of the incomplete instruction.
        at: Gva,
    },
}

impl GateHead {
    /// Decodes the instructions that the patch covers. `code` begins with the entry, which is at `at`. If the entry
    /// begins with an `endbr64`, the patch comes after that instruction.
    ///
    /// # Errors
    /// When the patch would cover an instruction that is not accepted, with that instruction, or when `code` is too
    /// short.
    pub fn analyse(code: &[u8], at: Gva) -> Result<Self, GateError> {
        let entry = at;
        let (code, at) = match code.strip_prefix(&ENDBR64) {
            Some(behind) => (behind, at.wrapping_add(ENDBR64.len() as u64)),
            None => (code, at),
        };
        let mut covered = 0;
        let mut cleared = 0;
        let mut here = at;
        while covered < PATCH_LEN {
            let rest = code.get(covered..).unwrap_or_default();
            let unsuitable = || GateError::Unsuitable {
                at: here,
                text: text(rest, here),
            };
            let instruction = match decode(rest, here) {
                Ok((instruction, _)) => instruction,
                Err(DecodeFailure::Truncated) => {
                    return Err(GateError::Truncated { at: here });
                }
                Err(DecodeFailure::Invalid) => return Err(unsuitable()),
            };
            match instruction.mnemonic() {
                Mnemonic::Nop | Mnemonic::Endbr64 => {}
                Mnemonic::Clac => cleared |= rflags::AC,
                Mnemonic::Cld => cleared |= rflags::DF,
                _ => return Err(unsuitable()),
            }
            covered += instruction.len();
            here = Gva(instruction.next_ip());
        }
        let cut_short = GateError::Truncated { at: here };
        Ok(Self {
            entry,
            at,
            original: *code.first_chunk().ok_or(cut_short.clone())?,
            // At most 16: one byte, and then the longest instruction.
            len: u8::try_from(covered).map_err(|_| cut_short)?,
            cleared,
        })
    }

    /// Returns the address of the patch.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns whether a vCPU at `rip` has entered, but has not executed the patch: it is at the patch, or at the
    /// `endbr64` before the patch, where the entry begins.
    #[must_use]
    pub fn is_ahead(&self, rip: Gva) -> bool {
        rip == self.entry || rip == self.at
    }

    /// Returns the length in bytes of the instructions that the patch covers, wholly or in part: at least the
    /// patch's two bytes.
    #[must_use]
    pub fn covered(&self) -> u8 {
        self.len
    }

    /// Returns the bytes of the entry that the patch replaces.
    #[must_use]
    pub fn original(&self) -> [u8; PATCH_LEN] {
        self.original
    }

    /// Returns the patch: `out port, al`.
    #[must_use]
    pub const fn patch(port: u8) -> [u8; PATCH_LEN] {
        [OUT_IMM8_AL, port]
    }

    /// Carries out the covered instructions on `regs`, RIP included. The old value of RIP is ignored.
    pub fn apply(&self, regs: &mut Regs) {
        regs.rflags &= !(self.cleared | rflags::RF);
        regs.rip = self.at.wrapping_add(u64::from(self.len)).0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, bytes};
    use super::*;
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    const ALL: u64 = rflags::FIXED | rflags::IF | rflags::AC | rflags::DF;

    fn check(hex: &str, covered: u8, cleared: u64) {
        let code = bytes(hex);
        let head = GateHead::analyse(&code, AT).unwrap();
        assert_eq!((head.at(), head.covered()), (AT, covered), "{hex}");
        assert_eq!(head.original()[..], code[..2]);
        let before = Regs {
            rax: 5,
            rip: 1,
            rflags: ALL,
            ..Regs::default()
        };
        let mut regs = before;
        head.apply(&mut regs);
        assert_eq!(
            regs,
            Regs {
                rip: AT.0 + u64::from(covered),
                rflags: ALL & !cleared,
                ..before
            },
            "{hex}"
        );
    }

    #[test]
    fn heads_of_known_kernels_are_carried_out() {
        check("909090 fc 6aff", 2, 0);
        check("0f01ca fc 6aff", 3, rflags::AC);
        check("0f1f00 fc 6aff", 3, 0);
        check("90 0f01ca fc", 4, rflags::AC);
        check("fc 90 6aff", 2, rflags::DF);
        check("90 fc 6aff", 2, rflags::DF);
        check("66 90", 2, 0);
    }

    #[test]
    fn endbr64_at_the_entry_stays() {
        for (rest, covered, cleared) in [
            ("0f01ca fc 6aff", 3, rflags::AC),
            ("909090 fc 6aff", 2, 0),
            ("f30f1efa 90", 4, 0),
        ] {
            let code = bytes(&format!("f30f1efa {rest}"));
            let head = GateHead::analyse(&code, AT).unwrap();
            let behind = AT.wrapping_add(4);
            assert!(head.is_ahead(AT) && head.is_ahead(behind), "{rest}");
            assert!(!head.is_ahead(behind.wrapping_add(2)), "{rest}");
            assert_eq!((head.at(), head.covered()), (behind, covered), "{rest}");
            assert_eq!(head.original()[..], code[4..6]);
            let mut regs = Regs {
                rflags: ALL,
                ..Regs::default()
            };
            head.apply(&mut regs);
            assert_eq!(regs.rip, behind.0 + u64::from(covered));
            assert_eq!(regs.rflags, ALL & !cleared);
        }
    }

    #[test]
    fn the_patch_is_a_port_access_of_two_bytes() {
        let text = text(&GateHead::patch(0xf5), AT);
        assert_eq!(text, "out 0xf5, al");
    }

    fn check_refused(hex: &str, expected: Expect) {
        let error = GateHead::analyse(&bytes(hex), AT).unwrap_err();
        expected.assert_eq(&error.to_string());
    }

    #[test]
    fn anything_else_is_refused_with_what_it_is() {
        check_refused(
            "6aff",
            expect![
                "the breakpoint entry has `push 0xffffffffffffffff` at 0xffffffff81234567; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "90 6aff",
            expect![
                "the breakpoint entry has `push 0xffffffffffffffff` at 0xffffffff81234568; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "0f01cb fc",
            expect![
                "the breakpoint entry has `stac` at 0xffffffff81234567; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "cc",
            expect![
                "the breakpoint entry has `int3` at 0xffffffff81234567; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "e6f5",
            expect![
                "the breakpoint entry has `out 0xf5, al` at 0xffffffff81234567; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "f3 90",
            expect![
                "the breakpoint entry has `pause` at 0xffffffff81234567; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "90 06 90",
            expect![
                "the breakpoint entry has `(bad) 06 90` at 0xffffffff81234568; only nop, endbr64, clac and cld can be replaced"
            ],
        );
        check_refused(
            "90",
            expect!["the breakpoint entry is cut short at 0xffffffff81234568"],
        );
        check_refused(
            "",
            expect!["the breakpoint entry is cut short at 0xffffffff81234567"],
        );
        check_refused(
            "90 0f01",
            expect!["the breakpoint entry is cut short at 0xffffffff81234568"],
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(code in prop::collection::vec(any::<u8>(), 0..20), at in any::<u64>()) {
            if let Ok(head) = GateHead::analyse(&code, Gva(at)) {
                prop_assert!((2..=16).contains(&head.covered()));
                head.apply(&mut Regs::default());
            }
        }
    }
}
