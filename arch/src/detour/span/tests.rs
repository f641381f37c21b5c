use super::*;
use crate::insn::testing::bytes;
use expect_test::{Expect, expect};
use proptest::prelude::*;

/// Address of the tests' functions.
const START: Gva = Gva(0xffff_ffff_8123_4560);
/// Addresses that detours may have.
const REGION: Range<Gva> = Gva(0xffff_ffff_8000_0000)..Gva(0xffff_ffff_8100_0000);

fn find(hex: &str, offset: u64) -> Result<Span, Unfit> {
    Span::find(&bytes(hex), START, START.wrapping_add(offset))
}

fn check(hex: &str, offset: u64, expected: Expect) {
    let found = match find(hex, offset) {
        Ok(span) => {
            let interior: Vec<u64> = span.interior().collect();
            format!("{} bytes, interior {interior:?}", span.bytes().len())
        }
        Err(Unfit::Refused { at, reason }) => format!("{at}: {reason}"),
        Err(unfit) => unfit.to_string(),
    };
    expected.assert_eq(&found);
}

#[test]
fn whole_instructions_of_at_least_five_bytes_are_displaced() {
    check("0f1f440000 c3", 0, expect!["5 bytes, interior []"]);
    check(
        "48b8 1122334455667788 c3",
        0,
        expect!["10 bytes, interior []"],
    );
    // push rbp; mov rbp, rsp; push r15
    check("55 4889e5 4157 c3", 0, expect!["6 bytes, interior [1, 4]"]);
    check(
        "90 90 90 90 90 c3",
        0,
        expect!["5 bytes, interior [1, 2, 3, 4]"],
    );
    // Instructions after a return, to which nothing leads.
    check("5b c3 666690 c3", 0, expect!["5 bytes, interior [1, 2]"]);
    // A call whose return address is after the jump.
    check("55 4157 ffd0 c3", 0, expect!["5 bytes, interior [1, 3]"]);
    check("e800000000 c3", 0, expect!["5 bytes, interior []"]);
}

#[test]
fn a_jump_stays_in_its_function() {
    check(
        "90 55 5d c3",
        1,
        expect![
            "a jump at 0xffffffff81234561 would run past the function's end at 0xffffffff81234564"
        ],
    );
    check(
        "55 c3",
        2,
        expect![
            "no instruction of the function at 0xffffffff81234560 begins at 0xffffffff81234562"
        ],
    );
    check(
        "55 c3",
        u64::MAX,
        expect![
            "no instruction of the function at 0xffffffff81234560 begins at 0xffffffff8123455f"
        ],
    );
    // The address is inside `mov eax, 0x90909090`, and the jump would cover more than one instruction.
    check(
        "b890909090 90909090 c3",
        1,
        expect![
            "no instruction of the function at 0xffffffff81234560 begins at 0xffffffff81234561"
        ],
    );
}

#[test]
fn instructions_that_cannot_be_moved_are_refused() {
    check(
        "90 0f0b 9090 c3",
        0,
        expect![
            "0xffffffff81234561: it marks a BUG or WARN, which the kernel looks up by the address of the trap"
        ],
    );
    check(
        "90 fb 909090 c3",
        0,
        expect![
            "the instruction at 0xffffffff81234561 may enable interrupts, which takes effect one instruction later"
        ],
    );
    check(
        "9d 90909090 c3",
        0,
        expect![
            "the instruction at 0xffffffff81234560 may enable interrupts, which takes effect one instruction later"
        ],
    );
    check(
        "f4 90909090 c3",
        0,
        expect![
            "0xffffffff81234560: hlt after sti relies on no interrupt in between, and a hit lets one in"
        ],
    );
    check(
        "8ed0 909090 c3",
        0,
        expect![
            "0xffffffff81234560: loading SS holds off exceptions for one more instruction, which a hit would undo"
        ],
    );
    check(
        "f30f1efa 55 c3",
        0,
        expect!["indirect branches land on the endbr64 at 0xffffffff81234560"],
    );
    check(
        "ffd0 909090 c3",
        0,
        expect!["the call at 0xffffffff81234560 would return into the jump"],
    );
    check(
        "90 ff542408 c3",
        0,
        expect!["the call at 0xffffffff81234561 finds its target with the stack pointer"],
    );
    check(
        "909090 ffd4 c3",
        0,
        expect!["the call at 0xffffffff81234563 finds its target with the stack pointer"],
    );
    check(
        "90 06 909090",
        0,
        expect!["0xffffffff81234561: the bytes there are no instruction"],
    );
}

