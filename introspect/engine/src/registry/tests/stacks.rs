//! Detours that copy stacks: when they do, and hits whose stacks they cannot copy.

use hvprobe_spec::{Item, TextHeader};

use super::*;
use crate::explain::explain;
use crate::unoptimized::Unoptimized;

/// Creates a rig whose kernel has the tables to unwind its stacks.
fn optimizing() -> Rig {
    let mut rig = Rig::boot_whole(&probed::unwindable());
    rig.go_live(None);
    rig
}

fn stacks(definition: &str) -> ProbeSpec {
    let mut spec = spec(definition);
    spec.actions.capture = vec![Item::StackTrace(8)];
    spec
}

#[test]
fn a_stack_takes_no_exit_while_no_return_probe_changes_what_is_on_it() {
    let mut rig = optimizing();
    let id = rig.register(&[stacks("p filler_000")])[0];
    let is_optimized = |rig: &Rig| rig.mechanism(id) == Mechanism::Optimized;
    assert!(is_optimized(&rig), "{:?}", rig.info(id));
    for returning in ["r vfs_read", "r filler_001"] {
        let other = rig.one(returning);
        let why = rig.info(id).unoptimized.expect("not optimized");
        let what = "records the kernel's stack while there are return probes";
        assert_eq!(why, Unoptimized::Synchronous { probe: id, what });
        // Calls may still return through the stubs of a disabled probe.
        rig.disable(&[other]).unwrap();
        assert!(!is_optimized(&rig));
        rig.unregister(&[other]).unwrap();
        assert!(is_optimized(&rig), "{:?}", rig.info(id));
    }
    let other = rig.one("p filler_001");
    assert!(is_optimized(&rig));
    rig.unregister(&[id, other]).unwrap();
}

#[test]
fn returns_take_an_exit_for_stacks() {
    let mut rig = optimizing();
    let mut returning = spec("r filler_000");
    returning.actions.capture_at_return = vec![Item::StackTrace(8)];
    let id = rig.register(&[returning])[0];
    let why = rig.info(id).unoptimized.expect("not optimized");
    let what = "records the kernel's stack";
    assert_eq!(why, Unoptimized::Synchronous { probe: id, what });
}

#[test]
fn a_stack_that_is_not_the_tasks_own_is_followed_by_the_host() {
    let mut rig = optimizing();
    let id = rig.register(&[stacks("p filler_000")])[0];
    let table = rig.guest.table();
    let (_, site) = table.at(rig.addr(id)).expect("armed");
    let detour = site.detour.clone().expect("a detour");
    let escape = detour.escape().expect("there are other stacks");
    let mut cpu = Cpu::new(&rig);
    let stack = cpu.regs.rsp;
    let caller = rig.at("filler_001", 8);
    rig.guest.write(Gva(stack), &caller.0.to_le_bytes());
    rig.guest.write(Gva(stack + 8), &[0; 8]);
    assert_eq!(cpu.hit(escape), RESUME);
    assert_eq!(cpu.regs.rip, detour.tail().0);
    let events = cpu.events();
    assert_eq!(events[0].probe, id);
    let (_, halves) = events[0].captured.bytes().split_at(TextHeader::SIZE);
    let low = |at: Gva| at.0.to_le_bytes()[..4].to_vec();
    assert_eq!(halves, [low(rig.addr(id)), low(caller)].concat());
}

#[test]
fn an_explanation_says_what_has_to_be_so() {
    let rig = optimizing();
    let said = explain(&rig.guest.image, &stacks("p filler_000")).remove(0);
    let said = said.expect("it can be probed");
    assert_eq!(said.exit, None);
    let needed = |what: &&str| what.contains("no return probe");
    assert!(said.provided.iter().any(needed), "{:?}", said.provided);
    let said = explain(&rig.guest.image, &spec("p filler_000")).remove(0);
    let provided = said.expect("it can be probed").provided;
    assert!(!provided.iter().any(needed), "{provided:?}");
}
