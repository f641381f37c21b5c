//! Whether a function returns and where it ends, from its instructions.
//!
//! A return probe waits for a return; on a function that never returns it would wait for ever.

use super::decode::instructions;
use crate::Gva;
use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind};

/// Returns whether the function at `start`, whose whole code is `code`, may return to its caller. It may if one of
/// its instructions, decoded from beginning to end, is a near return, an indirect jump, or a jump to an address
/// outside, which may be a tail call or a return thunk.
///
/// In doubt the answer is `true`: even in a function that never returns, such a jump may lead to a part of the
/// function that the compiler put elsewhere, and bytes that are no instruction may hide anything. `false` is
/// certain, provided that `code` is the function as it was built, without breakpoints in it, and that the function
/// does not run on into the next one at its end.
#[must_use]
pub fn may_return(code: &[u8], start: Gva) -> bool {
    instructions(code, start).any(|(_, found)| match found {
        Ok(instruction) => leaves(&instruction, code.len(), start),
        Err(_) => true,
    })
}

/// Returns the length of a function in bytes, without the padding before the next function: int3s, and no-ops that
/// are never reached. `code` is the whole code of the function, at `start`, with the padding. If a part of it
/// cannot be decoded, returns its whole length, because that part may hide anything.
#[must_use]
pub fn code_len(code: &[u8], start: Gva) -> usize {
    let mut last = None;
    // Ends of the last instruction that is not padding, and of the no-ops after it.
    let (mut end, mut no_ops) = (0, 0);
    let mut at = 0;
    for (_, found) in instructions(code, start) {
        let Ok(instruction) = found else {
            return code.len();
        };
        at += instruction.len();
        match instruction.mnemonic() {
            Mnemonic::Int3 => {}
            Mnemonic::Nop => no_ops = at,
            _ => {
                last = Some(instruction.flow_control());
                (end, no_ops) = (at, at);
            }
        }
    }
    match last {
        Some(
            FlowControl::Return
            | FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::Exception,
        ) => end,
        // Int3s that the code runs into are planted breakpoints, not padding.
        Some(FlowControl::Next | FlowControl::ConditionalBranch) if no_ops < code.len() => {
            code.len()
        }
        _ => no_ops,
    }
}

/// Returns whether the instruction may return, or may jump out of the `len` bytes at `start`.
fn leaves(instruction: &Instruction, len: usize, start: Gva) -> bool {
    match instruction.flow_control() {
        // Returns from interrupts and system calls do not go to the caller.
        FlowControl::Return => instruction.mnemonic() == Mnemonic::Ret,
        FlowControl::IndirectBranch => true,
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            // All other branches are far.
            instruction.op0_kind() != OpKind::NearBranch64
                || Gva(instruction.near_branch_target())
                    .offset_from(start)
                    .and_then(|offset| usize::try_from(offset).ok())
                    .is_none_or(|offset| offset >= len)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, bytes};
    use super::*;
    use proptest::prelude::*;

    fn check(may: bool, hex: &str) {
        assert_eq!(may_return(&bytes(hex), AT), may, "{hex}");
    }

    #[test]
    fn padding_begins_behind_what_goes_nowhere() {
        for (hex, len) in [
            ("55 c3", 2),
            ("55 c3 90 0f1f440000", 2),
            ("55 c3 cc cc cc", 2),
            ("55 ebfd 6690", 3),
            ("0f0b 90 cc", 2),
            // The code may run on into the no-ops.
            ("55 90 90", 3),
            ("e800000000 90 cc cc", 6),
            // A breakpoint that was planted at the return.
            ("55 5d cc", 3),
            ("55 74fd cc cc", 5),
            // No-ops before code are not padding, and bytes that are no instruction are unknown.
            ("c3 90 90 c3", 4),
            ("c3 06 90", 3),
            ("90 90", 2),
        ] {
            assert_eq!(code_len(&bytes(hex), AT), len, "{hex}");
        }
    }

    #[test]
    fn returns_are_found_wherever_they_are() {
        check(true, "c3");
        check(true, "f30f1efa 55 4889e5 e800000000 5d c3");
        check(true, "c20800");
        check(true, "f3c3 90 cc");
        // A loop that returns from its middle.
        check(true, "90 7401 c3 ebfa");
    }

    #[test]
    fn tail_calls_and_thunks_may_return() {
        check(true, "e900000010"); // jmp __x86_return_thunk
        check(true, "ebf0");
        check(true, "eb00"); // just past the end
        check(true, "ffe0");
        check(true, "ff24c500408081");
        check(true, "0f8400000010 0f0b"); // je elsewhere
        check(true, "e310 0f0b");
        check(true, "ff28"); // far
    }

    #[test]
    fn functions_without_a_way_out_never_return() {
        check(false, "f30f1efa 55 e800000010 0f0b");
        check(false, "e800000010");
        check(false, "fa f4 ebfd"); // cli; 1: hlt; jmp 1b
        check(false, "31c0 7402 ebfc 0f0b");
        check(false, "e800000010 ebfe cc cc");
        check(false, "ff1500000000 ffd0 0f0b");
        check(false, "48cf"); // iretq
        check(false, "0f01f8 480f07"); // swapgs; sysretq
        // c3 is an operand here.
        check(false, "b8c3c3c3c3 0f0b");
        check(false, "");
    }

    #[test]
    fn what_cannot_be_decoded_may_return() {
        check(true, "0f0b 06");
        check(true, "0f0b e800");
    }

    #[test]
    fn code_at_the_end_of_the_address_space_is_taken_as_it_is() {
        assert!(!may_return(&bytes("ebfe"), Gva(u64::MAX - 1)));
        assert!(may_return(&bytes("eb00"), Gva(u64::MAX - 1)));
        assert!(may_return(&bytes("90 c3"), Gva(u64::MAX)));
    }

    proptest! {
        #[test]
        fn garbage_ends(code in prop::collection::vec(any::<u8>(), 0..256), at in any::<u64>()) {
            let _ = may_return(&code, Gva(at));
        }

        #[test]
        fn a_function_of_calls_returns_only_by_its_ret(calls in 0..40_usize, returns in any::<bool>()) {
            let call = [0xe8_u8, 0, 0, 0, 0x10];
            let mut code: Vec<u8> = call.iter().copied().cycle().take(calls * 5).collect();
            code.extend(if returns { &[0xc3][..] } else { &[0x0f, 0x0b] });
            prop_assert_eq!(may_return(&code, AT), returns);
        }
    }
}
