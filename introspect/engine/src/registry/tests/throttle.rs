//! Budgets at hits: throttled hits are counted and reported, and the actions of the probe still happen.

use hvprobe_arch::regs::Gpr;
use hvprobe_hit::Outcome;
use hvprobe_hit::event::EventKind;
use hvprobe_spec::{Budget, Change, Decision, Excess, Hold, Then};

use super::*;
use crate::info::Throttled;

fn budgeted(definition: &str, rate: u32, excess: Excess, actions: Actions) -> ProbeSpec {
    ProbeSpec {
        budget: Some(Budget {
            max_rate: Some(rate),
            max_share: None,
            excess,
        }),
        ..acting(definition, actions)
    }
}

impl Rig {
    fn throttle(&mut self) -> Vec<(ProbeId, u64, bool)> {
        let (notices, result) = self.registry.throttle(&*self.guest);
        result.expect("the guest stops");
        let fields = |notice: Throttled| (notice.probe, notice.count, notice.disabled);
        notices.into_iter().map(fields).collect()
    }

    /// Returns the hits and the throttled hits of `id`.
    fn counted(&self, id: ProbeId) -> (u64, u64) {
        let counts = self.info(id).counts;
        (counts.hits, counts.throttled)
    }
}

#[test]
fn hits_beyond_the_budget_are_counted_and_reported_once_but_make_no_event() {
    let mut rig = Rig::live();
    let spec = budgeted(EMULATED, 3, Excess::Sample, Actions::default());
    let [id, other] = rig.register(&[spec, super::spec(EMULATED)])[..] else {
        panic!("two");
    };
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    for _ in 0..10 {
        assert_eq!(cpu.hit(at), RESUME);
    }
    let events = cpu.events();
    let of = |id| events.iter().filter(|event| event.probe == id).count();
    assert_eq!((of(id), of(other)), (3, 10));
    assert_eq!(rig.counted(id), (3, 7));
    assert_eq!(rig.counted(other), (10, 0));
    assert_eq!(
        rig.stops_of(|rig| assert_eq!(rig.throttle(), [(id, 7, false)])),
        0
    );
    assert_eq!(rig.throttle(), []);
    assert!(!rig.info(id).turned_off);
}

#[test]
fn probe_that_exceeds_its_budget_is_turned_off_until_it_is_enabled() {
    let mut rig = Rig::live();
    let spec = budgeted(EMULATED, 3, Excess::Disable, Actions::default());
    let id = rig.register(&[spec])[0];
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    for _ in 0..5 {
        assert_eq!(cpu.hit(at), RESUME);
    }
    assert_eq!(cpu.events().len(), 3);
    assert_eq!(rig.byte(at), INT3);
    assert_eq!(
        rig.stops_of(|rig| assert_eq!(rig.throttle(), [(id, 2, true)])),
        1
    );
    let info = rig.info(id);
    assert!(info.disabled && info.turned_off);
    assert_ne!(rig.byte(at), INT3);
    assert_eq!(rig.throttle(), []);

    rig.enable(&[id]).unwrap();
    let info = rig.info(id);
    assert!(!info.disabled && !info.turned_off);
    let mut cpu = Cpu::new(&rig);
    for _ in 0..4 {
        assert_eq!(cpu.hit(at), RESUME);
    }
    assert_eq!(rig.counted(id), (6, 3));
    assert_eq!(rig.throttle(), [(id, 1, true)]);
}

#[test]
fn probe_that_leaves_is_reported_a_last_time() {
    let mut rig = Rig::live();
    let spec = budgeted(EMULATED, 1, Excess::Sample, Actions::default());
    let id = rig.register(&[spec])[0];
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    for _ in 0..3 {
        cpu.hit(at);
    }
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.throttle(), [(id, 2, false)]);
    assert_eq!(rig.throttle(), []);
}

