//! Running a displaced instruction from a slot: the copy made for it, and what the copy's place
//! leaves to be put right after it ran.
//!
//! The copy is the original, byte for byte, but for a RIP-relative displacement, which is
//! recomputed, and a conditional jump, which becomes its 6-byte form to the same target. So after
//! the step only two things can still speak of the slot: RIP, if the instruction fell through,
//! and the return address that an indirect call pushed.

use super::{Displaced, Plan, Stack, StackFault};
use crate::{Gva, Regs};

/// The size in bytes of a slot.
pub const SLOT_SIZE: usize = 32;

/// What fills the rest of a slot.
const INT3: u8 = 0xcc;

/// How the bytes must change when the instruction moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relocation {
    /// Not at all.
    Verbatim,
    /// The 32-bit displacement at `offset` makes `target`, relative to the instruction's end.
    Displacement { offset: u8, target: Gva },
    /// A conditional jump, to be encoded as `0f 80+condition rel32`.
    Jcc { condition: u8, target: Gva },
}

/// Where the instruction can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// After itself.
    Next,
    /// After itself or at the target.
    Branch { target: Gva },
    /// Anywhere: a return or an indirect jump.
    Anywhere,
    /// Anywhere, with the address after itself pushed.
    Call,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCode {
    at: Gva,
    bytes: [u8; SLOT_SIZE],
    len: u8,
}

impl SlotCode {
    /// Where the slot is: the address to single-step from.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// All bytes of the slot: the instruction, then `int3`.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SLOT_SIZE] {
        &self.bytes
    }

    /// The copy's own bytes.
    #[must_use]
    pub fn instruction(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The address just after the copy.
    #[must_use]
    pub fn next(&self) -> Gva {
        self.at.wrapping_add(u64::from(self.len))
    }

    fn new(at: Gva, instruction: &[u8], len: u8) -> Self {
        let mut bytes = [INT3; SLOT_SIZE];
        bytes[..instruction.len()].copy_from_slice(instruction);
        Self { at, bytes, len }
    }
}

/// Why an instruction cannot be copied into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelocateError {
    /// A 32-bit offset does not span the distance.
    #[error("the instruction at {at} refers to {target}, beyond ±2 GiB of its slot at {slot}")]
    OutOfReach {
        /// The instruction.
        at: Gva,
        /// What it refers to.
        target: Gva,
        /// The slot it was to be copied to.
        slot: Gva,
    },
    /// It is emulated; a copy might not do the same from another address.
    #[error("the instruction at {at} is emulated and takes no slot")]
    Emulated {
        /// The instruction.
        at: Gva,
    },
}

/// How one single-step of a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEnd {
    /// The instruction took effect; the registers are as if it had run in its own place.
    Done,
    /// It has not run yet: RIP is still at the slot. Step again.
    StillInSlot,
    /// It did not run: RIP is neither at the slot nor where the instruction can lead, so an
    /// exception it raised was delivered, and its frame holds the slot's address. Nothing was
    /// changed. Returns and indirect jumps can lead anywhere and are never reported so.
    Diverted,
}

impl Displaced {
    /// The copy of the instruction to be placed at `slot`.
    ///
    /// # Errors
    /// When the instruction is not to be stepped, or refers to something out of reach of `slot`.
    pub fn relocate(&self, slot: Gva) -> Result<SlotCode, RelocateError> {
        let at = self.at;
        let Plan::Step { relocation, .. } = self.plan else {
            return Err(RelocateError::Emulated { at });
        };
        let distance = |target: Gva, len: u8| {
            let end = slot.wrapping_add(u64::from(len));
            i32::try_from(target.0.wrapping_sub(end.0).cast_signed())
                .map(i32::to_le_bytes)
                .map_err(|_| RelocateError::OutOfReach { at, target, slot })
        };
        Ok(match relocation {
            Relocation::Verbatim => SlotCode::new(slot, self.bytes(), self.len),
            Relocation::Displacement { offset, target } => {
                let mut copy = SlotCode::new(slot, self.bytes(), self.len);
                let offset = usize::from(offset);
                copy.bytes[offset..offset + 4].copy_from_slice(&distance(target, self.len)?);
                copy
            }
            Relocation::Jcc { condition, target } => {
                const LEN: u8 = 6;
                let [a, b, c, d] = distance(target, LEN)?;
                SlotCode::new(slot, &[0x0f, 0x80 | condition, a, b, c, d], LEN)
            }
        })
    }

