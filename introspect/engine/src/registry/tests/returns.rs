//! Return probes: the entry and the return.

mod chains;
mod half;
mod leaving;

use std::sync::atomic::Ordering;

use hvprobe_arch::detour::InstanceLayout;
use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::{DATA_VIRT, STACK};
use hvprobe_hit::event::{Call, Event, EventKind};
use hvprobe_hit::{Held, Outcome};
use hvprobe_spec::{Change, Comparison, Condition, Decision, Item, Then};

use super::*;
use crate::testing::regs;

/// Probe of a function whose first instruction is emulated.
const FUNCTION: &str = "r filler_000";
/// Probe of another such function.
const OTHER: &str = "r filler_002";

/// Returns the return address of the `n`th call, in the kernel's text.
fn caller(rig: &Rig, n: u64) -> Gva {
    rig.at("filler_100", 0).wrapping_add(n)
}

/// Returns the address of the `n`th frame's return address on a stack.
fn frame(n: u64) -> Gva {
    Gva(STACK.0 - 0x20 * n)
}

impl Cpu {
    /// Calls the probed function at `entry`, with its return address at `slot`.
    fn call(&mut self, rig: &Rig, entry: Gva, slot: Gva, ret: Gva) -> Outcome {
        rig.guest.write(slot, &ret.0.to_le_bytes());
        self.jump(entry, slot)
    }

    /// As [`Cpu::call`], without a new return address: a tail call, in the caller's frame.
    fn jump(&mut self, entry: Gva, slot: Gva) -> Outcome {
        self.regs = Regs {
            rsp: slot.0,
            ..regs()
        };
        self.hit(entry)
    }

    /// Ends the function whose return address is at `slot`, with the result `value`. Returns the address at which
    /// the guest continues.
    fn ret(&mut self, rig: &Rig, slot: Gva, value: u64) -> Gva {
        let found = rig.word(slot);
        self.regs.rax = value;
        self.regs.rsp = slot.0 + 8;
        self.regs.rip = found.0;
        if found == rig.trampoline() {
            assert_eq!(self.hit(found), RESUME);
        }
        Gva(self.regs.rip)
    }
}

impl Rig {
    fn word(&self, at: Gva) -> Gva {
        Gva(u64::from_le_bytes(self.guest.read(at)))
    }

    fn trampoline(&self) -> Gva {
        let table = self.guest.table();
        table.fixtures().expect("mapped").trampoline()
    }

    /// Returns whether the frame at `slot` returns through the trampoline.
    fn is_taken(&self, slot: Gva) -> bool {
        self.word(slot) == self.trampoline()
    }

    fn unmatched(&self) -> u64 {
        self.registry
            .shared
            .returns
            .unmatched
            .load(Ordering::Relaxed)
    }

    /// Creates a second task, and a per-CPU area in which it runs; returns its GS base.
    fn second_task(&self) -> u64 {
        let task = DATA_VIRT.wrapping_add(0x200);
        self.guest
            .write(DATA_VIRT.wrapping_add(8), &task.0.to_le_bytes());
        self.guest.gs_base() + 8
    }
}

/// Returns the events of returns among `events`, with their calls.
fn returns(events: &[Event]) -> Vec<(&Event, Call)> {
    let returns = events.iter().filter_map(|event| match event.kind {
        EventKind::Return(call) => Some((event, call)),
        _ => None,
    });
    returns.collect()
}

fn hits(rig: &Rig, id: ProbeId) -> u64 {
    rig.counts(id).hits
}

#[test]
fn return_is_reported_with_its_call_and_goes_where_it_would_have_gone() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let (entry, ret) = (rig.addr(id), caller(&rig, 0));
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.call(&rig, entry, STACK, ret), RESUME);
    // The instruction at the entry takes effect, and only the return address has changed.
    let inside = Regs {
        rip: entry.0 + 1,
        rsp: STACK.0 - 8,
        ..regs()
    };
    assert_eq!(cpu.regs, inside);
    assert!(rig.is_taken(STACK));
    assert_eq!(hits(&rig, id), 0);

    cpu.regs.rbx = 0x77;
    assert_eq!(cpu.ret(&rig, STACK, 42), ret);
    let back = Regs {
        rip: ret.0,
        rsp: STACK.0 + 8,
        rax: 42,
        rbx: 0x77,
        ..regs()
    };
    assert_eq!(cpu.regs, back);
    let counts = Counts {
        hits: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    let call = Call {
        id: 0,
        entry_ns: 10,
        entry_tsc: 1010,
        entry: Regs {
            rip: entry.0,
            ..regs()
        },
    };
    assert_eq!(events[0].kind, EventKind::Return(call));
    assert_eq!((events[0].probe, events[0].regs), (id, back));
    assert!(events[0].host_ns > call.entry_ns);
    assert!(events[0].task.is_some());
}

