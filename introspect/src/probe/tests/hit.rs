//! Hits on a virtual CPU whose part the test plays.

use std::sync::{Arc, Mutex};

use hvprobe_arch::insn::SLOT_SIZE;
use hvprobe_arch::{Gva, Regs};

use super::super::hit::{Access, HitHandler, Outcome, Stepped, Surroundings};
use super::super::table::Counts;
use super::*;
use crate::event::{Collector, Event};
use crate::task::Task;
use crate::testing::{Memory, SLOTS, STACK, Ticks, regs};

const VCPU: u32 = 1;
/// Length of the stepped instruction that every odd filler begins with.
const LEN: u64 = 4;

/// A virtual CPU at a hit, and what it reports.
struct Cpu<'a> {
    rig: &'a Rig,
    handler: HitHandler,
    collector: Collector,
    events: Arc<Mutex<Vec<Event>>>,
    clock: Ticks,
    regs: Regs,
    gs_base: u64,
}

impl<'a> Cpu<'a> {
    fn new(rig: &'a Rig) -> Self {
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let sink = Arc::clone(&events);
        let (collector, mut producers) = Collector::start(
            1,
            256,
            Box::new(move |batch, dropped| {
                assert_eq!(dropped, 0);
                sink.lock().expect("no panic").extend_from_slice(batch);
            }),
        )
        .expect("a thread can be started");
        let mut handler = HitHandler::new(VCPU, producers.pop().expect("one"));
        handler.adopt(rig.guest.table(), Some(rig.guest.view()));
        Self {
            rig,
            handler,
            collector,
            events,
            clock: Ticks::default(),
            regs: regs(),
            gs_base: rig.guest.gs_base(),
        }
    }

    fn hit(&mut self, at: Gva) -> Outcome {
        let around: Surroundings<'_, Memory, Ticks> = Surroundings {
            mem: &self.rig.guest.mem,
            clock: &self.clock,
            gs_base: self.gs_base,
        };
        self.handler.hit(at, &mut self.regs, &around)
    }

    fn stepped(&mut self) -> Stepped {
        let around: Surroundings<'_, Memory, Ticks> = Surroundings {
            mem: &self.rig.guest.mem,
            clock: &self.clock,
            gs_base: self.gs_base,
        };
        self.handler.stepped(&mut self.regs, &around)
    }

    /// A hit at `at` that is to be stepped; returns its slot.
    fn enter_slot(&mut self, at: Gva) -> Gva {
        assert_eq!(self.hit(at), Outcome::Step);
        Gva(self.regs.rip)
    }

    /// The copy at `slot`, which falls through, ran.
    fn step(&mut self, slot: Gva) -> Stepped {
        self.regs.rip = slot.0 + LEN;
        self.stepped()
    }

    fn events(self) -> Vec<Event> {
        drop(self.handler);
        self.collector.finish();
        let events = self.events.lock().expect("no panic");
        events.clone()
    }
}

/// Hits, missed and faults.
fn counts(rig: &Rig, id: ProbeId) -> (u64, u64, u64) {
    let Counts {
        hits,
        missed,
        faults,
    } = rig.info(id).counts;
    (hits, missed, faults)
}

#[test]
fn emulated_hit_resumes_after_the_instruction_and_reports_the_probepoint() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+9");
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), Outcome::Resume);
    let after = Regs {
        rip: at.0 + 1,
        rsp: STACK.0 - 8,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    assert_eq!(rig.guest.read::<8>(Gva(STACK.0 - 8)), 7_u64.to_le_bytes());
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.stepped(), Stepped::NotStepping);
    let event = Event {
        seq: 0,
        probe: id,
        vcpu: VCPU,
        host_ns: 10,
        guest_tsc: 1010,
        regs: Regs {
            rip: at.0,
            ..regs()
        },
        task: Some(Task {
            pid: 77,
            tgid: 70,
            comm: *b"worker\0\0\0\0\0\0\0\0\0\0",
        }),
        cost_ns: 10,
    };
    assert_eq!(cpu.events(), [event]);
    assert_eq!(counts(&rig, id), (1, 0, 0));
}

