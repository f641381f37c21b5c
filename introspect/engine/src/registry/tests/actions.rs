//! Actions of handlers at a hit: capture, change, redirect the guest, hold it.

use std::time::Duration;

use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::STACK;
use hvprobe_hit::event::{Event, EventKind};
use hvprobe_hit::{Held, Outcome};
use hvprobe_spec::{Change, Comparison, Condition, Decision, Hold, Item, RegisterSet, Then};

use super::*;
use crate::testing::regs;

fn then(then: Then) -> Actions {
    Actions {
        then,
        ..Actions::default()
    }
}

fn holding(hold: Hold) -> Actions {
    Actions {
        hold: Some(hold),
        ..Actions::default()
    }
}

fn ask() -> Hold {
    Hold::Ask {
        deadline: Duration::from_secs(1),
        default: Decision {
            then: Then::Return(7),
            ..Decision::default()
        },
    }
}

fn set(register: Gpr, value: u64) -> Change {
    Change::Register { register, value }
}

fn poke(base: Option<Gpr>, offset: i64, bytes: &[u8]) -> Change {
    Change::Memory {
        base,
        offset,
        bytes: bytes.into(),
    }
}

/// Returns the registers just after the `push rbp` of [`EMULATED`] at `at`.
fn pushed(at: Gva) -> Regs {
    Regs {
        rip: at.0 + 1,
        rsp: STACK.0 - 8,
        ..regs()
    }
}

fn probes_of(events: &[Event]) -> Vec<ProbeId> {
    events.iter().map(|event| event.probe).collect()
}

#[test]
fn stack_pointer_that_is_set_is_that_of_the_displaced_instruction() {
    let to = STACK.0 - 0x100;
    let actions = || Actions {
        changes: vec![set(Gpr::Rsp, to)],
        ..Actions::default()
    };
    // `push rbp`, emulated by the host.
    let mut rig = Rig::live();
    let id = rig.register(&[acting(EMULATED, actions())])[0];
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    assert_eq!(cpu.regs.rsp, to - 8);
    assert_eq!(rig.guest.read(Gva(to - 8)), cpu.regs.rbp.to_le_bytes());
    assert_eq!(cpu.events()[0].regs.rsp, STACK.0);
    // A copy, in a boosted slot or a stepped one.
    for post in [false, true] {
        let mut rig = Rig::live();
        let actions = Actions { post, ..actions() };
        let id = rig.register(&[acting(BOOSTED, actions)])[0];
        let mut cpu = Cpu::new(&rig);
        assert_eq!(cpu.hit(rig.addr(id)), RESUME);
        assert_eq!(cpu.regs.rsp, to);
        assert!(cpu.regs.rip != rig.addr(id).0);
    }
    // A client decides to leave the function at once.
    let mut rig = Rig::live();
    let id = rig.register(&[acting(EMULATED, holding(ask()))])[0];
    rig.guest.write(Gva(to), &0x1234_u64.to_le_bytes());
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(id)), Outcome::Hold(Held::Ask(id)));
    let decision = Decision {
        changes: vec![set(Gpr::Rsp, to)],
        then: Then::Return(1),
    };
    assert_eq!(decision.check(), Ok(()));
    assert_eq!(cpu.resume(&decision), RESUME);
    assert_eq!((cpu.regs.rip, cpu.regs.rsp), (0x1234, to + 8));
}

#[test]
fn captured_items_follow_one_another_and_the_unreadable_are_zeros() {
    let mut rig = Rig::live();
    let memory = |base, offset, len| Item::Memory { base, offset, len };
    let actions = Actions {
        capture: vec![
            Item::Stack(1),
            memory(Gpr::Rdi, 8, 3),
            // The mapped memory ends in the middle of this item.
            memory(Gpr::Rsp, 0x17fc, 8),
            memory(Gpr::Rsi, -4, 2),
            Item::Stack(0),
        ],
        ..Actions::default()
    };
    let id = rig.register(&[acting(EMULATED, actions)])[0];
    rig.guest.write(STACK, &0x1111_u64.to_le_bytes());
    rig.guest.write(Gva(STACK.0 + 8), &0x2222_u64.to_le_bytes());
    rig.guest.write(Gva(STACK.0 - 0x40), b"abcd");
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rdi = STACK.0 - 0x48;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let captured = &events[0].captured;
    let expected = [
        &0x2222_u64.to_le_bytes()[..],
        b"abc",
        &[0; 8],
        &[0; 2],
        &0x1111_u64.to_le_bytes(),
    ]
    .concat();
    assert_eq!(captured.bytes(), expected);
    let unreadable: Vec<_> = (0..6).map(|n| captured.is_unreadable(n)).collect();
    assert_eq!(unreadable, [false, false, true, true, false, false]);
    assert_eq!(rig.counts(id).errors, 0);
}

