//! Where instructions begin.
//!
//! x86 code can be decoded from any byte and usually makes some sense. Only decoding from an address at which an
//! instruction is known to begin, such as a function's start, shows where the others begin.

use super::decode::{DecodeFailure, decode};
use super::text::text;
use crate::Gva;

/// Why an address is not the beginning of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoundaryError {
    /// The address is inside another instruction.
    #[error("{target} is inside the instruction `{text}` at {at}, {len} bytes long")]
    Inside {
        /// The address asked about.
        target: Gva,
        /// Start of the instruction around it.
        at: Gva,
        /// Length of that instruction in bytes.
        len: usize,
        /// Text of that instruction.
        text: String,
    },
    /// The bytes at `at`, before the address, are no instruction.
    #[error("no instruction boundaries beyond {at}, where the bytes are no instruction")]
    Undecodable {
        /// Where decoding ended.
        at: Gva,
    },
    /// The address is before the first byte, or past the last complete instruction.
    #[error("{target} is not in the {len} bytes of code at {start}")]
    Outside {
        /// The address asked about.
        target: Gva,
        /// Start of the code.
        start: Gva,
        /// Number of bytes of code.
        len: usize,
    },
}

/// Checks that an instruction begins at `target` if the code is decoded from `start`. `code` holds the bytes from
/// `start` on. It need not reach past `target`, except to name the instruction that `target` is inside of.
///
/// # Errors
/// When no instruction begins there, with what is there instead.
pub fn boundary(code: &[u8], start: Gva, target: Gva) -> Result<(), BoundaryError> {
    let outside = || BoundaryError::Outside {
        target,
        start,
        len: code.len(),
    };
    let wanted = target
        .offset_from(start)
        .and_then(|offset| usize::try_from(offset).ok())
        .filter(|&offset| offset <= code.len())
        .ok_or_else(outside)?;
    let mut offset = 0;
    while offset < wanted {
        let rest = &code[offset..];
        let at = address(start, offset);
        let len = match decode(rest, at) {
            Ok((instruction, _)) => instruction.len(),
            Err(DecodeFailure::Invalid) => return Err(BoundaryError::Undecodable { at }),
            Err(DecodeFailure::Truncated) => return Err(outside()),
        };
        if offset + len > wanted {
            return Err(BoundaryError::Inside {
                target,
                at,
                len,
                text: text(rest, at),
            });
        }
        offset += len;
    }
    Ok(())
}

/// Returns the length in bytes of the first instruction of `code`, which is at `at`; `None` if the bytes are no
/// instruction, or not all of one.
#[must_use]
pub fn instruction_len(code: &[u8], at: Gva) -> Option<usize> {
    decode(code, at)
        .ok()
        .map(|(instruction, _)| instruction.len())
}

fn address(start: Gva, offset: usize) -> Gva {
    start.wrapping_add(u64::try_from(offset).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, bytes};
    use super::*;
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    /// endbr64; nop5; push rbp; mov rbp, rsp; call; ret
    const FUNCTION: &str = "f30f1efa 0f1f440000 55 4889e5 e800000000 c3";

    fn check(hex: &str, offset: u64, expected: Expect) {
        let found = match boundary(&bytes(hex), Gva(0x1000), Gva(0x1000 + offset)) {
            Ok(()) => "ok".to_owned(),
            Err(error) => error.to_string(),
        };
        expected.assert_eq(&found);
    }

    #[test]
    fn every_instruction_of_a_function_is_a_boundary_and_nothing_else() {
        let starts: Vec<u64> = (0..19)
            .filter(|offset| boundary(&bytes(FUNCTION), AT, AT.wrapping_add(*offset)).is_ok())
            .collect();
        assert_eq!(starts, [0, 4, 9, 10, 13, 18]);
    }

    #[test]
    fn the_instruction_around_an_address_is_named() {
        check(
            FUNCTION,
            6,
            expect!["0x1006 is inside the instruction `nop [rax+rax]` at 0x1004, 5 bytes long"],
        );
        check(
            FUNCTION,
            15,
            expect!["0x100f is inside the instruction `call 0x1012` at 0x100d, 5 bytes long"],
        );
    }

    #[test]
    fn code_need_not_reach_past_the_address() {
        check("55", 1, expect!["ok"]);
        check("55 e8", 1, expect!["ok"]);
        check(
            "55 e8",
            2,
            expect!["0x1002 is not in the 2 bytes of code at 0x1000"],
        );
        check(
            "55",
            2,
            expect!["0x1002 is not in the 1 bytes of code at 0x1000"],
        );
    }

    #[test]
    fn bytes_that_are_no_instruction_end_what_is_known() {
        check("55 06 90", 1, expect!["ok"]);
        check(
            "55 06 90",
            2,
            expect!["no instruction boundaries beyond 0x1001, where the bytes are no instruction"],
        );
    }

    #[test]
    fn an_address_before_the_code_is_outside() {
        let error = boundary(&[0x90], Gva(0x1000), Gva(0xfff)).unwrap_err();
        expect!["0xfff is not in the 1 bytes of code at 0x1000"].assert_eq(&error.to_string());
    }

    #[test]
    fn lengths_are_those_of_whole_instructions() {
        for (hex, len) in [
            ("90", Some(1)),
            ("0f1f440000 90", Some(5)),
            ("66662e0f1f840000000000", Some(11)),
            ("0f1f44", None),
            ("06", None),
            ("", None),
            ("6666666666666666666666666666669090", None),
        ] {
            assert_eq!(instruction_len(&bytes(hex), AT), len, "{hex}");
        }
    }

    proptest! {
        #[test]
        fn garbage_has_consistent_boundaries(
            code in prop::collection::vec(any::<u8>(), 0..64),
            start in prop_oneof![any::<u64>(), u64::MAX - 32..=u64::MAX],
            target in any::<u64>(),
        ) {
            let start = Gva(start);
            let _ = boundary(&code, start, Gva(target));
            let mut offset = 0;
            while let Some(len) = instruction_len(&code[offset..], address(start, offset)) {
                prop_assert!((1..=15).contains(&len));
                for inside in 1..len {
                    let Some(target) = start.checked_add(u64::try_from(offset + inside).unwrap())
                        else { break };
                    let inside = matches!(
                        boundary(&code, start, target),
                        Err(BoundaryError::Inside { len: found, .. }) if found == len
                    );
                    prop_assert!(inside);
                }
                offset += len;
                let Some(target) = start.checked_add(u64::try_from(offset).unwrap()) else { break };
                prop_assert_eq!(boundary(&code, start, target), Ok(()));
            }
        }
    }
}
