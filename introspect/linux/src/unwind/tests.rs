mod modules;

use std::collections::HashMap;
use std::sync::Arc;

use hvprobe_arch::{Gva, Regs};
use proptest::prelude::*;

use super::orc::Tables;
use super::{Orc, OrcError, Start, Surroundings, Unwinder};

const TEXT: u64 = 0xffff_ffff_8100_0000;
const TABLES: Gva = Gva(0xffff_ffff_8200_0000);
const STACK: u64 = 0xffff_c900_0000_4000 - 0x400;
const OTHER: u64 = 0xffff_c900_0010_0000;
/// Address of the trampoline that the guest's kernel puts in place of return addresses.
const TRAMPOLINE: u64 = TEXT + 0x900;
/// Address of the stub that our return probes put in place of return addresses.
const OURS: u64 = 0xffff_ffff_8000_1000;
/// An address in a detour for the start of a function.
const DETOUR: u64 = 0xffff_ffff_8000_2000;

/// How a kernel version encodes entries.
#[derive(Clone, Copy, Debug)]
struct Dialect {
    call: u16,
    registers: u16,
    iret: u16,
    end: u16,
    sp: u16,
    prev_sp: u16,
    bp_indirect: u16,
}

const OLD: Dialect = Dialect {
    call: 0,
    registers: 1 << 8,
    iret: 2 << 8,
    end: 1 << 10,
    sp: 5,
    prev_sp: 1 << 4,
    bp_indirect: 8,
};
const V63: Dialect = Dialect {
    registers: 1 << 8 | 1 << 10,
    iret: 2 << 8 | 1 << 10,
    end: 1 << 11,
    ..OLD
};
const V64: Dialect = Dialect {
    call: 2 << 8,
    registers: 3 << 8 | 1 << 11,
    iret: 4 << 8 | 1 << 11,
    end: 1 << 8,
    ..OLD
};
const V72: Dialect = Dialect {
    sp: 3,
    prev_sp: 8 << 4,
    bp_indirect: 10,
    ..V64
};
const ALL: [Dialect; 4] = [OLD, V63, V64, V72];

fn entry(sp: i16, bp: i16, word: u16) -> [u8; 6] {
    let ([a, b], [c, d], [e, f]) = (sp.to_le_bytes(), bp.to_le_bytes(), word.to_le_bytes());
    [a, b, c, d, e, f]
}

/// Returns the entries of functions that are 0x100 bytes apart. Each function has an entry for its first
/// instruction, and from 16 bytes on one of the rules below.
fn entries(dialect: Dialect) -> Vec<(u64, [u8; 6])> {
    let Dialect {
        call,
        registers,
        iret,
        end,
        sp,
        prev_sp,
        bp_indirect,
    } = dialect;
    let inside = [
        // 0x000: after `push %rbp; sub $8, %rsp`.
        entry(24, -16, call | sp | prev_sp),
        // 0x100: three words on the stack.
        entry(32, 0, call | sp),
        // 0x200: a frame pointer; the caller's RBP is saved below the return address.
        entry(16, -16, call | 4 | prev_sp),
        // 0x300: the stack pointer is read from RBP - 8.
        entry(-8, 0, call | bp_indirect | 4 << 4),
        // 0x400: an exception.
        entry(0, 0, registers | sp),
        // 0x500: an exception that saved no registers.
        entry(8, 0, iret | sp),
        // 0x600: the outermost function.
        entry(0, 0, end),
        // 0x700: on another stack, whose top word leads back to the first one.
        entry(16, 0, call | 9),
        // 0x800: an unknown rule.
        entry(0, 0, 15 << 8),
    ];
    let functions = (TEXT..).step_by(0x100).zip(inside);
    functions
        .flat_map(|(at, inside)| [(at, entry(8, 0, call | sp)), (at + 0x10, inside)])
        .collect()
}

fn read(entries: &[(u64, [u8; 6])]) -> Result<Orc, OrcError> {
    let places = (TABLES.0..).step_by(4);
    let addresses = places.zip(entries).flat_map(|(place, (at, _))| {
        let offset = at.wrapping_sub(place).cast_signed();
        i32::try_from(offset).expect("near").to_le_bytes()
    });
    let addresses: Vec<u8> = addresses.collect();
    let rules: Vec<u8> = entries.iter().flat_map(|(_, entry)| *entry).collect();
    let tables = Tables {
        at: TABLES,
        addresses: &addresses,
        entries: &rules,
    };
    let functions = (TEXT..TEXT + 0x900).step_by(0x100).map(Gva);
    let trampolines = Box::new([Gva(TRAMPOLINE)]);
    Orc::read(tables, (TEXT..TEXT + 0x1000, 0..0), functions, trampolines)
}

