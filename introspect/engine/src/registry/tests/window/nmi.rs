//! Copies that have not run when an NMI comes, and abandoned steps.

use super::*;

#[test]
fn interruption_before_the_copy_puts_the_instruction_off_and_the_handlers_run_once() {
    for vector in [NMI, MACHINE_CHECK] {
        let Stepped {
            rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(all(BOOSTED));
        assert_eq!(cpu.raise(vector, None, slot), Some(RESUME));
        assert_eq!(cpu.regs.rip, TestGuest::handler(vector).0);
        let expected = [at.0, regs().rflags & !IF, STACK.0];
        assert_eq!(frame(&rig, Gva(cpu.regs.rsp)), expected);
        // The guest's own table is active, and the virtual CPU must still not be stopped.
        assert_eq!(cpu.handler.window(), None);
        assert!(cpu.handler.is_stepping());
        cpu.iret();
        assert_eq!(cpu.enter_slot(at), slot);
        assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
        assert_eq!((cpu.regs.rip, cpu.regs.rflags), (at.0 + LEN, 0x246));
        assert!(!cpu.handler.is_stepping());
        let kinds: Vec<_> = cpu.events().iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Hit, EventKind::Post]);
        let counts = Counts {
            hits: 1,
            ..Counts::default()
        };
        assert_eq!(rig.counts(id), counts);
    }
}

#[test]
fn instruction_that_was_put_off_may_fault_when_it_runs() {
    let Stepped {
        rig,
        mut cpu,
        id,
        at,
        slot,
    } = stepped(all(FIXUP));
    cpu.raise(NMI, None, slot);
    cpu.iret();
    assert_eq!(cpu.enter_slot(at), slot);
    assert_eq!(cpu.raise(PAGE_FAULT, Some(0), slot), Some(RESUME));
    let top = Gva(cpu.regs.rsp).wrapping_add(8);
    assert_eq!(frame(&rig, top), [at.0, regs().rflags, STACK.0]);
    assert!(!cpu.handler.is_stepping());
    assert_eq!((rig.counts(id).hits, rig.counts(id).faults), (1, 1));
}

#[test]
fn probes_in_the_handler_of_an_nmi_are_missed_while_the_instruction_waits() {
    let mut rig = Rig::live();
    let ids = rig.register(&[post(BOOSTED), spec(EMULATED), post("p filler_003")]);
    let [outer, emulated, inner] = [0, 1, 2].map(|n| rig.addr(ids[n]));
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(outer);
    cpu.raise(NMI, None, slot);
    let in_handler = cpu.regs;
    assert_eq!(cpu.hit(emulated), RESUME);
    cpu.regs = in_handler;
    let other = cpu.enter_slot(inner);
    assert_ne!(other, slot);
    assert_eq!(cpu.hit(other.wrapping_add(LEN)), RESUME);
    assert!(cpu.handler.is_stepping());
    // The handler calls the function that was interrupted.
    cpu.regs = in_handler;
    assert_eq!(cpu.enter_slot(outer), slot);
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
    cpu.regs = in_handler;
    cpu.iret();
    assert_eq!(cpu.enter_slot(outer), slot);
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), RESUME);
    assert_eq!(cpu.regs.rflags, regs().rflags);
    assert!(!cpu.handler.is_stepping());
    let counts = ids.iter().map(|id| rig.counts(*id));
    let counts: Vec<_> = counts.map(|counts| (counts.hits, counts.missed)).collect();
    assert_eq!(counts, [(1, 1), (0, 1), (0, 1)]);
    let events = cpu.events();
    let events: Vec<_> = events
        .iter()
        .map(|event| (event.probe, event.kind))
        .collect();
    assert_eq!(
        events,
        [(ids[0], EventKind::Hit), (ids[0], EventKind::Post)]
    );
}

