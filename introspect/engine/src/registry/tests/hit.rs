//! Hits that take one exit, emulated and boosted, and int3s that are not ours.

use hvprobe_arch::insn::SlotKind;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_fixtures::{DATA, MODULE_FRAMES, STACK};
use hvprobe_hit::event::{Captured, Event, EventKind};
use hvprobe_hit::{Fault, Outcome};
use hvprobe_linux::task::Task;

use super::*;
use crate::testing::regs;

/// Returns the target of the `jmp rel32` at `at`.
fn jump_target(rig: &Rig, at: Gva) -> Gva {
    let [opcode, a, b, c, d] = rig.guest.read(at);
    assert_eq!(opcode, 0xe9);
    let distance = i32::from_le_bytes([a, b, c, d]);
    Gva(at.0.wrapping_add(5).wrapping_add_signed(distance.into()))
}

#[test]
fn emulated_hit_resumes_after_the_instruction_and_reports_the_probepoint() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+9");
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    let after = Regs {
        rip: at.0 + 1,
        rsp: STACK.0 - 8,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    assert_eq!(rig.guest.read::<8>(Gva(STACK.0 - 8)), 7_u64.to_le_bytes());
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.handler.window(), None);
    let event = Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: id,
        vcpu: 1,
        host_ns: 10,
        guest_tsc: 1010,
        regs: Regs {
            rip: at.0,
            ..regs()
        },
        shown: hvprobe_spec::RegisterSet::default(),
        captured: Captured::nothing(),
        task: Some(Task {
            pid: 77,
            tgid: 70,
            comm: *b"worker\0\0\0\0\0\0\0\0\0\0",
        }),
        cost_ns: 10,
    };
    assert_eq!(cpu.events(), [event]);
    let counts = Counts {
        hits: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
}

#[test]
fn hit_finds_the_stack_where_it_is_mapped_now() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    let tables = rig.guest.view().tables;
    let mem = rig.guest.mem.clone();
    let pushed = |frame: Gpa| {
        mem.read_u64(frame.wrapping_add((STACK.0 - 8) % 4096))
            .unwrap()
    };
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    assert_eq!(pushed(DATA), 7);
    // Another page is mapped, without a stop in between.
    let (entry, value) = tables.entry_at(&mem, STACK, 1).unwrap();
    let flags = value & 0xfff;
    mem.write_u64(entry, MODULE_FRAMES.0 | flags).unwrap();
    cpu.regs = regs();
    cpu.regs.rbp = 8;
    assert_eq!(cpu.hit(at), RESUME);
    assert_eq!((pushed(DATA), pushed(MODULE_FRAMES)), (7, 8));
    // The page is unmapped: the guest gets the fault.
    mem.write_u64(entry, 0).unwrap();
    cpu.regs = regs();
    assert!(matches!(cpu.hit(at), Outcome::Fault(_)));
    assert_eq!(cpu.regs.rsp, STACK.0);
}

#[test]
fn hit_after_a_stop_walks_through_the_tables_that_were_found_then() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    let mem = rig.guest.mem.clone();
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    // Other, empty page tables, and then the first ones again.
    let mut view = rig.guest.view();
    let own = std::mem::replace(&mut view.tables.root, MODULE_FRAMES);
    mem.write(MODULE_FRAMES, &[0; 4096]).unwrap();
    cpu.handler.adopt(rig.guest.table(), Some(view));
    cpu.regs = regs();
    assert!(matches!(cpu.hit(at), Outcome::Fault(_)));
    view.tables.root = own;
    cpu.handler.adopt(rig.guest.table(), Some(view));
    cpu.regs = regs();
    assert_eq!(cpu.hit(at), RESUME);
}

#[test]
fn boosted_hit_goes_through_a_copy_that_jumps_back_by_itself() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(at);
    assert_eq!(rig.guest.read(slot), [0x48, 0x8b, 0x47, 0x08]);
    assert_eq!(jump_target(&rig, slot.wrapping_add(4)), at.wrapping_add(4));
    let after = Regs {
        rip: slot.0,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    // The hit is over: the guest may be stopped, interrupted and hit again in the copy.
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.handler.window(), None);
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    let seen = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!(events[0].regs, seen);
    assert_eq!(rig.counts(id).hits, 1);
}