#[test]
fn branches_into_the_jump_are_found_wherever_they_are() {
    // push rbp; mov rbp, rsp; push r15; ...; jmp to the mov, backwards
    check(
        "55 4889e5 4157 90 ebf8 c3",
        0,
        expect!["the branch at 0xffffffff81234567 leads to 0xffffffff81234561, inside the jump"],
    );
    // A near branch forwards, to the inside of an instruction.
    check(
        "0f8402000000 55 4889e5 4157 c3",
        6,
        expect!["the branch at 0xffffffff81234560 leads to 0xffffffff81234568, inside the jump"],
    );
    // A call, and `loop`.
    check(
        "55 4889e5 4157 e8f6ffffff c3",
        0,
        expect!["the branch at 0xffffffff81234566 leads to 0xffffffff81234561, inside the jump"],
    );
    check(
        "55 4889e5 4157 e2f9 c3",
        0,
        expect!["the branch at 0xffffffff81234566 leads to 0xffffffff81234561, inside the jump"],
    );
    // Branches to the jump's first byte and to the byte after the displaced instructions do not matter.
    check(
        "55 4889e5 4157 ebf8 ebfc c3",
        0,
        expect!["6 bytes, interior [1, 4]"],
    );
    // The displaced instructions' own branches count.
    check(
        "7401 90 90 90 c3",
        0,
        expect!["the branch at 0xffffffff81234560 leads to 0xffffffff81234563, inside the jump"],
    );
    // A jump that displaces one instruction has no interior boundary, so the function is not checked.
    check(
        "ebff 0f1f440000 ffe0 06",
        2,
        expect!["5 bytes, interior []"],
    );
}

#[test]
fn what_may_hide_a_branch_into_the_jump_counts_as_one() {
    check(
        "55 4889e5 4157 ff24c500408081",
        0,
        expect!["the indirect jump at 0xffffffff81234566 may lead inside the jump"],
    );
    check(
        "55 4889e5 4157 c3 06",
        0,
        expect![
            "the bytes at 0xffffffff81234567 are no instruction, so that branches beyond are not known"
        ],
    );
    check(
        "55 4889e5 4157 c3 e800",
        0,
        expect![
            "the bytes at 0xffffffff81234567 are no instruction, so that branches beyond are not known"
        ],
    );
}

#[test]
fn other_parts_of_a_function_are_checked_the_same_way() {
    let span = find("55 4889e5 4157 c3", 0).unwrap();
    let cold = START.wrapping_add(0x1000);
    // jmp START + 4, jmp START + 6
    assert_eq!(
        span.check_branches(&bytes("90 e9feefffff"), cold),
        Err(Unfit::Branch {
            from: cold.wrapping_add(1),
            to: START.wrapping_add(4)
        })
    );
    assert_eq!(span.check_branches(&bytes("90 e900f0ffff"), cold), Ok(()));
    let inside = [0, 1, 4, 5, 6].map(|offset| span.is_interior(START.wrapping_add(offset)));
    assert_eq!(inside, [false, true, true, true, false]);
    assert!(!span.is_interior(START.wrapping_sub(1)));
}