#[test]
fn stepped_hit_goes_through_a_copy_and_reports_the_probepoint() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(at);
    assert_eq!(rig.guest.read(slot), [0x48, 0x8b, 0x47, 0x08, INT3]);
    assert!(cpu.handler.is_stepping());
    assert_eq!(counts(&rig, id), (0, 0, 0));
    // A trap before the copy ran.
    assert_eq!(cpu.stepped(), Stepped::Again);
    // The copy loads RAX.
    cpu.regs.rax = 0x1234;
    assert_eq!(cpu.step(slot), Stepped::Done { more: false });
    assert!(!cpu.handler.is_stepping());
    let after = Regs {
        rip: at.0 + LEN,
        rax: 0x1234,
        ..regs()
    };
    assert_eq!(cpu.regs, after);
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    assert_eq!(
        events[0].regs,
        Regs {
            rip: at.0,
            ..regs()
        }
    );
    assert_eq!(counts(&rig, id), (1, 0, 0));
}

#[test]
fn probes_at_one_address_report_in_the_order_of_their_registration() {
    for definition in [EMULATED, BOOSTED] {
        let mut rig = Rig::live();
        let ids = rig.register(&specs([definition; 10]));
        rig.disable(&ids[3..5]).unwrap();
        rig.enable(&ids[4..5]).unwrap();
        let mut cpu = Cpu::new(&rig);
        if cpu.hit(rig.addr(ids[0])) == Outcome::Step {
            cpu.step(Gva(cpu.regs.rip));
        }
        let events = cpu.events();
        let found: Vec<_> = events.iter().map(|event| event.probe).collect();
        let enabled: Vec<_> = ids.iter().copied().filter(|id| *id != ids[3]).collect();
        assert_eq!(found, enabled);
        assert!(events.iter().all(|event| event.regs == events[0].regs));
        assert_eq!(counts(&rig, ids[3]), (0, 0, 0));
        assert_eq!(counts(&rig, ids[4]), (1, 0, 0));
    }
}

#[test]
fn hit_inside_a_step_takes_effect_but_is_missed() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([BOOSTED, EMULATED, "p filler_003"]));
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(rig.addr(ids[0]));
    let outer = cpu.regs;
    assert_eq!(cpu.hit(rig.addr(ids[1])), Outcome::Resume);
    assert_eq!(cpu.regs.rsp, STACK.0 - 8);
    let inner = cpu.enter_slot(rig.addr(ids[2]));
    assert_ne!(inner, slot);
    assert_eq!(cpu.step(inner), Stepped::Done { more: true });
    assert_eq!(cpu.regs.rip, rig.addr(ids[2]).0 + LEN);
    cpu.regs = outer;
    assert_eq!(cpu.step(slot), Stepped::Done { more: false });
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].probe, ids[0]);
    assert_eq!(counts(&rig, ids[0]), (1, 0, 0));
    assert_eq!(counts(&rig, ids[1]), (0, 1, 0));
    assert_eq!(counts(&rig, ids[2]), (0, 1, 0));
}

#[test]
fn more_hits_than_can_nest_forget_the_steps_that_never_came_back() {
    let mut rig = Rig::live();
    let ids: Vec<_> = [1, 3, 5, 7, 9]
        .map(|n| rig.one(&format!("p filler_{n:03}")))
        .into();
    let mut cpu = Cpu::new(&rig);
    for id in &ids[..4] {
        cpu.enter_slot(rig.addr(*id));
    }
    let slot = cpu.enter_slot(rig.addr(ids[4]));
    assert_eq!(cpu.step(slot), Stepped::Done { more: false });
    for id in &ids[..4] {
        assert_eq!(counts(&rig, *id), (0, 0, 1));
    }
    assert_eq!(counts(&rig, ids[4]), (1, 0, 0));
    assert_eq!(cpu.events().len(), 1);
}

#[test]
fn int3_that_is_not_ours_is_the_guests_and_changes_nothing() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at.wrapping_add(1)), Outcome::Foreign);
    // Without a view of the kernel nothing is ours.
    cpu.handler.adopt(rig.guest.table(), None);
    assert_eq!(cpu.hit(at), Outcome::Foreign);
    assert_eq!(cpu.regs, regs());
    assert!(cpu.events().is_empty());
    assert_eq!(counts(&rig, id), (0, 0, 0));
}