#[test]
fn kprobes_and_return_probes_of_a_function_cost_one_stop_and_run_in_order() {
    let mut rig = Rig::live();
    let definitions = ["p filler_000", FUNCTION, "p filler_000", FUNCTION];
    let mut ids = Vec::new();
    let stops = rig.stops_of(|rig| ids = rig.register(&specs(definitions)));
    assert_eq!(stops, 1);
    let mut cpu = Cpu::new(&rig);
    let ret = caller(&rig, 0);
    // One hit for all probes.
    assert_eq!(cpu.call(&rig, rig.addr(ids[0]), STACK, ret), RESUME);
    assert_eq!(cpu.ret(&rig, STACK, 1), ret);
    let events = cpu.events();
    let probes: Vec<_> = events.iter().map(|event| event.probe).collect();
    // At the return, the last registration comes first.
    assert_eq!(probes, [ids[0], ids[2], ids[3], ids[1]]);
    let returns = returns(&events);
    assert_eq!(returns.len(), 2);
    assert!(returns.iter().all(|(event, _)| event.regs.rip == ret.0));
    assert_ne!(returns[0].1.id, returns[1].1.id);
    assert!(ids.iter().all(|id| hits(&rig, *id) == 1));
}

#[test]
fn recursive_calls_return_one_by_one() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([FUNCTION, OTHER]));
    let entries = [rig.addr(ids[0]), rig.addr(ids[1])];
    let mut cpu = Cpu::new(&rig);
    for n in 0..6_u8 {
        let at = entries[usize::from(n % 2)];
        cpu.call(&rig, at, frame(n.into()), caller(&rig, n.into()));
    }
    for n in (0..6).rev() {
        assert_eq!(cpu.ret(&rig, frame(n), n), caller(&rig, n));
    }
    let events = cpu.events();
    let seen = returns(&events).into_iter();
    let seen: Vec<_> = seen
        .map(|(event, call)| (event.regs.rax, call.id))
        .collect();
    assert_eq!(seen, [(5, 5), (4, 4), (3, 3), (2, 2), (1, 1), (0, 0)]);
    assert_eq!((hits(&rig, ids[0]), hits(&rig, ids[1])), (3, 3));
}

#[test]
fn function_entered_by_a_jump_at_the_end_of_another_returns_for_both() {
    let mut rig = Rig::live();
    // `vfs_read` ends in a jump, which is probed as well.
    let ids = rig.register(&specs(["r vfs_read", "p vfs_read+0x16", OTHER]));
    let ret = caller(&rig, 0);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), STACK, ret);
    assert_eq!(cpu.jump(rig.addr(ids[1]), STACK), RESUME);
    assert_eq!(cpu.regs.rip, rig.at("vfs_read", 0x18).0);
    cpu.jump(rig.addr(ids[2]), STACK);
    assert!(rig.is_taken(STACK));
    assert_eq!(cpu.ret(&rig, STACK, 9), ret);
    let events = cpu.events();
    let seen: Vec<_> = returns(&events).iter().map(|it| it.0.probe).collect();
    assert_eq!(seen, [ids[2], ids[0]]);
    assert_eq!(rig.unmatched(), 0);
}

