//! Decoding, copying and emulating instructions.

use hvprobe_arch::insn::{
    self, Action, Displaced, Effect, GateHead, MAX_LEN, Memory, MemoryFault, RelocateError,
    SLOT_SIZE, SlotCode, SlotKind, classify,
};
use hvprobe_arch::paging::WalkError;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use iced_x86::{Decoder, DecoderOptions, Instruction};

use super::input::Input;

/// Maximum number of memory accesses of an emulated instruction.
const MOST_ACCESSES: u32 = 2;

/// Classifies any bytes as a displaced instruction. The first byte is the length of the code, which follows. Then
/// come the address of the code, the slot's offset from it, the accesses that fail, and the registers.
pub fn insn(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let len = usize::from(input.u8()) % (2 * MAX_LEN);
    let code = input.take(len);
    let at = Gva(input.u64());
    let slot = at.wrapping_add(i64::from(input.i32()).cast_unsigned());
    let mut memory = Words {
        failing: input.u8(),
        accesses: 0,
        writes: 0,
    };
    let regs = regs(&mut input);

    assert!(!insn::text(code, at).is_empty());
    let displaced = match classify(code, at) {
        Ok(displaced) => displaced,
        Err(refusal) => {
            assert!(!refusal.to_string().is_empty());
            return false;
        }
    };
    let len = displaced.bytes().len();
    assert_eq!(displaced.bytes(), &code[..len]);
    assert_eq!(Some(len), insn::instruction_len(code, at));
    assert_eq!(displaced.next(), at.wrapping_add(len as u64));
    let is_emulated = matches!(displaced.action(), Action::Emulate(_));
    if is_emulated {
        check_emulation(&displaced, regs, &mut memory);
    }
    for copy in [displaced.boosted(slot), displaced.trapped(slot)] {
        match copy {
            Ok(copy) => check_copy(&copy, slot, &displaced),
            Err(RelocateError::OutOfReach { .. }) => {}
            Err(RelocateError::Emulated { .. }) => assert!(is_emulated),
        }
    }
    true
}

/// Checks that an instruction takes effect either as a whole or not at all.
fn check_emulation(displaced: &Displaced, before: Regs, memory: &mut Words) {
    let mut after = before;
    match displaced.emulate(&mut after, memory) {
        Ok(effect) => {
            assert_eq!(after.rflags & rflags::RF, 0);
            let enabled = !before.rflags & after.rflags & rflags::IF != 0;
            assert!(effect == Effect::Done || enabled);
            let rip = after.rip.cast_signed() << 16 >> 16;
            assert!(rip.cast_unsigned() == after.rip || after.rip == displaced.next().0);
        }
        Err(_) => assert_eq!((after, memory.writes), (before, 0)),
    }
    assert!(memory.accesses <= MOST_ACCESSES);
    assert!(memory.writes <= 1);
}

/// Checks that the copy does the same as the original, that the guest continues where it should, and that the
/// rest of the slot is int3s.
fn check_copy(copy: &SlotCode, slot: Gva, displaced: &Displaced) {
    let (at, next) = (displaced.at(), displaced.next());
    let len = copy.instruction().len();
    assert_eq!(copy.at(), slot);
    assert_eq!(copy.next(), slot.wrapping_add(len as u64));
    let (code, rest) = copy.bytes().split_at(len);
    assert_eq!(code, copy.instruction());

    let (copied, original) = (decode(code, slot), decode(displaced.bytes(), at));
    assert_eq!(
        (copied.len(), original.len()),
        (len, displaced.bytes().len())
    );
    assert_eq!(copied.mnemonic(), original.mnemonic());
    assert_eq!(copied.op_count(), original.op_count());
    if original.is_ip_rel_memory_operand() {
        let target = original.ip_rel_memory_address();
        assert_eq!(copied.ip_rel_memory_address(), target);
    }
    let target = Gva(original.near_branch_target());
    let is_branch = original.is_jcc_short_or_near();
    // Boundaries in the slot, with the addresses that they stand for.
    let mut places = vec![(slot, at), (copy.next(), next)];
    let end = match copy.kind() {
        SlotKind::Boosted => {
            let back = decode(rest, copy.next());
            assert!(back.is_jmp_short_or_near());
            assert_eq!(back.near_branch_target(), next.0);
            assert_eq!(copied.near_branch_target(), original.near_branch_target());
            back.len()
        }
        SlotKind::Trapped => {
            if is_branch {
                let taken = copy.next().wrapping_add(1);
                assert_eq!(copied.near_branch_target(), taken.0);
                places.push((taken, target));
            }
            0
        }
    };
    assert!(rest.len() > end && rest[end..].iter().all(|byte| *byte == 0xcc));
    for offset in 0..=SLOT_SIZE as u64 {
        let rip = slot.wrapping_add(offset);
        let place = places.iter().find(|(inside, _)| *inside == rip);
        let place = place.map(|(_, outside)| *outside);
        assert_eq!(displaced.in_place(copy, rip), place, "{offset}");
        let ends = copy.kind() == SlotKind::Trapped && rip != slot;
        assert_eq!(displaced.trap_end(copy, rip), place.filter(|_| ends));
    }
}