#[test]
fn probes_are_hit_again_where_the_handler_of_an_nmi_did_not_return() {
    let mut rig = Rig::live();
    let ids = rig.register(&[post(BOOSTED), spec(EMULATED)]);
    let [outer, emulated] = [0, 1].map(|n| rig.addr(ids[n]));
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(outer);
    cpu.raise(NMI, None, slot);
    // The handler redirected the guest, as an oops does.
    cpu.regs = regs();
    assert_eq!(cpu.hit(emulated), RESUME);
    assert!(!cpu.handler.is_stepping());
    let counts = rig.counts(ids[1]);
    assert_eq!((counts.hits, counts.missed), (1, 0));
}

#[test]
fn nmi_without_a_handler_is_not_put_off() {
    let Stepped {
        rig, mut cpu, slot, ..
    } = stepped(all(BOOSTED));
    cpu.regs.rsp = STACK.0 - 0x40;
    push_frame(&rig, &mut cpu, slot, None);
    assert_eq!(cpu.exception_with(NMI, Gva(0)), Outcome::Foreign);
    assert!(!cpu.handler.is_stepping());
}

#[test]
fn abandoned_step_goes_back_to_where_it_would_be_in_place() {
    for (in_slot, in_place) in [(0, Some(0)), (LEN, Some(LEN)), (1, None)] {
        let Stepped {
            mut cpu, at, slot, ..
        } = stepped(post(BOOSTED));
        cpu.regs.rip = slot.0 + in_slot;
        let before = cpu.regs;
        cpu.abandon();
        let expected = match in_place {
            Some(offset) => Regs {
                rip: at.0 + offset,
                rflags: before.rflags | IF,
                ..before
            },
            None => before,
        };
        assert_eq!(cpu.regs, expected);
        assert!(!cpu.handler.is_stepping());
        assert_eq!(cpu.handler.window(), None);
        // The handlers have run.
        assert_eq!(cpu.events().len(), 1);
    }
}

#[test]
fn abandoned_nmi_handler_may_stay_away() {
    let Stepped { mut cpu, slot, .. } = stepped(post(BOOSTED));
    cpu.raise(NMI, None, slot);
    assert!(cpu.handler.is_stepping());
    let before = cpu.regs;
    cpu.abandon();
    assert_eq!(cpu.regs, before);
    assert!(!cpu.handler.is_stepping());
}

#[test]
fn who_comes_back_from_an_nmi_that_was_not_waited_for_has_interrupts_as_before() {
    // The step is abandoned in the handler, or between the handler's end and the instruction.
    for has_returned in [false, true] {
        let Stepped {
            mut rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(post(BOOSTED));
        cpu.raise(NMI, None, slot);
        let pushed = Gva(cpu.regs.rsp);
        // Linux returns with a copy of the frame; below it is a frame with another RIP.
        let words: [u8; 40] = rig.guest.read(pushed);
        let copy = Gva(pushed.0 - 40);
        rig.guest.write(copy, &words);
        let other = Gva(copy.0 - 40);
        rig.guest.write(other, &words);
        rig.guest
            .write(other, &rig.at("filler_100", 0).0.to_le_bytes());
        cpu.regs.rsp = other.0;
        if has_returned {
            cpu.regs.rsp = copy.0;
            cpu.iret();
        }
        cpu.abandon();
        assert!(!cpu.handler.is_stepping());
        if !has_returned {
            let flags = [pushed, copy, other].map(|frame_at| frame(&rig, frame_at)[1] & IF);
            assert_eq!(flags, [IF, IF, 0]);
            cpu.regs.rsp = copy.0;
            cpu.iret();
        }
        let back = Regs {
            rip: at.0,
            ..regs()
        };
        assert_eq!((cpu.regs.rip, cpu.regs.rsp), (back.rip, back.rsp));
        assert_eq!(cpu.regs.rflags, back.rflags);
        // The probe may be gone by then.
        rig.unregister(&[id]).unwrap();
    }
}