#[test]
fn a_frame_whose_trampoline_comes_after_other_code_is_not_taken_twice() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[
        half::reading(FUNCTION),
        spec("r filler_004"),
        half::reading(OTHER),
    ]);
    let source = rig.registry.code.sources.get(ids[1]).expect("optimized");
    let calls = source.followed().expect("a return probe");
    let ret = caller(&rig, 0);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), STACK, ret);
    // A detour puts a stub into the same frame.
    let instance = calls.instances.at;
    let found = rig.word(STACK);
    rig.guest.write(
        instance.wrapping_add(InstanceLayout::RETURN),
        &found.0.to_le_bytes(),
    );
    rig.guest.write(STACK, &calls.stubs.0.to_le_bytes());
    cpu.jump(rig.addr(ids[2]), STACK);
    assert_eq!(rig.word(STACK), calls.stubs);
    // The stub returns to the trampoline.
    rig.guest.write(STACK, &found.0.to_le_bytes());
    assert_eq!(cpu.ret(&rig, STACK, 9), ret);
    let missed = ids.iter().map(|id| rig.counts(*id).missed);
    assert_eq!(missed.collect::<Vec<_>>(), [0, 0, 1]);
    assert_eq!((hits(&rig, ids[0]), rig.counts(ids[0]).orphans), (1, 0));
    assert_eq!(rig.unmatched(), 0);
    // If the stub does not lead to the trampoline, its address is a return address like any other.
    rig.guest.write(
        instance.wrapping_add(InstanceLayout::RETURN),
        &ret.0.to_le_bytes(),
    );
    cpu.call(&rig, rig.addr(ids[2]), STACK, calls.stubs);
    assert_eq!(cpu.ret(&rig, STACK, 9), calls.stubs);
    assert_eq!(hits(&rig, ids[2]), 1);
}

#[test]
fn entry_condition_leaves_calls_alone() {
    let mut rig = Rig::live();
    let condition = |comparison, value| Condition {
        register: Gpr::Rdi,
        comparison,
        value,
    };
    let actions = Actions {
        when: vec![
            condition(Comparison::GreaterOrEqual, 10),
            condition(Comparison::NotEqual, 12),
        ],
        ..Actions::default()
    };
    let id = rig.register(&[acting(FUNCTION, actions)])[0];
    let (entry, ret) = (rig.addr(id), caller(&rig, 0));
    let mut cpu = Cpu::new(&rig);
    for (rdi, is_seen) in [(9, false), (10, true), (12, false), (u64::MAX, true)] {
        rig.guest.write(STACK, &ret.0.to_le_bytes());
        cpu.regs = Regs { rdi, ..regs() };
        assert_eq!(cpu.hit(entry), RESUME);
        assert_eq!(cpu.regs.rip, entry.0 + 1);
        assert_eq!(rig.is_taken(STACK), is_seen);
        assert_eq!(cpu.ret(&rig, STACK, 0), ret);
    }
    let counts = Counts {
        hits: 2,
        vetoed: 2,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
    assert_eq!(cpu.events().len(), 2);
}

#[test]
fn calls_beyond_the_instances_run_unprobed_and_are_missed() {
    // Without a number, `maxactive` is the larger of 10 and twice the number of virtual CPUs.
    for (definition, limit) in [("r1 filler_000", 1), (FUNCTION, 10)] {
        let mut rig = Rig::live();
        let id = rig.one(definition);
        assert_eq!(rig.info(id).maxactive, Some(limit));
        let limit = u64::from(limit);
        let mut cpu = Cpu::new(&rig);
        for n in 0..limit + 3 {
            cpu.call(&rig, rig.addr(id), frame(n), caller(&rig, n));
            assert_eq!(rig.is_taken(frame(n)), n < limit);
        }
        for n in (0..limit + 3).rev() {
            assert_eq!(cpu.ret(&rig, frame(n), 0), caller(&rig, n));
        }
        let counts = Counts {
            hits: limit,
            missed: 3,
            ..Counts::default()
        };
        assert_eq!(rig.counts(id), counts);
        // The instances are free again.
        cpu.call(&rig, rig.addr(id), STACK, caller(&rig, 0));
        assert!(rig.is_taken(STACK));
    }
}

#[test]
fn automatic_number_of_instances_misses_nothing() {
    let mut rig = Rig::live();
    let spec = ProbeSpec {
        maxactive_auto: true,
        ..spec(FUNCTION)
    };
    let id = rig.register(&[spec])[0];
    let mut cpu = Cpu::new(&rig);
    for n in 0..50 {
        cpu.call(&rig, rig.addr(id), frame(n), caller(&rig, n));
    }
    for n in (0..50).rev() {
        assert_eq!(cpu.ret(&rig, frame(n), 0), caller(&rig, n));
    }
    assert_eq!((hits(&rig, id), rig.counts(id).missed), (50, 0));
}

#[test]
fn call_without_a_stack_or_a_task_is_missed() {
    let mut rig = Rig::live();
    let id = rig.one("r vfs_read");
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = 0x1000;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    cpu.gs_base = 0;
    let ret = caller(&rig, 0);
    assert_eq!(cpu.call(&rig, rig.addr(id), STACK, ret), RESUME);
    assert_eq!(rig.word(STACK), ret);
    assert_eq!((hits(&rig, id), rig.counts(id).missed), (0, 2));
}

#[test]
fn task_may_go_to_another_virtual_cpu_during_the_call() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let mut first = Cpu::numbered(&rig, 0);
    let mut second = Cpu::numbered(&rig, 1);
    first.call(&rig, rig.addr(id), frame(0), caller(&rig, 0));
    second.call(&rig, rig.addr(id), frame(1), caller(&rig, 1));
    assert_eq!(first.ret(&rig, frame(1), 1), caller(&rig, 1));
    assert_eq!(second.ret(&rig, frame(0), 0), caller(&rig, 0));
    assert_eq!(hits(&rig, id), 2);
    assert_eq!((first.events().len(), second.events().len()), (1, 1));
}