#[test]
fn hit_while_the_guest_was_interrupted_in_a_boosted_slot_is_a_hit() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([BOOSTED, EMULATED]));
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(rig.addr(ids[0]));
    assert_eq!(cpu.raise(32, None, slot), None);
    assert_eq!(cpu.hit(rig.addr(ids[1])), RESUME);
    assert_eq!(rig.counts(ids[1]).hits, 1);
    assert_eq!(rig.counts(ids[1]).missed, 0);
}

#[test]
fn probes_at_one_address_report_in_the_order_of_their_registration() {
    for definition in [EMULATED, BOOSTED] {
        let mut rig = Rig::live();
        let ids = rig.register(&specs([definition; 10]));
        rig.disable(&ids[3..5]).unwrap();
        rig.enable(&ids[4..5]).unwrap();
        let mut cpu = Cpu::new(&rig);
        assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
        let events = cpu.events();
        let found: Vec<_> = events.iter().map(|event| event.probe).collect();
        let enabled: Vec<_> = ids.iter().copied().filter(|id| *id != ids[3]).collect();
        assert_eq!(found, enabled);
        assert!(events.iter().all(|event| event.regs == events[0].regs));
        assert_eq!(rig.counts(ids[3]), Counts::default());
        assert_eq!(rig.counts(ids[4]).hits, 1);
    }
}

#[test]
fn int3_that_is_not_ours_is_the_guests_and_changes_nothing() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(at);
    cpu.regs = regs();
    for foreign in [
        at.wrapping_add(1),
        // No task reaches the int3s of a boosted slot.
        slot.wrapping_add(9),
        slot.wrapping_add(31),
        slot.wrapping_add(32),
        Gva(0),
    ] {
        assert_eq!(cpu.hit(foreign), Outcome::Foreign);
    }
    // Without a view of the kernel nothing is ours.
    cpu.handler.adopt(rig.guest.table(), None);
    assert_eq!(cpu.hit(at), Outcome::Foreign);
    assert_eq!(cpu.raise(14, Some(0), at), None);
    cpu.regs = regs();
    assert_eq!(cpu.events().len(), 1);
    assert_eq!(rig.counts(id).hits, 1);
}

#[test]
fn int3_that_was_ours_until_now_is_retried_unless_the_guest_has_its_own_there() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    rig.unregister(&[id]).unwrap();
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    let retried = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!(cpu.regs, retried);
    rig.guest.write(at, &[INT3]);
    cpu.regs = regs();
    assert_eq!(cpu.hit(at), Outcome::Foreign);
    assert_eq!(cpu.regs, regs());
}

#[test]
fn emulated_instruction_without_a_stack_faults_at_the_probepoint() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec(EMULATED), post(EMULATED)]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = 0x1000;
    let fault = Fault {
        vector: 14,
        error_code: Some(2),
        address: Some(Gva(0xff8)),
    };
    assert_eq!(cpu.hit(at), Outcome::Fault(fault));
    let unchanged = Regs {
        rip: at.0,
        rsp: 0x1000,
        ..regs()
    };
    assert_eq!(cpu.regs, unchanged);
    // The pre-handlers ran; the post-handlers did not.
    let kinds: Vec<_> = cpu.events().iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Hit, EventKind::Hit]);
    let counts = Counts {
        hits: 1,
        faults: 1,
        ..Counts::default()
    };
    for id in ids {
        assert_eq!(rig.counts(id), counts);
    }
}

#[test]
fn fault_of_an_emulated_instruction_is_reported_to_those_who_asked_for_it() {
    let mut rig = Rig::live();
    let faults = Actions {
        faults: true,
        ..Actions::default()
    };
    let ids = rig.register(&[acting("p vfs_read+0x18", faults), spec("p vfs_read+0x18")]);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = 0x1000;
    assert!(matches!(cpu.hit(rig.addr(ids[0])), Outcome::Fault(_)));
    let events = cpu.events();
    let seen: Vec<_> = events.iter().map(|it| (it.probe, it.kind)).collect();
    let fault = EventKind::Fault {
        vector: 14,
        error_code: Some(0),
    };
    let hit = EventKind::Hit;
    assert_eq!(seen, [(ids[0], hit), (ids[1], hit), (ids[0], fault)]);
}