#[test]
fn jumps_are_int3_at_the_boundaries_that_can_be() {
    // The code, the bytes of the jump that are fixed (others are zero here), and the distance between targets.
    for (hex, shape, period) in [
        ("55 4889fd 53 c3", [0xe9, 0xcc, 0, 0, 0], 0x100),
        ("4157 4889fd c3", [0xe9, 0, 0xcc, 0, 0], 0x10),
        ("55 53 4889fd c3", [0xe9, 0xcc, 0xcc, 0, 0], 0x1_0000),
        ("4889fd 4157 c3", [0xe9, 0, 0, 0, 0], 0x10),
    ] {
        let span = find(hex, 0).unwrap();
        let targets: Vec<Gva> = span.targets(REGION).take(3).collect();
        for target in &targets {
            assert!(span.fits(*target));
            let jump = span.jump(*target).unwrap();
            for (byte, wanted) in jump.iter().zip(shape).filter(|(_, wanted)| *wanted != 0) {
                assert_eq!(*byte, wanted, "{hex} {target}");
            }
        }
        assert_eq!(targets[1].0 - targets[0].0, period, "{hex}");
        let number = span.targets(REGION).count();
        assert!(number >= 255, "{hex}: {number} targets");
    }
    assert!(find("55 4889fd 53 c3", 0).unwrap().needs_quiescence());
    assert!(find("4889fd 4157 c3", 0).unwrap().needs_quiescence());
    assert!(!find("55 53 4889fd c3", 0).unwrap().needs_quiescence());
    assert!(!find("0f1f440000 c3", 0).unwrap().needs_quiescence());
}

#[test]
fn targets_may_be_anywhere_in_reach() {
    let at = Gva(0x1000_1000);
    let span = Span::find(&bytes("0f1f440000"), at, at).unwrap();
    let first = |start, end| span.targets(Gva(start)..Gva(end)).next();
    assert_eq!(first(0x1000_0008, 0x1000_1000), Some(Gva(0x1000_0010)));
    assert_eq!(first(0x1000_2000, 0x1000_2001), Some(Gva(0x1000_2000)));
    assert_eq!(first(0x1000_2001, 0x1000_2010), None);
    assert_eq!(first(0x2000, 0x1000), None);
}

#[test]
fn a_jump_reaches_2_gib() {
    let span = find("0f1f440000 c3", 0).unwrap();
    let end = span.end();
    assert!(span.jump(end.wrapping_sub(1 << 31)).is_ok());
    let error = span.jump(end.wrapping_sub((1 << 31) + 1)).unwrap_err();
    expect!["a jump at 0xffffffff81234560 does not reach 0xffffffff01234564, beyond ±2 GiB"]
        .assert_eq(&error.to_string());
    assert!(!span.fits(Gva(0x1_0000_0000)));
}

proptest! {
    #[test]
    fn targets_are_all_that_fit(
        which in 0_usize..4,
        start in 0xffff_ffff_8000_0000_u64..0xffff_ffff_8100_0000,
        len in 0_u64..0x3_0000,
    ) {
        let code = ["90 0f1f4000", "6690 0f1f00", "90 90 0f1f00", "0f1f440000"][which];
        let span = find(code, 0).unwrap();
        let within = start..start + len;
        let step = if which % 2 == 0 { 1 } else { 16 };
        let all: Vec<Gva> = within
            .clone()
            .filter(|at| at % step == 0)
            .map(Gva)
            .filter(|at| span.fits(*at))
            .collect();
        let found: Vec<Gva> = span.targets(Gva(within.start)..Gva(within.end)).collect();
        prop_assert_eq!(found, all);
    }

    #[test]
    fn garbage_is_displaced_or_refused(
        code in prop::collection::vec(any::<u8>(), 0..64),
        start in prop_oneof![any::<u64>(), u64::MAX - 32..=u64::MAX],
        offset in 0_u64..64,
    ) {
        if let Ok(span) = Span::find(&code, Gva(start), Gva(start.wrapping_add(offset))) {
            prop_assert!((5..=19).contains(&span.bytes().len()));
            prop_assert!(span.interior().all(|offset| (1..=4).contains(&offset)));
        }
    }
}
