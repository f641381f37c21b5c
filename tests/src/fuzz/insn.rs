//! Instructions: decoding, copying into a slot and carrying out.

use hvprobe_arch::insn::{
    self, Action, GateHead, MAX_LEN, RelocateError, SLOT_SIZE, SlotCode, Stack, StackFault,
    StepEnd, classify,
};
use hvprobe_arch::paging::WalkError;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use iced_x86::{Decoder, DecoderOptions, Instruction};

use super::input::Input;

/// Accesses an instruction may make to memory when the host carries it out.
const MOST_ACCESSES: u32 = 2;

/// Any bytes as a displaced instruction. The first byte says how many of the next are code; then
/// come its address, where the slot lies relative to it, which accesses fail, and the registers.
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

    assert!(!insn::text(code, at).is_empty() || code.is_empty());
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
    match (displaced.action(), displaced.relocate(slot)) {
        (Action::Emulate(_), Err(RelocateError::Emulated { .. })) => {
            let mut after = regs;
            match displaced.emulate(&mut after, &mut memory) {
                Ok(()) => assert_eq!(after.rflags & rflags::RF, 0),
                Err(_) => assert_eq!((after, memory.writes), (regs, 0)),
            }
        }
        (Action::Step, Ok(copy)) => {
            check_copy(&copy, slot, displaced.bytes(), at);
            for rip in [slot, copy.next(), Gva(regs.rip), slot.wrapping_add(1)] {
                let mut after = Regs { rip: rip.0, ..regs };
                let end = displaced.after_step(&copy, &mut after, &mut memory);
                let left_alone =
                    matches!(end, Ok(StepEnd::StillInSlot | StepEnd::Diverted) | Err(_));
                assert!(!left_alone || after.rip == rip.0, "{end:?}");
                let rip = after.rip;
                assert_eq!(after, Regs { rip, ..regs });
            }
        }
        (Action::Step, Err(RelocateError::OutOfReach { .. })) => {}
        (action, copy) => panic!("{action:?} does not go with {copy:?}"),
    }
    assert!(memory.accesses <= 4 * MOST_ACCESSES);
    true
}

/// The copy does what the original does, and the rest of its slot does nothing.
fn check_copy(copy: &SlotCode, slot: Gva, original: &[u8], at: Gva) {
    assert_eq!(copy.at(), slot);
    let len = copy.instruction().len();
    assert!(len < SLOT_SIZE);
    assert_eq!(copy.next(), slot.wrapping_add(len as u64));
    let (code, rest) = copy.bytes().split_at(len);
    assert_eq!(code, copy.instruction());
    assert!(rest.iter().all(|byte| *byte == 0xcc));

    let (copied, original) = (decode(code, slot), decode(original, at));
    assert_eq!(copied.mnemonic(), original.mnemonic());
    assert_eq!(copied.op_count(), original.op_count());
    assert_eq!(copied.near_branch_target(), original.near_branch_target());
    if original.is_ip_rel_memory_operand() {
        assert_eq!(
            copied.ip_rel_memory_address(),
            original.ip_rel_memory_address()
        );
    }
}

fn decode(code: &[u8], at: Gva) -> Instruction {
    Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).decode()
}

/// The head of the breakpoint exception's entry. The first eight bytes are its address.
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

/// Where instructions begin in any bytes: where one after the other ends. The first eight bytes are
/// the address of the code.
pub fn boundary(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let start = Gva(input.u64());
    let code = input.rest();
    let code = &code[..code.len().min(256)];
    let mut next = 0;
    for offset in 0..=code.len() + 1 {
        let target = start.wrapping_add(offset as u64);
        let found = insn::boundary(code, start, target);
        // An address below the start, past the end of all addresses, is not in the code.
        let expected = offset == next && offset <= code.len() && target >= start;
        assert_eq!(found.is_ok(), expected, "{offset:#x}: {found:?}");
        if let Err(error) = found {
            assert!(!error.to_string().is_empty());
        }
        if offset == next {
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
    next != usize::MAX || code.len() > MAX_LEN
}

/// Memory in which every word is its own address, and accesses fail as the bits of `failing` say:
/// by their number, modulo eight.
struct Words {
    failing: u8,
    accesses: u32,
    writes: u32,
}

impl Words {
    fn access(&mut self, at: Gva) -> Result<(), StackFault> {
        let fails = self.failing >> (self.accesses % 8) & 1 == 1;
        self.accesses += 1;
        if fails {
            let cause = WalkError::NotPresent { at, level: 1 };
            return Err(StackFault { at, cause });
        }
        Ok(())
    }
}

impl Stack for Words {
    fn read_u64(&mut self, at: Gva) -> Result<u64, StackFault> {
        self.access(at).map(|()| at.0)
    }

    fn write_u64(&mut self, at: Gva, _: u64) -> Result<(), StackFault> {
        self.access(at)?;
        self.writes += 1;
        Ok(())
    }
}

/// Registers with everything from the input.
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
