//! Function entries that both the engine and the guest's ftrace patch.

use hvprobe_spec::Decision;

use super::*;
use crate::testing::regs;

const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
const CALL: [u8; 5] = [0xe8, 1, 2, 3, 4];
const BEGIN: &str = "ftrace_arch_code_modify_prepare";
const END: &str = "ftrace_arch_code_modify_post_process";

/// Lets the guest's ftrace patch: enters the function that it calls before, runs `act`, and enters the function
/// that it calls afterwards.
fn patch(rig: &mut Rig, act: impl FnOnce(&mut Rig)) {
    let mut cpu = Cpu::new(rig);
    let begins = rig.at(BEGIN, 0);
    run_hooks(rig, cpu.hit(begins));
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs.rip, begins.0 + 1);
    act(rig);
    cpu.regs = regs();
    let ends = rig.at(END, 0);
    run_hooks(rig, cpu.hit(ends));
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs.rip, ends.0 + 1);
    assert!(cpu.events().is_empty());
}

/// Returns whether the engine watches ftrace.
fn watches(rig: &Rig) -> bool {
    let bytes = [BEGIN, END].map(|name| rig.byte(rig.at(name, 0)));
    assert_eq!(bytes[0], bytes[1]);
    bytes[0] == INT3
}

#[test]
fn ftrace_is_watched_while_one_of_its_sites_is_probed() {
    let mut rig = Rig::live();
    let other = rig.one(EMULATED);
    assert!(!watches(&rig));
    let id = rig.register(&[disabled("p vfs_read")])[0];
    assert!(watches(&rig));
    rig.unregister(&[id]).unwrap();
    assert!(!watches(&rig));
    assert_eq!(rig.byte(rig.addr(other)), INT3);
}

#[test]
fn ftrace_finds_its_sites_as_it_left_them_and_the_probes_come_back_after_it() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs(["p vfs_read", "p vfs_read+9"]));
    let at = rig.addr(ids[0]);
    patch(&mut rig, |rig| {
        assert_eq!(rig.guest.read(at), NOP);
        // Other probes stay armed.
        assert_eq!(rig.byte(at.wrapping_add(5)), INT3);
    });
    assert_eq!(rig.byte(at), INT3);
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(at), RESUME);
    assert_eq!(rig.counts(ids[0]).hits, 1);
}

#[test]
fn whatever_ftrace_takes_and_gives_back_costs_a_stop_before_and_one_after() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs(["p vfs_read", EMULATED]));
    let at = rig.addr(ids[0]);
    for bytes in [CALL, NOP] {
        let mut after = 0;
        let all = rig.stops_of(|rig| {
            patch(rig, |rig| {
                rig.guest.write(at, &bytes);
                after = rig.guest.stops();
            });
            after = rig.guest.stops() - after;
        });
        assert_eq!((all, after), (2, 1), "{bytes:x?}");
    }
    assert_eq!(rig.byte(at), INT3);
}

#[test]
fn site_that_ftrace_took_is_left_to_it_until_it_gives_it_back() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read");
    let at = rig.addr(id);
    patch(&mut rig, |rig| rig.guest.write(at, &CALL));
    assert_eq!(rig.guest.read(at), CALL);
    rig.registry.check_text(&*rig.guest);
    // Nothing that the user does meanwhile changes the site.
    let other = rig.one(EMULATED);
    rig.disable(&[other]).unwrap();
    let result = rig.try_register(&[spec("p vfs_read")]);
    assert!(matches!(
        refusal(result).1,
        Refused::FtraceInUse { .. } | Refused::Rewritten { .. }
    ));
    assert_eq!(rig.guest.read(at), CALL);
    patch(&mut rig, |rig| {
        assert_eq!(rig.guest.read(at), CALL);
        rig.guest.write(at, &NOP);
    });
    assert_eq!(rig.byte(at), INT3);
    assert_eq!(rig.state(id), ProbeState::Placed);
    rig.unregister(&[id, other]).unwrap();
    assert_eq!(rig.guest.read(at), NOP);
    assert!(!watches(&rig));
}

#[test]
fn probe_that_leaves_while_ftrace_has_its_site_leaves_the_call() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read");
    let at = rig.addr(id);
    patch(&mut rig, |rig| rig.guest.write(at, &CALL));
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.guest.read(at), CALL);
    assert!(!watches(&rig));
}