#[test]
fn what_a_throttled_probe_does_is_done_and_its_post_handler_is_silent() {
    let mut rig = Rig::live();
    let change = Change::Register {
        register: Gpr::Rdi,
        value: 77,
    };
    let actions = Actions {
        changes: vec![change],
        post: true,
        ..Actions::default()
    };
    let stop = Actions {
        hold: Some(Hold::Stop),
        post: true,
        ..Actions::default()
    };
    let skip = Actions {
        then: Then::Return(5),
        ..Actions::default()
    };
    let ids = rig.register(&[
        budgeted(EMULATED, 1, Excess::Sample, actions),
        budgeted(BOOSTED, 1, Excess::Sample, skip),
        budgeted("p filler_004", 1, Excess::Sample, stop),
    ]);
    let at: Vec<_> = ids.iter().map(|id| rig.addr(*id)).collect();
    let mut cpu = Cpu::new(&rig);
    for _ in 0..3 {
        cpu.regs.rdi = 6;
        assert_eq!(cpu.hit(at[0]), RESUME);
        assert_eq!(cpu.regs.rdi, 77);
        cpu.regs.rsp = hvprobe_fixtures::STACK.0;
        cpu.regs.rax = 0;
        assert_eq!(cpu.hit(at[1]), RESUME);
        assert_eq!(cpu.regs.rax, 5);
        cpu.regs.rsp = hvprobe_fixtures::STACK.0;
        assert!(matches!(cpu.hit(at[2]), Outcome::Hold(_)));
        assert_eq!(cpu.resume(&Decision::default()), RESUME);
        cpu.regs.rsp = hvprobe_fixtures::STACK.0;
    }
    let events = cpu.events();
    let of = |id, kind| {
        let wanted = |event: &&hvprobe_hit::event::Event| event.probe == id && event.kind == kind;
        events.iter().filter(wanted).count()
    };
    for id in [ids[0], ids[2]] {
        assert_eq!(of(id, EventKind::Hit), 1);
        assert_eq!(of(id, EventKind::Post), 1);
    }
    assert!(ids.iter().all(|id| rig.counted(*id) == (1, 2)));
}

#[test]
fn budget_that_means_nothing_is_refused() {
    let mut rig = Rig::live();
    let spec = budgeted(EMULATED, 0, Excess::Sample, Actions::default());
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec]));
    assert!(matches!(result, Err(RegisterError::Spec { index: 0, .. })));
}

#[test]
fn throttled_calls_are_left_alone_unless_the_return_is_changed() {
    let mut rig = Rig::live();
    let change = Change::Register {
        register: Gpr::Rax,
        value: 9,
    };
    let changing = Actions {
        changes: vec![change],
        ..Actions::default()
    };
    let quiet = budgeted("r filler_000", 1, Excess::Sample, Actions::default());
    let changing = budgeted("r filler_004", 1, Excess::Sample, changing);
    let ids = rig.register(&[quiet, changing]);
    let trampoline = rig.guest.table().fixtures().unwrap().trampoline();
    let at: Vec<_> = ids.iter().map(|id| rig.addr(*id)).collect();
    let mut cpu = Cpu::new(&rig);
    let mut call = |at, n: u64| {
        let (slot, caller) = (hvprobe_fixtures::STACK, 0x1000 + n);
        rig.guest.write(slot, &caller.to_le_bytes());
        cpu.regs.rsp = slot.0;
        assert_eq!(cpu.hit(at), RESUME);
        let followed = rig.guest.read::<8>(slot) == trampoline.0.to_le_bytes();
        if followed {
            cpu.regs.rsp = slot.0 + 8;
            cpu.regs.rax = 1;
            assert_eq!(cpu.hit(trampoline), RESUME);
            assert_eq!(cpu.regs.rip, caller);
        }
        (followed, cpu.regs.rax)
    };
    let quiet: Vec<_> = (0..3).map(|n| call(at[0], n).0).collect();
    assert_eq!(quiet, [true, false, false]);
    let changed: Vec<_> = (0..3).map(|n| call(at[1], n)).collect();
    assert_eq!(changed, [(true, 9); 3]);
    assert_eq!(cpu.events().len(), 2);
    assert!(ids.iter().all(|id| rig.counted(*id) == (1, 2)));
}