    /// Puts right, after one single-step of `slot`, what still speaks of the slot. Hit path: at
    /// most two stack accesses, no decoding, no allocation.
    ///
    /// # Errors
    /// When the return address an indirect call pushed cannot be accessed; then `regs` is
    /// unchanged.
    ///
    /// # Panics
    /// When the action is not [`Step`](super::Action::Step).
    pub fn after_step(
        &self,
        slot: &SlotCode,
        regs: &mut Regs,
        stack: &mut impl Stack,
    ) -> Result<StepEnd, StackFault> {
        let Plan::Step { flow, .. } = self.plan else {
            unreachable!("{} is to be emulated, not stepped", self.at);
        };
        let rip = Gva(regs.rip);
        if rip == slot.at() {
            return Ok(StepEnd::StillInSlot);
        }
        Ok(match flow {
            Flow::Call => {
                let top = Gva(regs.rsp);
                if stack.read_u64(top)? == slot.next().0 {
                    stack.write_u64(top, self.next().0)?;
                    StepEnd::Done
                } else {
                    StepEnd::Diverted
                }
            }
            Flow::Anywhere => StepEnd::Done,
            Flow::Next | Flow::Branch { .. } if rip == slot.next() => {
                regs.rip = self.next().0;
                StepEnd::Done
            }
            Flow::Branch { target } if rip == target => StepEnd::Done,
            Flow::Next | Flow::Branch { .. } => StepEnd::Diverted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, SLOT, Words, bytes, displaced};
    use super::super::{Action, classify, text};
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind};
    use proptest::prelude::*;

    const TOP: u64 = 0xffff_c900_0000_1000;

    #[test]
    fn position_independent_instructions_are_copied_as_they_are() {
        for hex in [
            "488b4708",           // mov rax, [rdi+8]
            "65488b042500ad0100", // mov rax, gs:[0x1ad00]
            "f0480fb10f",         // lock cmpxchg [rdi], rcx
            "c3",                 // ret
            "f3c3",               // rep ret
            "ffd0",               // call rax
            "ff24c5004080ff",     // jmp [rax*8-0x7fc000]
        ] {
            let slot = displaced(hex).relocate(SLOT).unwrap();
            assert_eq!(slot.instruction(), bytes(hex), "{hex}");
        }
    }

    #[test]
    fn the_rest_of_a_slot_is_int3() {
        let slot = displaced("c9").relocate(SLOT).unwrap();
        assert_eq!(slot.bytes()[0], 0xc9);
        assert!(slot.bytes()[1..].iter().all(|&byte| byte == 0xcc));
        assert_eq!((slot.at(), slot.next()), (SLOT, SLOT.wrapping_add(1)));
    }

    #[test]
    fn rip_relative_operands_keep_their_target_and_their_length() {
        for hex in [
            "488b05f0ffffff",       // mov rax, [rip-0x10]
            "c70500010000efbeadde", // mov dword [rip+0x100], 0xdeadbeef
            "65488b0500200000",     // mov rax, gs:[rip+0x2000]
            "f0ff0510000000",       // lock inc dword [rip+0x10]
            "c5fd6f0500040000",     // vmovdqa ymm0, [rip+0x400]
            "ff1500010000",         // call [rip+0x100]
            "488d3d00000010",       // lea rdi, [rip+0x10000000]
        ] {
            let original = displaced(hex);
            let slot = original.relocate(SLOT).unwrap();
            assert_eq!(slot.instruction().len(), original.bytes().len());
            assert_eq!(
                text(slot.instruction(), SLOT),
                text(original.bytes(), AT),
                "{hex}"
            );
        }
    }

    #[test]
    fn conditional_jumps_become_near_and_keep_their_target() {
        for condition in 0..16_u8 {
            let short = [0x70 | condition, 0x10];
            let near = [0x0f, 0x80 | condition, 0x10, 0, 0, 0];
            for code in [&short[..], &near[..]] {
                let original = classify(code, AT).unwrap();
                let slot = original.relocate(SLOT).unwrap();
                assert_eq!(slot.instruction().len(), 6);
                assert_eq!(text(slot.instruction(), SLOT), text(code, AT));
            }
        }
        // With a branch hint.
        let hinted = displaced("2e7410").relocate(SLOT).unwrap();
        assert_eq!(hinted.instruction()[..2], [0x0f, 0x84]);
    }

    #[test]
    fn what_is_beyond_two_gibibytes_is_out_of_reach() {
        let far = Gva(0xffff_8880_0000_0000);
        for hex in ["488b05f0ffffff", "7410"] {
            let original = displaced(hex);
            let error = original.relocate(far).unwrap_err();
            assert!(matches!(error, RelocateError::OutOfReach { slot, .. } if slot == far));
            // The last slot that reaches, and the first that does not.
            let Plan::Step { relocation, .. } = original.plan else {
                panic!("stepped");
            };
            let (target, len) = match relocation {
                Relocation::Displacement { target, .. } => (target, 7),
                Relocation::Jcc { target, .. } => (target, 6),
                Relocation::Verbatim => panic!("{hex} refers to something"),
            };
            let nearest = target.wrapping_sub(len + (1 << 31) - 1);
            assert!(original.relocate(nearest).is_ok());
            assert!(original.relocate(nearest.wrapping_sub(1)).is_err());
            let furthest = target.wrapping_add((1 << 31) - len);
            assert!(original.relocate(furthest).is_ok());
            assert!(original.relocate(furthest.wrapping_add(1)).is_err());
        }
    }

    #[test]
    fn emulated_instructions_take_no_slot() {
        assert_eq!(
            displaced("e800000000").relocate(SLOT),
            Err(RelocateError::Emulated { at: AT })
        );
    }

    /// Ends a step of the instruction with RIP at `rip` and `pushed` on top of the stack.
    fn end(hex: &str, rip: u64, pushed: u64) -> (StepEnd, u64, Option<u64>) {
        let original = displaced(hex);
        let slot = original.relocate(SLOT).unwrap();
        let before = Regs {
            rip,
            rsp: TOP,
            rax: 1,
            ..Regs::default()
        };
        let mut regs = before;
        let mut stack = Words::new(TOP, &[pushed]);
        let end = original.after_step(&slot, &mut regs, &mut stack).unwrap();
        assert_eq!(Regs { rip, ..regs }, before, "only RIP may change");
        (end, regs.rip, stack.at(TOP))
    }

    const ELSEWHERE: u64 = 0xffff_ffff_8200_0000;

    #[test]
    fn falling_through_ends_after_the_original() {
        for (hex, copy_len, len) in [("488b4708", 4, 4), ("7410", 6, 2), ("0f8410000000", 6, 6)] {
            assert_eq!(
                end(hex, SLOT.0 + copy_len, 7),
                (StepEnd::Done, AT.0 + len, Some(7)),
                "{hex}"
            );
        }
    }

    #[test]
    fn taken_branches_are_where_they_should_be() {
        let target = AT.0 + 2 + 0x10;
        assert_eq!(end("7410", target, 7), (StepEnd::Done, target, Some(7)));
        for hex in ["c3", "c20800", "ffe0"] {
            assert_eq!(
                end(hex, ELSEWHERE, 7),
                (StepEnd::Done, ELSEWHERE, Some(7)),
                "{hex}"
            );
        }
    }

    #[test]
    fn an_indirect_call_gets_the_original_return_address() {
        for (hex, len) in [("ffd0", 2), ("ff5008", 3), ("ff1500010000", 6)] {
            assert_eq!(
                end(hex, ELSEWHERE, SLOT.0 + len),
                (StepEnd::Done, ELSEWHERE, Some(AT.0 + len)),
                "{hex}"
            );
        }
    }

    #[test]
    fn a_step_that_did_not_happen_is_still_in_the_slot() {
        for hex in ["488b4708", "7410", "c3", "ffd0"] {
            assert_eq!(
                end(hex, SLOT.0, SLOT.0 + 2),
                (StepEnd::StillInSlot, SLOT.0, Some(SLOT.0 + 2)),
                "{hex}"
            );
        }
    }

    #[test]
    fn an_exception_in_the_slot_is_told_from_the_instruction() {
        for hex in ["488b4708", "7410", "ff5008"] {
            assert_eq!(
                end(hex, ELSEWHERE, SLOT.0),
                (StepEnd::Diverted, ELSEWHERE, Some(SLOT.0)),
                "{hex}"
            );
        }
    }

    #[test]
    fn a_return_address_out_of_reach_changes_nothing() {
        let original = displaced("ffd0");
        let slot = original.relocate(SLOT).unwrap();
        let before = Regs {
            rip: ELSEWHERE,
            rsp: TOP,
            ..Regs::default()
        };
        let mut regs = before;
        let fault = original.after_step(&slot, &mut regs, &mut Words::default());
        assert_eq!(fault.unwrap_err().at, Gva(TOP));
        assert_eq!(regs, before);
    }

    fn decoded(code: &[u8], at: Gva) -> Instruction {
        Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).decode()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn copies_fit_their_slot_and_mean_the_same(
            code in prop::collection::vec(any::<u8>(), 15),
            opcode in prop_oneof![Just(vec![]), Just(vec![0x0f]), Just(vec![0x48]), Just(vec![0x66])],
            distance in -0x4000_0000_i64..0x4000_0000,
        ) {
            let code = [opcode, code].concat();
            let slot = Gva(AT.0.wrapping_add_signed(distance));
            let Ok(original) = classify(&code, AT) else { return Ok(()) };
            if original.action() != Action::Step { return Ok(()) }
            let Ok(copy) = original.relocate(slot) else { return Ok(()) };
            prop_assert!(copy.instruction().len() < SLOT_SIZE);
            let (a, b) = (decoded(original.bytes(), AT), decoded(copy.instruction(), slot));
            prop_assert_eq!(a.mnemonic(), b.mnemonic());
            prop_assert_eq!(a.op_count(), b.op_count());
            for op in 0..a.op_count() {
                prop_assert_eq!(a.op_kind(op), b.op_kind(op));
                prop_assert_eq!(a.op_register(op), b.op_register(op));
                if a.op_kind(op) == OpKind::NearBranch64 {
                    prop_assert_eq!(a.near_branch_target(), b.near_branch_target());
                }
            }
            prop_assert_eq!(a.memory_base(), b.memory_base());
            prop_assert_eq!(a.memory_index(), b.memory_index());
            prop_assert_eq!(a.memory_displacement64(), b.memory_displacement64());
            if a.op_kinds().any(|kind| kind == OpKind::Memory) {
                prop_assert_eq!(a.memory_segment(), b.memory_segment());
            }
            prop_assert_eq!(b.len(), copy.instruction().len());
        }
    }
}