#[test]
fn tasks_that_take_turns_keep_their_calls_apart() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let mut cpu = Cpu::new(&rig);
    let bases = [rig.guest.gs_base(), rig.second_task()];
    let stacks = [STACK, Gva(STACK.0 - 0x400)];
    for n in 0..4_u8 {
        let task = usize::from(n % 2);
        cpu.gs_base = bases[task];
        let slot = Gva(stacks[task].0 - 0x20 * u64::from(n / 2));
        cpu.call(&rig, rig.addr(id), slot, caller(&rig, n.into()));
    }
    for n in [2_u8, 3, 1, 0] {
        let task = usize::from(n % 2);
        cpu.gs_base = bases[task];
        let slot = Gva(stacks[task].0 - 0x20 * u64::from(n / 2));
        assert_eq!(cpu.ret(&rig, slot, 0), caller(&rig, n.into()));
    }
    assert_eq!((hits(&rig, id), rig.counts(id).orphans), (4, 0));
}

#[test]
fn what_was_captured_at_the_entry_is_there_at_the_return() {
    let mut rig = Rig::live();
    let memory = |base, offset, len| Item::Memory { base, offset, len };
    let actions = Actions {
        capture: vec![
            memory(Gpr::Rdi, 0, 4),
            memory(Gpr::Rsi, 0, 2),
            Item::Stack(1),
        ],
        capture_at_return: vec![memory(Gpr::Rbx, 0, 4), memory(Gpr::Rsi, 0, 1)],
        ..Actions::default()
    };
    let id = rig.register(&[acting(FUNCTION, actions)])[0];
    let buffer = Gva(DATA_VIRT.0 + 0x600);
    rig.guest.write(buffer, b"then");
    rig.guest.write(STACK, &caller(&rig, 0).0.to_le_bytes());
    rig.guest.write(STACK.wrapping_add(8), b"argument");
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rdi = buffer.0;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    rig.guest.write(buffer, b"now.");
    rig.guest.write(STACK.wrapping_add(8), &[0; 8]);
    cpu.regs.rdi = 0;
    cpu.regs.rbx = buffer.0;
    cpu.ret(&rig, STACK, 0);
    let events = cpu.events();
    let captured = &events[0].captured;
    assert_eq!(captured.bytes(), b"then\0\0argumentnow.\0");
    let unreadable: Vec<_> = (0..6).map(|n| captured.is_unreadable(n)).collect();
    assert_eq!(unreadable, [false, true, false, false, true, false]);
}

#[test]
fn return_handler_may_change_what_is_returned() {
    let mut rig = Rig::live();
    let set = |value| Change::Register {
        register: Gpr::Rax,
        value,
    };
    let nowhere = Change::Memory {
        base: None,
        offset: 0x1000,
        bytes: (*b"x").into(),
    };
    let changing = |changes| Actions {
        changes,
        ..Actions::default()
    };
    let ids = rig.register(&[
        acting(FUNCTION, changing(vec![nowhere, set(2)])),
        acting(FUNCTION, changing(vec![set(1)])),
    ]);
    let ret = caller(&rig, 0);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), STACK, ret);
    assert_eq!(cpu.regs.rax, regs().rax);
    assert_eq!(cpu.ret(&rig, STACK, 0), ret);
    assert_eq!(cpu.regs.rax, 2);
    let values: Vec<_> = cpu.events().iter().map(|event| event.regs.rax).collect();
    assert_eq!(values, [0, 1]);
    let errors: Vec<_> = ids.iter().map(|id| rig.counts(*id).errors).collect();
    assert_eq!(errors, [1, 0]);
}