#[test]
fn int3_that_was_ours_until_now_is_retried_unless_the_guest_has_its_own_there() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    rig.unregister(&[id]).unwrap();
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), Outcome::Retry);
    assert_eq!(
        cpu.regs,
        Regs {
            rip: at.0,
            ..regs()
        }
    );
    rig.guest.write(at, &[INT3]);
    cpu.regs = regs();
    assert_eq!(cpu.hit(at), Outcome::Foreign);
    assert_eq!(cpu.regs, regs());
}

#[test]
fn guest_that_falls_out_of_a_slot_goes_on_after_the_instruction() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([BOOSTED, "p filler_003"]));
    let addresses = [0, 1].map(|n| rig.addr(ids[n]));
    let mut cpu = Cpu::new(&rig);
    let faulted = cpu.enter_slot(addresses[0]);
    cpu.handler.abandon();
    let clean = cpu.enter_slot(addresses[1]);
    cpu.step(clean);
    let falls_out = |rig: &Rig, slot: Gva, expected| {
        let mut cpu = Cpu::new(rig);
        assert_eq!(cpu.hit(slot.wrapping_add(LEN)), expected);
        cpu.regs.rip
    };
    let led_on = addresses[0].0 + LEN;
    assert_eq!(falls_out(&rig, faulted, Outcome::Retry), led_on);
    rig.disable(&ids).unwrap();
    assert_eq!(falls_out(&rig, faulted, Outcome::Retry), led_on);
    // What faulted may come back even when its probe is long gone.
    rig.unregister(&ids).unwrap();
    assert_eq!(falls_out(&rig, faulted, Outcome::Retry), led_on);
    falls_out(&rig, clean, Outcome::Foreign);
    assert_eq!(rig.guest.read(faulted), [0x48, 0x8b, 0x47, 0x08, INT3]);
    assert_eq!(rig.guest.read(clean), [INT3; SLOT_SIZE]);
    // Nor is its slot given to anybody else.
    let again = rig.one("p filler_005");
    assert_ne!(Cpu::new(&rig).enter_slot(rig.addr(again)), faulted);
}

#[test]
fn slot_is_kept_although_the_probe_that_faulted_left_before_the_last() {
    let mut rig = Rig::live();
    let first = rig.one(BOOSTED);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(rig.addr(first));
    cpu.handler.abandon();
    let second = rig.one(BOOSTED);
    rig.unregister(&[first]).unwrap();
    rig.unregister(&[second]).unwrap();
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), Outcome::Retry);
}

#[test]
fn slot_of_a_fault_is_used_again_by_the_next_probe_on_the_same_instruction() {
    let mut rig = Rig::live();
    let mut first = None;
    // Far more often than there are slots.
    for _ in 0..2 * SLOTS {
        let id = rig.one(BOOSTED);
        let mut cpu = Cpu::new(&rig);
        let slot = cpu.enter_slot(rig.addr(id));
        assert_eq!(*first.get_or_insert(slot), slot);
        cpu.handler.abandon();
        rig.unregister(&[id]).unwrap();
    }
    // Also after it was promised to a batch that failed.
    let slot = first.unwrap();
    let batch = specs([BOOSTED, "p filler_003"]);
    let other = rig.at("filler_003", 0);
    rig.guest
        .meanwhile(move |guest| guest.write(other, &[0x90]));
    refusal(rig.try_register(&batch));
    rig.guest.write(other, &[0x48]);
    rig.register(&batch[1..]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(slot.wrapping_add(LEN)), Outcome::Retry);
    let id = rig.one(BOOSTED);
    assert_eq!(Cpu::new(&rig).enter_slot(rig.addr(id)), slot);
}