#[test]
fn post_handler_captures_what_the_instruction_left() {
    let mut rig = Rig::live();
    let actions = Actions {
        capture: vec![Item::Stack(0)],
        post: true,
        ..Actions::default()
    };
    let id = rig.register(&[acting(EMULATED, actions)])[0];
    rig.guest.write(STACK, &0x1111_u64.to_le_bytes());
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    assert_eq!(events[0].captured.bytes(), 0x1111_u64.to_le_bytes());
    assert_eq!(events[1].captured.bytes(), regs().rbp.to_le_bytes());
}

#[test]
fn events_say_which_registers_to_show() {
    let mut rig = Rig::live();
    let registers: RegisterSet = [Gpr::Rdi, Gpr::R15].into_iter().collect();
    let actions = Actions {
        registers,
        ..Actions::default()
    };
    let ids = rig.register(&[acting(EMULATED, actions), spec(EMULATED)]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    let events = cpu.events();
    assert_eq!(events[0].shown, registers);
    assert!(events[0].shown.contains(Gpr::Rdi) && !events[0].shown.contains(Gpr::Rax));
    assert_eq!(events[1].shown, RegisterSet::default());
}

#[test]
fn changes_are_seen_by_the_instruction_and_by_those_behind() {
    let mut rig = Rig::live();
    let changing = Actions {
        changes: vec![
            set(Gpr::Rbp, 0x5555),
            poke(Some(Gpr::Rsp), -0x20, b"here"),
            poke(
                None,
                i64::from_ne_bytes((STACK.0 - 0x30).to_ne_bytes()),
                b"there",
            ),
        ],
        ..Actions::default()
    };
    let ids = rig.register(&[spec(EMULATED), acting(EMULATED, changing), spec(EMULATED)]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    let after = Regs {
        rbp: 0x5555,
        ..pushed(at)
    };
    assert_eq!(cpu.regs, after);
    let top = Gva(STACK.0 - 8);
    assert_eq!(rig.guest.read(top), 0x5555_u64.to_le_bytes());
    assert_eq!(rig.guest.read(Gva(STACK.0 - 0x20)), *b"here");
    assert_eq!(rig.guest.read(Gva(STACK.0 - 0x30)), *b"there");
    let seen: Vec<_> = cpu.events().iter().map(|event| event.regs.rbp).collect();
    assert_eq!(seen, [7, 7, 0x5555]);
}

#[test]
fn change_that_fails_is_counted_and_stops_neither_the_others_nor_anybody_else() {
    let mut rig = Rig::live();
    let failing = Actions {
        changes: vec![
            poke(None, 0x1000, b"nowhere"),
            poke(Some(Gpr::Rdi), i64::MIN, b"nowhere"),
            set(Gpr::Rbp, 0x5555),
        ],
        ..Actions::default()
    };
    let ids = rig.register(&[spec(EMULATED), acting(EMULATED, failing), spec(EMULATED)]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    assert_eq!(cpu.regs.rbp, 0x5555);
    assert_eq!(probes_of(&cpu.events()), ids);
    for (id, errors) in ids.iter().zip([0, 1, 0]) {
        let counts = Counts {
            hits: 1,
            errors,
            ..Counts::default()
        };
        assert_eq!(rig.counts(*id), counts);
    }
}

#[test]
fn jump_skips_the_instruction_and_the_probes_behind_miss_the_hit() {
    for definition in [EMULATED, BOOSTED] {
        let mut rig = Rig::live();
        let to = rig.at("filler_100", 4);
        let jumping = Actions {
            post: true,
            ..then(Then::Jump(to))
        };
        let ids = rig.register(&[
            spec(definition),
            acting(definition, jumping),
            post(definition),
            disabled(definition),
        ]);
        let mut cpu = Cpu::new(&rig);
        assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
        let there = Regs {
            rip: to.0,
            ..regs()
        };
        assert_eq!(cpu.regs, there);
        assert!(!cpu.handler.is_stepping());
        let events = cpu.events();
        assert_eq!(probes_of(&events), ids[..2]);
        assert!(events.iter().all(|event| event.kind == EventKind::Hit));
        let counts = ids.iter().map(|id| rig.counts(*id));
        let counts: Vec<_> = counts.map(|it| (it.hits, it.missed)).collect();
        assert_eq!(counts, [(1, 0), (1, 0), (0, 1), (0, 0)]);
    }
}

#[test]
fn function_that_is_skipped_returns_to_its_caller_at_once() {
    let mut rig = Rig::live();
    let returning = Actions {
        changes: vec![set(Gpr::Rax, 1), set(Gpr::Rdx, 2)],
        ..then(Then::Return(u64::MAX - 11))
    };
    let ids = rig.register(&[acting("p vfs_read", returning), spec("p vfs_read")]);
    let caller = rig.at("filler_100", 4);
    rig.guest.write(STACK, &caller.0.to_le_bytes());
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    let back = Regs {
        rip: caller.0,
        rsp: STACK.0 + 8,
        rax: u64::MAX - 11,
        rdx: 2,
        ..regs()
    };
    assert_eq!(cpu.regs, back);
    assert_eq!(rig.counts(ids[1]).missed, 1);
    // Without a readable stack the function cannot be skipped: it runs, and faults.
    cpu.regs.rsp = 0x1000;
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    assert_eq!(cpu.regs.rip, rig.at("vfs_read", 9).0);
    assert_eq!(rig.counts(ids[0]).errors, 1);
    assert_eq!(rig.counts(ids[1]).hits, 1);
}

#[test]
fn only_whole_functions_can_be_skipped() {
    let mut rig = Rig::live();
    for (definition, offset) in [("p vfs_read+9", 9), ("p filler_001+4", 4)] {
        let spec = acting(definition, then(Then::Return(0)));
        let result = rig.changes_nothing(|rig| rig.try_register(&[spec]));
        let (_, why) = refusal(result);
        let matches = matches!(&why, Refused::NotEntry { offset: it, .. } if *it == offset);
        assert!(matches, "{why}");
    }
    // At the ENDBR itself, and after it.
    let at = rig.at("vfs_read", 0);
    for definition in [format!("p {at}"), "p vfs_read+4".to_owned()] {
        rig.register(&[acting(&definition, then(Then::Return(0)))]);
    }
}

#[test]
fn stop_holds_the_guest_at_the_probepoint_and_those_behind_go_on_after_it() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        spec(EMULATED),
        acting(EMULATED, holding(Hold::Stop)),
        post(EMULATED),
    ]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), Outcome::Hold(Held::Stop(ids[1])));
    let held = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!(cpu.regs, held);
    assert_eq!(cpu.question(), None);
    assert!(!cpu.handler.is_stepping());
    let hits: Vec<_> = ids.iter().map(|id| rig.counts(*id).hits).collect();
    assert_eq!(hits, [1, 1, 0]);
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs, pushed(at));
    assert_eq!(cpu.question(), None);
    let events = cpu.events();
    assert_eq!(probes_of(&events), [ids[0], ids[1], ids[2], ids[2]]);
    assert_eq!(events[3].kind, EventKind::Post);
    assert!(ids.iter().all(|id| rig.counts(*id).hits == 1));
}

