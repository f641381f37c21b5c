//! Stepped copies: their end, and every exception that can happen instead.

mod nmi;

use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::STACK;
use hvprobe_hit::event::EventKind;
use hvprobe_hit::{Fault, Outcome};

use super::*;
use crate::testing::regs;

/// Length of the instruction at [`FIXUP`] and of the first one of [`BOOSTED`].
pub(super) const LEN: u64 = 4;
/// An instruction with an entry in the exception table.
pub(super) const FIXUP: &str = "p sites+0x40";
const IF: u64 = rflags::IF;

pub(super) const NMI: u8 = 2;
pub(super) const BREAKPOINT: u8 = 3;
pub(super) const PAGE_FAULT: u8 = 14;
pub(super) const MACHINE_CHECK: u8 = 18;

/// As [`post`], with reports of faults.
pub(super) fn all(definition: &str) -> ProbeSpec {
    let actions = Actions {
        post: true,
        faults: true,
        ..Actions::default()
    };
    acting(definition, actions)
}

/// A guest with a stepped probe, and a virtual CPU that has just entered its slot.
pub(super) struct Stepped {
    pub(super) rig: Rig,
    pub(super) cpu: Cpu,
    pub(super) id: ProbeId,
    pub(super) at: Gva,
    pub(super) slot: Gva,
}

pub(super) fn stepped(spec: ProbeSpec) -> Stepped {
    let mut rig = Rig::live();
    let id = rig.register(&[spec])[0];
    assert_eq!(rig.mechanism(id), Mechanism::Stepped);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(at);
    Stepped {
        rig,
        cpu,
        id,
        at,
        slot,
    }
}

/// Returns RIP, RFLAGS and RSP from the frame of an exception at `at`.
pub(super) fn frame(rig: &Rig, at: Gva) -> [u64; 3] {
    [0, 16, 24].map(|offset| u64::from_le_bytes(rig.guest.read(at.wrapping_add(offset))))
}

#[test]
fn copy_runs_alone_and_ends_at_its_int3() {
    let Stepped {
        rig,
        mut cpu,
        id,
        at,
        slot,
    } = stepped(post(BOOSTED));
    assert_eq!(rig.guest.read(slot), [0x48, 0x8b, 0x47, 0x08, INT3]);
    let running = Regs {
        rip: slot.0,
        rflags: regs().rflags & !IF,
        ..regs()
    };
    assert_eq!(cpu.regs, running);
    assert!(cpu.handler.is_stepping());
    let window = cpu.handler.window().unwrap();
    assert_ne!(window, rig.guest.view().idt);
    // The copy loads RAX.
    cpu.regs.rax = 0x1234;
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
    let after = Regs {
        rip: at.0 + LEN,
        rax: 0x1234,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.handler.window(), None);
    let events = cpu.events();
    assert_eq!(events.len(), 2);
    let before = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!((events[0].kind, events[0].regs), (EventKind::Hit, before));
    assert_eq!((events[1].kind, events[1].regs), (EventKind::Post, after));
    assert_eq!(events[1].host_ns, events[0].host_ns);
    let counts = Counts {
        hits: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
}

#[test]
fn instruction_with_a_fixup_is_stepped_although_nobody_waits_for_its_end() {
    let Stepped { mut cpu, slot, .. } = stepped(spec(FIXUP));
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
    assert_eq!(cpu.events().len(), 1);
}

#[test]
fn interrupts_that_were_off_stay_off_however_the_copy_ends() {
    for end in 0..4 {
        let mut rig = Rig::live();
        let id = rig.register(&[post(BOOSTED)])[0];
        let at = rig.addr(id);
        let mut cpu = Cpu::new(&rig);
        cpu.regs.rflags = 0x46;
        let slot = cpu.enter_slot(at);
        assert_eq!(cpu.regs.rflags, 0x46);
        match end {
            0 => assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME),
            1 => assert!(
                cpu.raise(BREAKPOINT, None, slot.wrapping_add(LEN + 1))
                    .is_some()
            ),
            2 => assert!(cpu.raise(PAGE_FAULT, Some(0), slot).is_some()),
            _ => {
                assert!(cpu.raise(NMI, None, slot).is_some());
                cpu.iret();
                assert_eq!(cpu.hit(at), RESUME);
                assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
            }
        }
        assert_eq!(cpu.regs.rflags, 0x46, "{end}");
        assert_eq!(cpu.handler.window(), None);
    }
}