/// The words on a guest's stacks, by address.
#[derive(Default)]
struct Guest(HashMap<u64, u64>);

impl Surroundings for Guest {
    fn word(&self, at: Gva) -> Option<u64> {
        self.0.get(&at.0).copied()
    }

    fn returns_to(&self, found: Gva, _: Gva) -> Option<Gva> {
        match found.0 {
            OURS => Some(Gva(TEXT + 0x620)),
            _ => Some(found),
        }
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        match at.0 {
            OURS => (Gva(TEXT + 0x600), 0),
            DETOUR => (Gva(TEXT + 0x100), 24),
            _ => (at, 0),
        }
    }
}

/// Unwinds the stack of a guest whose memory has these words. Returns the frames as offsets in the text, and
/// whether the stack may have more frames.
fn stack(dialect: Dialect, regs: Regs, returned: bool, words: &[(u64, u64)]) -> (Vec<u64>, bool) {
    let unwinder = Unwinder::new(Arc::new(read(&entries(dialect)).expect("tables")), None);
    let guest = Guest(words.iter().copied().collect());
    let start = Start {
        regs: &regs,
        returned,
    };
    let mut frames = [Gva(0); 31];
    let (count, goes_on) = unwinder.walk(&guest, start, &mut frames);
    let frames = frames[..count].iter();
    (frames.map(|at| at.0.wrapping_sub(TEXT)).collect(), goes_on)
}

fn at(rip: u64) -> Regs {
    Regs {
        rip: TEXT + rip,
        rsp: STACK,
        ..Regs::default()
    }
}

#[test]
fn callers_are_found_by_the_rules_of_every_format() {
    for dialect in ALL {
        let words = [
            // The function at 0x100, just entered: its return address.
            (STACK, TEXT + 0x20),
            // The function at 0x20, and then the one at 0x220, which has a frame pointer: the saved RBP and the
            // return address.
            (STACK + 16, STACK + 0x40),
            (STACK + 24, TEXT + 0x220),
            (STACK + 0x40, STACK + 0x60),
            (STACK + 0x48, TEXT + 0x320),
            // The function at 0x320: its caller's stack pointer, the saved RBP, and the return address.
            (STACK + 0x58, STACK + 0x80),
            (STACK + 0x60, 0),
            (STACK + 0x78, TEXT + 0x620),
        ];
        let found = stack(dialect, at(0x100), false, &words);
        let expected = vec![0x100, 0x20, 0x220, 0x320, 0x620];
        assert_eq!(found, (expected, false), "{dialect:?}");
    }
}

#[test]
fn interrupted_functions_are_found_by_their_next_instruction() {
    for dialect in ALL {
        let registers = |frame: u64, rip, sp, code| {
            let at = frame + 128;
            [(at, rip), (at + 8, code), (at + 24, sp)]
        };
        // The interrupt came before the first instruction of a function, so the instruction before it is another
        // function's.
        let mut words = registers(STACK, TEXT + 0x100, OTHER, 0x10).to_vec();
        words.push((STACK + 32, 0x1234));
        words.push((OTHER, TEXT + 0x620));
        let found = stack(dialect, at(0x420), false, &words);
        assert_eq!(found, (vec![0x420, 0x100, 0x620], false), "{dialect:?}");

        // The interrupted code is a process, so the kernel's stack ends there.
        let words = registers(STACK, 0x40_0000, 0x7fff_0000, 0x33);
        let found = stack(dialect, at(0x420), false, &words);
        assert_eq!(found, (vec![0x420], false), "{dialect:?}");

        // An exception that saved no registers has only its IRET frame. It interrupted the copy of an
        // instruction.
        let frame = STACK + 8;
        let words = [(frame, OURS), (frame + 8, 0x10), (frame + 24, OTHER)];
        let found = stack(dialect, at(0x520), false, &words);
        assert_eq!(found.0, [0x520, 0x600], "{dialect:?}");
    }
}

#[test]
fn stacks_lead_to_others_but_not_to_many() {
    let words = [
        (STACK, OTHER),
        (OTHER + 8, TEXT + 0x620),
        (OTHER, TEXT + 0x720),
    ];
    let found = stack(V64, at(0x720), false, &words);
    assert_eq!(found, (vec![0x720, 0x620], false));

    // Each stack leads to the next, without an end.
    let tops = (0..40_u64).map(|n| OTHER + n * 0x10_0000);
    let mut words = vec![(STACK, OTHER)];
    for top in tops {
        words.push((top + 8, TEXT + 0x720));
        words.push((top + 16, top + 0x10_0000));
    }
    let (frames, goes_on) = stack(V64, at(0x720), false, &words);
    assert!(goes_on && frames.len() < 12, "{frames:x?}");
}