#[test]
fn answer_may_change_the_guest_and_send_it_elsewhere() {
    let mut rig = Rig::live();
    let asking = Actions {
        capture: vec![Item::Stack(1)],
        ..holding(ask())
    };
    rig.guest.write(Gva(STACK.0 + 8), &STACK.0.to_le_bytes());
    let ids = rig.register(&[acting(EMULATED, asking), spec(EMULATED)]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    let asked = Outcome::Hold(Held::Ask(ids[0]));
    assert_eq!(cpu.hit(at), asked);
    let inquiry = cpu.question().unwrap();
    let Hold::Ask { deadline, default } = ask() else {
        panic!("not to stop");
    };
    assert_eq!((inquiry.deadline, inquiry.default), (deadline, default));
    let asked_with = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!(
        (inquiry.event.probe, inquiry.event.regs),
        (ids[0], asked_with)
    );
    assert_eq!(inquiry.event.captured.bytes(), STACK.0.to_le_bytes());
    assert!(inquiry.event.task.is_some());
    let proceed = Decision {
        changes: vec![set(Gpr::Rbp, 0x99), poke(None, 0, b"x")],
        then: Then::Proceed,
    };
    assert_eq!(cpu.resume(&proceed), RESUME);
    let after = Regs {
        rbp: 0x99,
        ..pushed(at)
    };
    assert_eq!(cpu.regs, after);
    let [first, second] = [0, 1].map(|n| rig.counts(ids[n]));
    assert_eq!((first.errors, first.hits, second.hits), (1, 1, 1));

    let caller = rig.at("filler_100", 4);
    rig.guest.write(STACK, &caller.0.to_le_bytes());
    for (decision, rip, rsp) in [
        (Then::Jump(caller), caller.0, STACK.0),
        (Then::Return(5), caller.0, STACK.0 + 8),
    ] {
        cpu.regs = regs();
        assert_eq!(cpu.hit(at), asked);
        let decision = Decision {
            changes: Vec::new(),
            then: decision,
        };
        assert_eq!(cpu.resume(&decision), RESUME);
        assert_eq!((cpu.regs.rip, cpu.regs.rsp), (rip, rsp));
    }
    assert_eq!(cpu.regs.rax, 5);
    let counts = rig.counts(ids[1]);
    assert_eq!((counts.hits, counts.missed), (1, 2));
}

#[test]
fn several_may_hold_one_hit_one_after_the_other() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        acting(BOOSTED, holding(ask())),
        acting(BOOSTED, holding(Hold::Stop)),
        spec(BOOSTED),
    ]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), Outcome::Hold(Held::Ask(ids[0])));
    let held = Outcome::Hold(Held::Stop(ids[1]));
    assert_eq!(cpu.resume(&Decision::default()), held);
    assert_eq!(cpu.regs.rip, at.0);
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(rig.guest.read(Gva(cpu.regs.rip)), [0x48, 0x8b, 0x47, 0x08]);
    assert_eq!(probes_of(&cpu.events()), ids);
}