fn decode(code: &[u8], at: Gva) -> Instruction {
    Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).decode()
}

/// Analyses the head of the #BP entry. The first eight bytes are its address.
pub fn gate(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let at = Gva(input.u64());
    let code = input.rest();
    let head = match GateHead::analyse(code, at) {
        Ok(head) => head,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let (code, at) = match code.strip_prefix(&insn::ENDBR64) {
        Some(behind) => (behind, at.wrapping_add(4)),
        None => (code, at),
    };
    let covered = usize::from(head.covered());
    assert!((2..=1 + MAX_LEN).contains(&covered) && covered <= code.len());
    assert_eq!((head.at(), &head.original()[..]), (at, &code[..2]));
    let mut instructions = 0;
    while instructions < covered {
        instructions += insn::instruction_len(&code[instructions..], at).expect("analysed");
    }
    assert_eq!(instructions, covered, "whole instructions");
    let before = Regs {
        rflags: u64::MAX,
        ..Regs::default()
    };
    let mut regs = before;
    head.apply(&mut regs);
    let may_clear = rflags::RF | rflags::AC | rflags::DF;
    assert_eq!(regs.rflags | may_clear, u64::MAX);
    assert_eq!(regs.rip, at.wrapping_add(covered as u64).0);
    let Regs { rip, rflags, .. } = regs;
    assert_eq!(
        regs,
        Regs {
            rip,
            rflags,
            ..before
        }
    );
    true
}

/// Checks that the boundaries found in any bytes are where one instruction ends and the next begins. Checks that
/// [`insn::may_return`] returns `false` only for code that decodes to the last byte. The first eight bytes are the
/// address of the code.
pub fn boundary(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let start = Gva(input.u64());
    let code = input.rest();
    let code = &code[..code.len().min(256)];
    let mut next = 0;
    let mut is_code = false;
    for offset in 0..=code.len() + 1 {
        let target = start.wrapping_add(offset as u64);
        let found = insn::boundary(code, start, target);
        // An address that wraps around below the start is not in the code.
        let expected = offset == next && offset <= code.len() && target >= start;
        assert_eq!(found.is_ok(), expected, "{offset:#x}: {found:?}");
        if let Err(error) = found {
            assert!(!error.to_string().is_empty());
        }
        if offset == next {
            is_code = offset == code.len();
            let rest = code.get(offset..).unwrap_or_default();
            match insn::instruction_len(rest, target) {
                Some(len) => {
                    assert!((1..=MAX_LEN.min(rest.len())).contains(&len));
                    next += len;
                }
                None => next = usize::MAX,
            }
        }
    }
    assert!(insn::may_return(code, start) || is_code);
    is_code
}

/// Memory in which every word is its own address. Access number n fails if bit n modulo 8 of `failing` is set.
struct Words {
    failing: u8,
    accesses: u32,
    writes: u32,
}

impl Words {
    fn access(&mut self, at: Gva) -> Result<(), MemoryFault> {
        let fails = self.failing >> (self.accesses % 8) & 1 == 1;
        self.accesses += 1;
        if fails {
            let cause = WalkError::NotPresent { at, level: 1 };
            return Err(MemoryFault { at, cause });
        }
        Ok(())
    }
}

impl Memory for Words {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.access(at).map(|()| at.0)
    }

    fn write_u64(&mut self, at: Gva, _: u64) -> Result<(), MemoryFault> {
        self.access(at)?;
        self.writes += 1;
        Ok(())
    }
}

/// Reads all registers from the input.
fn regs(input: &mut Input<'_>) -> Regs {
    let mut next = || input.u64();
    Regs {
        rax: next(),
        rbx: next(),
        rcx: next(),
        rdx: next(),
        rsi: next(),
        rdi: next(),
        rsp: next(),
        rbp: next(),
        r8: next(),
        r9: next(),
        r10: next(),
        r11: next(),
        r12: next(),
        r13: next(),
        r14: next(),
        r15: next(),
        rip: next(),
        rflags: next(),
    }
}