#[test]
fn jump_to_where_no_address_is_raises_a_general_protection_fault() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+0x11");
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rax = 1 << 63;
    let fault = Fault {
        vector: 13,
        error_code: Some(0),
        address: None,
    };
    assert_eq!(cpu.hit(rig.addr(id)), Outcome::Fault(fault));
    assert_eq!(rig.counts(id).faults, 1);
}

#[test]
fn emulated_call_pushes_the_address_after_it() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+0x11");
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let callee = rig.at("filler_100", 0);
    cpu.regs.rax = callee.0;
    assert_eq!(cpu.hit(at), RESUME);
    let after = Regs {
        rip: callee.0,
        rsp: STACK.0 - 8,
        rax: callee.0,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    assert_eq!(
        rig.guest.read(Gva(STACK.0 - 8)),
        at.wrapping_add(2).0.to_le_bytes()
    );
}

#[test]
fn post_handler_of_an_emulated_instruction_sees_the_state_after_it() {
    let mut rig = Rig::live();
    let id = rig.register(&[post(EMULATED)])[0];
    assert_eq!(rig.mechanism(id), Mechanism::Emulated);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    let after = cpu.regs;
    let events = cpu.events();
    assert_eq!(events.len(), 2);
    assert_eq!((events[0].kind, events[0].regs.rip), (EventKind::Hit, at.0));
    assert_eq!((events[1].kind, events[1].regs), (EventKind::Post, after));
    assert_eq!(rig.counts(id).hits, 1);
}

#[test]
fn sti_holds_interrupts_off_and_the_hit_after_it_ends_that() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs(["p sites+0x46", "p sites+0x47", EMULATED]));
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rflags = 0x46;
    assert_eq!(cpu.hit(rig.addr(ids[0])), Outcome::Resume { shadow: true });
    assert_eq!(cpu.regs.rflags, 0x246);
    assert!(!cpu.handler.ends_shadow());
    assert_eq!(cpu.hit(rig.addr(ids[1])), RESUME);
    assert!(cpu.handler.ends_shadow());
    assert!(!cpu.handler.ends_shadow());
    assert_eq!(cpu.hit(rig.addr(ids[2])), RESUME);
    assert!(!cpu.handler.ends_shadow());
}

#[test]
fn hit_without_a_readable_task_is_reported_without_one() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    for gs_base in [0, u64::MAX, 1 << 63, rig.guest.gs_base() + 8] {
        let mut cpu = Cpu::new(&rig);
        cpu.gs_base = gs_base;
        assert_eq!(cpu.hit(rig.addr(id)), RESUME);
        let events = cpu.events();
        assert_eq!(events[0].task, None, "{gs_base:#x}");
    }
}

#[test]
fn virtual_cpu_without_counters_still_gets_its_hits() {
    // With more virtual CPUs than the registry knows of, nothing is counted and nothing fails.
    let mut rig = Rig::live();
    rig.registry = Registry::new(rig.guest.image.clone(), 0, hidden());
    rig.go_live(None);
    let id = rig.one(EMULATED);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    assert_eq!(cpu.events().len(), 1);
    assert_eq!(rig.counts(id), Counts::default());
}

#[test]
fn table_knows_the_kind_of_slot_of_each_site() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec(EMULATED), spec(BOOSTED), post("p filler_003")]);
    let table = rig.guest.table();
    let kinds = ids.iter().map(|id| {
        let (_, site) = table.at(rig.addr(*id)).unwrap();
        site.slot.map(|slot| slot.kind())
    });
    let expected = [None, Some(SlotKind::Boosted), Some(SlotKind::Trapped)];
    assert!(kinds.eq(expected));
}