#[test]
fn giving_up_counts_one_fault_for_each_enabled_probe_and_reports_nothing() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec(BOOSTED), disabled(BOOSTED), spec(BOOSTED)]);
    let mut cpu = Cpu::new(&rig);
    cpu.enter_slot(rig.addr(ids[0]));
    cpu.handler.abandon();
    assert!(!cpu.handler.is_stepping());
    assert_eq!(cpu.stepped(), Stepped::NotStepping);
    cpu.handler.abandon();
    for (id, faults) in ids.iter().zip([1, 0, 1]) {
        assert_eq!(counts(&rig, *id), (0, 0, faults));
    }
    assert!(cpu.events().is_empty());
}

#[test]
fn copy_that_faulted_counts_one_fault() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let mut cpu = Cpu::new(&rig);
    cpu.enter_slot(rig.addr(id));
    let handler = rig.at("filler_100", 0).0;
    cpu.regs.rip = handler;
    assert_eq!(cpu.stepped(), Stepped::Done { more: false });
    assert_eq!(cpu.regs.rip, handler);
    assert!(cpu.events().is_empty());
    assert_eq!(counts(&rig, id), (0, 0, 1));
}

#[test]
fn stepped_call_pushes_the_return_address_it_would_have_pushed_in_place() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+0x11");
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(at);
    // What the processor does for `call rax`.
    let top = STACK.wrapping_sub(8);
    rig.guest.write(top, &(slot.0 + 2).to_le_bytes());
    cpu.regs.rsp = top.0;
    cpu.regs.rip = rig.at("filler_100", 0).0;
    assert_eq!(cpu.stepped(), Stepped::Done { more: false });
    assert_eq!(rig.guest.read(top), (at.0 + 2).to_le_bytes());
    assert_eq!(cpu.events().len(), 1);
}

#[test]
fn call_whose_stack_vanished_counts_one_fault() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read+0x11");
    let mut cpu = Cpu::new(&rig);
    cpu.enter_slot(rig.addr(id));
    cpu.regs.rip = rig.at("filler_100", 0).0;
    cpu.regs.rsp = 0x1000;
    assert_eq!(cpu.stepped(), Stepped::Done { more: false });
    assert!(!cpu.handler.is_stepping());
    assert!(cpu.events().is_empty());
    assert_eq!(counts(&rig, id), (0, 0, 1));
}

#[test]
fn emulated_instruction_without_a_stack_faults_at_the_probepoint() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = 0x1000;
    let access = Access {
        at: Gva(0xff8),
        write: true,
    };
    assert_eq!(cpu.hit(at), Outcome::Fault(access));
    let unchanged = Regs {
        rip: at.0,
        rsp: 0x1000,
        ..regs()
    };
    assert_eq!(cpu.regs, unchanged);
    assert!(cpu.events().is_empty());
    assert_eq!(counts(&rig, id), (0, 0, 1));
}

#[test]
fn slot_is_left_anywhere_but_at_its_instruction_and_just_after_it() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let mut cpu = Cpu::new(&rig);
    assert!(!cpu.handler.left_slot(0));
    let slot = cpu.enter_slot(rig.addr(id)).0;
    for (rip, left) in [
        (slot, false),
        (slot + LEN, false),
        (slot + LEN + 1, true),
        (slot - 1, true),
        (rig.addr(id).0, true),
        (0, true),
        (u64::MAX, true),
    ] {
        assert_eq!(cpu.handler.left_slot(rip), left, "{rip:#x}");
    }
}

#[test]
fn hit_without_a_readable_task_is_reported_without_one() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    for gs_base in [0, u64::MAX, 1 << 63, rig.guest.gs_base() + 8] {
        let mut cpu = Cpu::new(&rig);
        cpu.gs_base = gs_base;
        assert_eq!(cpu.hit(rig.addr(id)), Outcome::Resume);
        let events = cpu.events();
        assert_eq!(events[0].task, None, "{gs_base:#x}");
    }
}

#[test]
fn virtual_cpu_without_counters_still_gets_its_hits() {
    // More virtual CPUs than the registry was told of: nothing is counted, nothing breaks.
    let mut rig = Rig::live();
    rig.registry = Registry::new(rig.guest.image.clone(), 0, hidden());
    rig.go_live(None);
    let id = rig.one(EMULATED);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(id)), Outcome::Resume);
    assert_eq!(cpu.events().len(), 1);
    assert_eq!(counts(&rig, id), (0, 0, 0));
}