#[test]
fn function_that_is_skipped_returns_through_the_probes_before_and_misses_those_behind() {
    let mut rig = Rig::live();
    let skipping = Actions {
        then: Then::Return(5),
        ..Actions::default()
    };
    let ids = rig.register(&[
        spec(FUNCTION),
        acting("p filler_000", skipping),
        spec(FUNCTION),
    ]);
    let ret = caller(&rig, 0);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.call(&rig, rig.addr(ids[0]), STACK, ret), RESUME);
    // The state is that after the function's `ret`.
    let trampoline = rig.trampoline();
    assert_eq!((cpu.regs.rip, cpu.regs.rax), (trampoline.0, 5));
    assert_eq!(cpu.hit(trampoline), RESUME);
    assert_eq!((cpu.regs.rip, cpu.regs.rsp), (ret.0, STACK.0 + 8));
    let counts = ids.iter().map(|id| rig.counts(*id));
    let counts: Vec<_> = counts.map(|it| (it.hits, it.missed)).collect();
    assert_eq!(counts, [(1, 0), (1, 0), (0, 1)]);
}

#[test]
fn boosted_and_stepped_entries_are_entered_once() {
    for behind in [spec(BOOSTED), post(BOOSTED)] {
        let mut rig = Rig::live();
        let ids = rig.register(&[spec("r filler_001"), behind]);
        let ret = caller(&rig, 0);
        let mut cpu = Cpu::new(&rig);
        assert_eq!(cpu.call(&rig, rig.addr(ids[0]), STACK, ret), RESUME);
        let slot = Gva(cpu.regs.rip);
        if rig.mechanism(ids[0]) == Mechanism::Stepped {
            // An NMI delays the instruction, not the entry.
            cpu.raise(2, None, slot);
            cpu.iret();
            assert_eq!(cpu.enter_slot(rig.addr(ids[0])), slot);
            assert_eq!(cpu.hit(slot.wrapping_add(4)), RESUME);
        }
        assert_eq!(cpu.ret(&rig, STACK, 0), ret);
        assert_eq!((hits(&rig, ids[0]), hits(&rig, ids[1])), (1, 1));
        assert_eq!(rig.counts(ids[0]).orphans, 0);
    }
}

#[test]
fn functions_whose_return_cannot_be_had_are_refused() {
    let mut rig = Rig::live();
    let inside = rig.at("filler_001", 4);
    for (definition, expected) in [
        (
            format!("r {inside}"),
            "is 0x4 bytes into filler_001: only a function's entry can be used for return probes",
        ),
        (
            "r sites".to_owned(),
            "sites never returns, so its returns cannot be probed",
        ),
        (
            "r do_task_dead".to_owned(),
            "do_task_dead never returns, so its returns cannot be probed",
        ),
        (
            "r __switch_to".to_owned(),
            "__switch_to switches stacks, so its returns cannot be probed",
        ),
        (
            "r return_to_handler".to_owned(),
            "return_to_handler is returned to, not called, so its returns cannot be probed",
        ),
        (
            "r ftrace_caller".to_owned(),
            "ftrace_caller looks at where it returns to, so its returns cannot be probed",
        ),
    ] {
        let batch = [spec(EMULATED), spec(&definition)];
        let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
        assert_eq!(index, 1);
        assert!(why.to_string().ends_with(expected), "{why}");
    }
    // By address, and after the ENDBR of the entry.
    for offset in [0, 4] {
        let at = rig.at("vfs_read", offset);
        rig.one(&format!("r {at}"));
    }
}

#[test]
fn hold_before_the_entry_does_not_enter_twice() {
    let mut rig = Rig::live();
    let stopping = Actions {
        hold: Some(hvprobe_spec::Hold::Stop),
        ..Actions::default()
    };
    let ids = rig.register(&[
        spec(FUNCTION),
        acting("p filler_000", stopping),
        spec(FUNCTION),
    ]);
    let ret = caller(&rig, 0);
    let mut cpu = Cpu::new(&rig);
    let held = cpu.call(&rig, rig.addr(ids[0]), STACK, ret);
    assert_eq!(held, Outcome::Hold(Held::Stop(ids[1])));
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.ret(&rig, STACK, 0), ret);
    assert!(ids.iter().all(|id| hits(&rig, *id) == 1));
}