#[test]
fn hold_whose_probe_left_meanwhile_goes_on_without_it() {
    let mut rig = Rig::live();
    let decision = Decision {
        changes: vec![set(Gpr::Rax, 0x99)],
        then: Then::Jump(Gva(0)),
    };
    let ids = rig.register(&[acting(EMULATED, holding(ask())), spec(EMULATED)]);
    let at = rig.addr(ids[0]);
    let mut cpu = Cpu::new(&rig);
    // Other probes are still there, and a new one was added.
    cpu.hit(at);
    rig.unregister(&ids[..1]).unwrap();
    let late = rig.one(EMULATED);
    assert_eq!(cpu.resume(&decision), RESUME);
    assert_eq!(cpu.regs, pushed(at));
    assert_eq!(rig.counts(ids[1]).hits, 1);
    assert_eq!(rig.counts(late).hits, 1);
    rig.unregister(&[ids[1], late]).unwrap();

    // No other probe is there: the instruction is restored.
    let id = rig.register(&[acting(EMULATED, holding(ask()))])[0];
    cpu.regs = regs();
    cpu.hit(at);
    rig.unregister(&[id]).unwrap();
    assert_eq!(cpu.question(), None);
    assert_eq!(cpu.resume(&decision), RESUME);
    let retried = Regs {
        rip: at.0,
        ..regs()
    };
    assert_eq!(cpu.regs, retried);
    assert_eq!(cpu.question(), None);
}

#[test]
fn virtual_cpu_that_is_not_held_has_nothing_to_resume() {
    let mut rig = Rig::live();
    rig.one(EMULATED);
    let mut cpu = Cpu::new(&rig);
    let decision = Decision {
        changes: vec![set(Gpr::Rax, 0x99)],
        then: Then::Jump(Gva(0)),
    };
    assert_eq!(cpu.question(), None);
    assert_eq!(cpu.resume(&decision), RESUME);
    assert_eq!(cpu.regs, regs());
}

#[test]
fn a_hit_that_a_condition_does_not_want_is_counted_and_nothing_else() {
    let mut rig = Rig::live();
    let when = |value| Condition {
        register: Gpr::Rdi,
        comparison: Comparison::Equal,
        value,
    };
    let acts = |value| Actions {
        when: vec![when(value)],
        changes: vec![Change::Register {
            register: Gpr::Rax,
            value: 99,
        }],
        post: true,
        ..Actions::default()
    };
    let found = crate::testing::regs();
    let ids = rig.register(&[
        acting(EMULATED, acts(found.rdi + 1)),
        acting(EMULATED, acts(found.rdi)),
    ]);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    assert_eq!(cpu.regs.rax, 99);
    let of: Vec<_> = cpu.events().iter().map(|event| event.probe).collect();
    assert_eq!(of, [ids[1], ids[1]], "its hit and its post-handler");
    let counts = rig.counts(ids[0]);
    assert_eq!((counts.hits, counts.vetoed), (0, 1));
    let counts = rig.counts(ids[1]);
    assert_eq!((counts.hits, counts.vetoed), (1, 0));
}