#[test]
fn fault_of_the_copy_is_the_guests_as_if_it_had_come_in_place() {
    let Stepped {
        rig,
        mut cpu,
        id,
        at,
        slot,
    } = stepped(all(FIXUP));
    let code = 0x1_0000_0002;
    // The processor sets RF in the pushed flags for faults only.
    cpu.regs.rflags |= rflags::RF;
    assert_eq!(cpu.raise(PAGE_FAULT, Some(code), slot), Some(RESUME));
    assert_eq!(cpu.regs.rip, TestGuest::handler(PAGE_FAULT).0);
    assert_eq!(cpu.regs.rflags & IF, 0);
    let top = Gva(cpu.regs.rsp);
    assert_eq!(rig.guest.read(top), code.to_le_bytes());
    let expected = [at.0, regs().rflags | rflags::RF, STACK.0];
    assert_eq!(frame(&rig, top.wrapping_add(8)), expected);
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.handler.window(), None);
    let events = cpu.events();
    assert_eq!(events.len(), 2);
    let fault = EventKind::Fault {
        vector: PAGE_FAULT,
        error_code: Some(2),
    };
    let in_place = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!((events[1].kind, events[1].regs), (fault, in_place));
    let counts = Counts {
        hits: 1,
        faults: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
}

#[test]
fn instruction_whose_fault_was_mended_is_hit_again() {
    let Stepped {
        rig,
        mut cpu,
        id,
        at,
        slot,
    } = stepped(spec(FIXUP));
    cpu.raise(PAGE_FAULT, Some(0), slot);
    // The guest's handler maps the page and pops the error code.
    cpu.regs.rsp += 8;
    cpu.iret();
    assert_eq!(cpu.regs.rip, at.0);
    assert_eq!(cpu.enter_slot(at), slot);
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
    assert_eq!(cpu.regs.rflags, regs().rflags);
    let counts = Counts {
        hits: 2,
        faults: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
}

#[test]
fn frames_with_and_without_error_codes_are_distinguished() {
    for (vector, code) in [
        (0, None),
        (6, None),
        (7, None),
        (8, Some(0)),
        (10, Some(0x28)),
        (11, Some(0x30)),
        (12, Some(0)),
        (13, Some(0x18)),
        (14, Some(3)),
        (16, None),
        (17, Some(0)),
        (19, None),
        (20, None),
        (21, Some(1)),
        (29, Some(0x81)),
        (30, Some(2)),
    ] {
        let Stepped {
            rig,
            mut cpu,
            at,
            slot,
            ..
        } = stepped(all(FIXUP));
        // A stack pointer that the processor has to align.
        cpu.regs.rsp -= 8;
        assert_eq!(cpu.raise(vector, code, slot), Some(RESUME));
        assert_eq!(cpu.regs.rip, TestGuest::handler(vector).0);
        let top = Gva(cpu.regs.rsp).wrapping_add(if code.is_some() { 8 } else { 0 });
        let expected = [at.0, regs().rflags, STACK.0 - 8];
        assert_eq!(frame(&rig, top), expected, "{vector}");
        let error_code = code.map(|code| u32::try_from(code).unwrap());
        let fault = EventKind::Fault { vector, error_code };
        assert_eq!(cpu.events()[1].kind, fault);
    }
}

#[test]
fn every_probe_at_the_place_counts_the_fault_and_only_those_who_asked_hear_of_it() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec(FIXUP), all(FIXUP), disabled(FIXUP), post(FIXUP)]);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(rig.addr(ids[0]));
    cpu.raise(13, Some(0), slot);
    let faults: Vec<_> = ids.iter().map(|id| rig.counts(*id).faults).collect();
    assert_eq!(faults, [1, 1, 0, 1]);
    let events = cpu.events();
    let hits = events.iter().filter(|event| event.kind == EventKind::Hit);
    assert_eq!(hits.count(), 3);
    assert_eq!(events.len(), 4);
    assert_eq!(events[3].probe, ids[1]);
}

