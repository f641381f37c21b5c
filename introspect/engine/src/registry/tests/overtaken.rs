//! NMIs and machine checks after a stepped copy has ended with another exception, while the guest is at the
//! stub of that exception.

use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::STACK;
use hvprobe_hit::event::EventKind;

use super::window::{
    BREAKPOINT, FIXUP, LEN, MACHINE_CHECK, NMI, PAGE_FAULT, Stepped, all, frame, stepped,
};
use super::*;
use crate::testing::regs;

/// Returns each vector with the number of bytes of the stub that the guest has executed: none, or its
/// `endbr64`.
fn all_of(vectors: [u8; 2]) -> impl Iterator<Item = (u8, u64)> {
    vectors
        .into_iter()
        .flat_map(|vector| [(vector, 0), (vector, 4)])
}

#[test]
fn end_of_a_copy_comes_before_what_overtook_it() {
    for (vector, passed) in all_of([NMI, MACHINE_CHECK]) {
        let Stepped {
            rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(all(BOOSTED));
        cpu.regs.rax = 0x1234;
        assert!(cpu.deliver(BREAKPOINT, None, slot.wrapping_add(LEN + 1)));
        let stub = Gva(cpu.regs.rip + passed);
        assert_eq!(cpu.raise(vector, None, stub), Some(RESUME));
        assert_eq!(cpu.regs.rip, TestGuest::handler(vector).0);
        assert_eq!(cpu.regs.rflags & rflags::IF, 0);
        assert!(!cpu.handler.is_stepping());
        assert_eq!(cpu.handler.window(), None);
        cpu.iret();
        let after = Regs {
            rip: at.0 + LEN,
            rax: 0x1234,
            ..regs()
        };
        assert_eq!(cpu.regs, after);
        let events = cpu.events();
        assert_eq!((events[1].kind, events[1].regs), (EventKind::Post, after));
        assert_eq!(events.len(), 2);
        assert_eq!((rig.counts(id).hits, rig.counts(id).faults), (1, 0));
    }
}

#[test]
fn fault_of_a_copy_comes_before_what_overtook_it() {
    for (vector, passed) in all_of([NMI, MACHINE_CHECK]) {
        let Stepped {
            rig,
            mut cpu,
            id,
            at,
            slot,
        } = stepped(all(FIXUP));
        assert!(cpu.deliver(PAGE_FAULT, Some(2), slot));
        let stub = Gva(cpu.regs.rip + passed);
        assert_eq!(cpu.raise(vector, None, stub), Some(RESUME));
        assert_eq!(cpu.regs.rip, TestGuest::handler(vector).0);
        assert!(!cpu.handler.is_stepping());
        // The guest continues with the handler of the fault.
        cpu.iret();
        assert_eq!(cpu.regs.rip, TestGuest::handler(PAGE_FAULT).0);
        assert_eq!(cpu.regs.rflags & rflags::IF, 0);
        let top = Gva(cpu.regs.rsp).wrapping_add(8);
        assert_eq!(frame(&rig, top), [at.0, regs().rflags, STACK.0]);
        assert_eq!((rig.counts(id).hits, rig.counts(id).faults), (1, 1));
    }
}

#[test]
fn frame_that_a_guest_made_up_leads_nowhere_for_ever() {
    let Stepped {
        rig, mut cpu, slot, ..
    } = stepped(all(BOOSTED));
    assert!(cpu.deliver(NMI, None, slot));
    // The frame contains the address of the stub, and its own address as the stack pointer.
    let top = Gva(cpu.regs.rsp);
    rig.guest.write(top, &cpu.regs.rip.to_le_bytes());
    rig.guest.write(top.wrapping_add(24), &top.0.to_le_bytes());
    assert_eq!(cpu.exception(NMI), RESUME);
    assert!(!cpu.handler.is_stepping());
}