#[test]
fn what_return_probes_put_there_is_reported_as_what_was_there() {
    let found = stack(V64, at(0x100), false, &[(STACK, OURS)]);
    assert_eq!(found, (vec![0x100, 0x620], false));
    // The guest's own trampoline is reported, and ends the stack.
    let found = stack(V64, at(0x100), false, &[(STACK, TRAMPOLINE)]);
    assert_eq!(found, (vec![0x100, 0x900], true));
}

#[test]
fn stacks_lead_through_code_that_serves_probes() {
    let caller = TEXT + 0x620;
    // First, an interrupt in the detour; then, a function of the kernel that the detour called.
    let frame = STACK + 8;
    let words = [
        (frame, DETOUR),
        (frame + 8, 0x10),
        (frame + 24, OTHER),
        (OTHER + 24, caller),
    ];
    let found = stack(V64, at(0x520), false, &words);
    assert_eq!(found, (vec![0x520, 0x100, 0x620], false));
    let words = [(STACK, DETOUR), (STACK + 8 + 24, caller)];
    let found = stack(V64, at(0x100), false, &words);
    assert_eq!(found, (vec![0x100, 0x100, 0x620], false));
}

#[test]
fn returns_are_found_by_the_call_before_them() {
    let words = [(STACK + 0x18, TEXT + 0x620)];
    // The call was the last instruction of the function at 0x100, so its return address is the start of the next
    // function.
    let found = stack(V64, at(0x200), true, &words);
    assert_eq!(found, (vec![0x200, 0x620], false));
}

#[test]
fn stack_that_cannot_be_followed_says_that_it_goes_on() {
    for words in [
        &[][..],
        // A return address in a process.
        &[(STACK, 0x40_0000)],
        // A return address in a module, without that module's tables.
        &[(STACK, 0xffff_ffff_c000_0000)],
        &[(STACK, TEXT + 0x820)],
    ] {
        let (frames, goes_on) = stack(V64, at(0x100), false, words);
        assert!(goes_on, "{frames:x?}");
        assert!(
            frames
                .iter()
                .skip(1)
                .all(|at| at.wrapping_add(TEXT) >= OURS)
        );
    }
}

#[test]
fn tables_that_make_no_sense_are_refused() {
    let all = entries(V64);
    assert_eq!(read(&[]).unwrap_err(), OrcError::Missing);
    let mut turned = all.clone();
    turned.reverse();
    assert_eq!(read(&turned).unwrap_err(), OrcError::Unsorted);
    let strange: Vec<_> = all.iter().map(|(at, _)| (*at, [0xff; 6])).collect();
    assert_eq!(read(&strange).unwrap_err(), OrcError::Format);
}

proptest! {
    /// For any entries and stacks, frames are kernel text, and the first one is where unwinding began.
    #[test]
    fn hostile_tables_and_stacks_end(
        dialect in 0..4_usize,
        rules in proptest::collection::vec(any::<[u8; 6]>(), 9),
        words in proptest::collection::vec((0..64_u64, 0..3_u8, any::<u64>()), 0..64),
        regs in (0..0x900_u64, 0..64_u64, any::<u64>()),
        returned: bool,
    ) {
        let mut all = entries(ALL[dialect]);
        for ((_, entry), rule) in all.iter_mut().skip(1).step_by(2).zip(rules) {
            *entry = rule;
        }
        let Ok(orc) = read(&all) else { return Ok(()); };
        let guest = Guest(words.into_iter().map(|(at, kind, word)| {
            let word = match kind {
                0 => word,
                1 => TEXT + word % 0x900,
                _ => STACK + word % 64 * 8,
            };
            (STACK + at * 8, word)
        }).collect());
        let (rip, rsp, rbp) = regs;
        let regs = Regs { rip: TEXT + rip, rsp: STACK + rsp * 8, rbp, ..Regs::default() };
        let mut frames = [Gva(0); 31];
        let (count, _) = Unwinder::new(Arc::new(orc), None)
            .walk(&guest, Start { regs: &regs, returned }, &mut frames);
        prop_assert!(count >= 1 && count <= frames.len());
        prop_assert_eq!(frames[0].0, regs.rip);
        for frame in &frames[..count] {
            prop_assert!(frame.0 >= 0xffff_ffff_8000_0000);
        }
    }
}