#[test]
fn exception_after_the_copy_was_complete_comes_after_the_instruction() {
    // An NMI, a machine check, and a #DB, which is a trap.
    for vector in [NMI, MACHINE_CHECK, 1] {
        let Stepped {
            rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(all(BOOSTED));
        cpu.regs.rax = 0x1234;
        let outcome = cpu.raise(vector, None, slot.wrapping_add(LEN));
        assert_eq!(outcome, Some(RESUME));
        assert_eq!(cpu.regs.rip, TestGuest::handler(vector).0);
        let next = at.0 + LEN;
        let expected = [next, regs().rflags, STACK.0];
        assert_eq!(frame(&rig, Gva(cpu.regs.rsp)), expected);
        assert!(!cpu.handler.is_stepping());
        assert_eq!(rig.counts(id).faults, 0);
        let events = cpu.events();
        let after = Regs {
            rip: next,
            rax: 0x1234,
            ..regs()
        };
        assert_eq!((events[1].kind, events[1].regs), (EventKind::Post, after));
        assert_eq!(events.len(), 2);
    }
}

#[test]
fn end_that_reaches_the_guest_as_an_exception_is_the_end_all_the_same() {
    let Stepped {
        rig,
        mut cpu,
        id,
        at,
        slot,
    } = stepped(all(BOOSTED));
    cpu.regs.rax = 0x1234;
    let outcome = cpu.raise(BREAKPOINT, None, slot.wrapping_add(LEN + 1));
    assert_eq!(outcome, Some(RESUME));
    let after = Regs {
        rip: at.0 + LEN,
        rax: 0x1234,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    assert!(!cpu.handler.is_stepping());
    let events = cpu.events();
    assert_eq!((events[1].kind, events[1].regs), (EventKind::Post, after));
    assert_eq!((rig.counts(id).hits, rig.counts(id).faults), (1, 0));
}

#[test]
fn conditional_jump_goes_where_the_condition_says() {
    let forced = ProbeSpec {
        mechanism: Some(Mechanism::Stepped),
        ..all("p sites+0x44")
    };
    // Offset of the int3 at which the copy ends, and offset of the instruction to which this end leads. Each end
    // also comes as an exception.
    for (end, to) in [(2, 2), (3, 4)] {
        for as_exception in [false, true] {
            let Stepped {
                rig,
                mut cpu,
                at,
                slot,
                ..
            } = stepped(forced.clone());
            assert_eq!(rig.guest.read(slot), [0x74, 1, INT3, INT3, INT3]);
            let end = slot.wrapping_add(end);
            if as_exception {
                let outcome = cpu.raise(BREAKPOINT, None, end.wrapping_add(1));
                assert_eq!(outcome, Some(RESUME));
            } else {
                assert_eq!(cpu.hit(end), RESUME);
            }
            let after = Regs {
                rip: at.0 + to,
                ..regs()
            };
            assert_eq!(cpu.regs, after);
            assert_eq!(cpu.events()[1].kind, EventKind::Post);
        }
        let Stepped {
            rig,
            mut cpu,
            at,
            slot,
            ..
        } = stepped(forced.clone());
        cpu.raise(NMI, None, slot.wrapping_add(end));
        assert_eq!(frame(&rig, Gva(cpu.regs.rsp))[0], at.0 + to);
        assert!(!cpu.handler.is_stepping());
    }
}

#[test]
fn exception_that_is_none_of_the_window_changes_nothing() {
    // No copy is being stepped.
    let mut rig = Rig::live();
    let id = rig.register(&[all(FIXUP)])[0];
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.raise(PAGE_FAULT, Some(0), at), None);
    cpu.regs = regs();
    assert_eq!(cpu.exception(PAGE_FAULT), Outcome::Foreign);
    assert_eq!(cpu.regs, regs());
    // The frame cannot be read: the guest continues where it is, and nothing is stepped any more.
    cpu.enter_slot(at);
    let stepping = Regs {
        rsp: 0x1000,
        ..cpu.regs
    };
    cpu.regs = stepping;
    assert_eq!(cpu.exception(PAGE_FAULT), Outcome::Foreign);
    assert_eq!(cpu.regs, stepping);
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.handler.window(), None);
    assert_eq!(rig.counts(id).faults, 0);
    assert_eq!(cpu.events().len(), 1);
}

