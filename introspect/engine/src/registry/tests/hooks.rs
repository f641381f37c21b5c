//! Several hooks of the engine's at one function.

use hvprobe_fixtures::STACK;
use hvprobe_hit::table::Internal;

use super::*;
use crate::testing::regs;

const DEAD: &str = "do_task_dead";
const FIRST: HookSet = HookSet(1 << 30);
const SECOND: HookSet = HookSet(1 << 31);

/// Watches [`DEAD`] for one hook more.
fn watch(rig: &mut Rig, told: HookSet) {
    let internal = Internal {
        told,
        ..Internal::default()
    };
    let (registry, guest) = (&mut rig.registry, &*rig.guest);
    registry.hook(DEAD, internal, false, &guest.mem);
    registry.commit(guest).expect("the guest stops");
}

#[test]
fn hooks_at_one_function_are_all_told_and_what_is_done_at_once_is_done() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec("r filler_000")]);
    let id = ids[0];
    watch(&mut rig, FIRST);
    watch(&mut rig, SECOND);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = STACK.0;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    cpu.regs = Regs { rdi: 7, ..regs() };
    let at = rig.at(DEAD, 0);
    let (hooks, argument) = told(cpu.hit(at));
    assert_eq!(hooks, HookSet(FIRST.0 | SECOND.0));
    assert_eq!(argument, Gva(7));
    assert_eq!(rig.counts(id).orphans, 1, "the hook that was there before");
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs.rip, at.0 + 1);
}