/// Pushes the frame of an exception at `rip`, as the processor does.
fn push_frame(rig: &Rig, cpu: &mut Cpu, rip: Gva, code: Option<u32>) {
    let words = [0x18, cpu.regs.rsp, cpu.regs.rflags, 0x10, rip.0];
    for word in words.into_iter().chain(code.map(u64::from)) {
        cpu.regs.rsp -= 8;
        rig.guest.write(Gva(cpu.regs.rsp), &word.to_le_bytes());
    }
}

#[test]
fn exception_without_a_handler_is_raised_once_more_in_its_place() {
    for (vector, code) in [(PAGE_FAULT, Some(2)), (0, None)] {
        let Stepped {
            rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(all(BOOSTED));
        cpu.regs.rsp = STACK.0 - 0x40;
        let before = cpu.regs;
        push_frame(&rig, &mut cpu, slot, code);
        let outcome = cpu.exception_with(vector, Gva(0));
        let fault = Fault {
            vector,
            error_code: code,
            address: None,
        };
        assert_eq!(outcome, Outcome::Fault(fault));
        let in_place = Regs {
            rip: at.0,
            rflags: before.rflags | IF,
            ..before
        };
        assert_eq!(cpu.regs, in_place);
        assert!(!cpu.handler.is_stepping());
        assert_eq!(rig.counts(id).faults, 1);
    }
}

#[test]
fn end_of_a_copy_that_nobody_steps_leads_on() {
    let Stepped {
        rig,
        cpu,
        id,
        at,
        slot,
    } = stepped(post(BOOSTED));
    drop(cpu);
    let mut other = Cpu::numbered(&rig, 0);
    assert_eq!(other.hit(slot.wrapping_add(LEN)), RESUME);
    let after = Regs {
        rip: at.0 + LEN,
        ..regs()
    };
    assert_eq!(other.regs, after);
    for no_end in [0, 1, LEN + 1, 31] {
        let outcome = other.hit(slot.wrapping_add(no_end));
        assert_eq!(outcome, Outcome::Foreign, "{no_end}");
    }
    assert!(other.events().is_empty());
    assert_eq!(rig.counts(id).hits, 1);
}

#[test]
fn hit_inside_the_window_takes_effect_but_is_missed() {
    let mut rig = Rig::live();
    let ids = rig.register(&[post(BOOSTED), spec(EMULATED)]);
    let mut cpu = Cpu::new(&rig);
    cpu.enter_slot(rig.addr(ids[0]));
    assert_eq!(cpu.hit(rig.addr(ids[1])), RESUME);
    assert_eq!(cpu.regs.rsp, STACK.0 - 8);
    assert_eq!(cpu.regs.rflags, regs().rflags);
    assert_eq!(cpu.handler.window(), None);
    assert_eq!((rig.counts(ids[1]).hits, rig.counts(ids[1]).missed), (0, 1));
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].probe, ids[0]);
}
