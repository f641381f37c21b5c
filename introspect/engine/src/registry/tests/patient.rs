//! Long looks: nothing waits for a look through much memory.

use super::*;
use crate::unoptimized::Unoptimized;

/// A probe that takes much of the room for instances.
const MANY: &str = "r4096 vfs_read";

fn why(rig: &Rig, id: ProbeId) -> Option<Unoptimized> {
    rig.info(id).unoptimized
}

#[test]
fn room_that_was_left_is_found_again_though_no_change_may_look_for_it() {
    let mut rig = Rig::optimizing();
    // The effect is as if the guest had more memory than a change may scan.
    rig.guest.forget_writes(true);
    let mut id = rig.one(MANY);
    for _ in 0..100 {
        if why(&rig, id).is_some() {
            break;
        }
        rig.unregister(&[id]).unwrap();
        id = rig.one(MANY);
    }
    assert_eq!(why(&rig, id), Some(Unoptimized::NoRoom));
    for _ in 0..8 {
        rig.registry.retry_jumps(&*rig.guest);
    }
    assert_eq!(why(&rig, id), Some(Unoptimized::NoRoom));
    rig.guest.forget_writes(false);
    for _ in 0..64 {
        rig.registry.retry_jumps(&*rig.guest);
    }
    assert_eq!(why(&rig, id), None);
}

#[test]
fn a_look_is_in_vain_when_something_is_changed_before_it_ends() {
    let mut rig = Rig::optimizing();
    let at = rig.at("vfs_read", 9);
    // A task is in the middle of the instructions that the jump would displace.
    rig.guest.stand(&[standing(at.wrapping_add(4), Gva(0))]);
    let id = rig.one("p vfs_read+9");
    assert_eq!(why(&rig, id), Some(Unoptimized::Interrupted));
    rig.guest.stand(&[]);
    for is_changed in [true, false] {
        let retry = rig.next_retry();
        let guest = Rc::clone(&rig.guest);
        let looked = retry.look(&*guest);
        if is_changed {
            // This registration cannot start a look of its own meanwhile.
            rig.one("p:other filler_000");
        }
        rig.registry.end_retry(looked, &*guest);
        let expected = is_changed.then_some(Unoptimized::Interrupted);
        assert_eq!(why(&rig, id), expected);
    }
}

#[test]
fn room_is_given_back_though_probes_come_and_go_while_it_is_looked_for() {
    let mut rig = Rig::optimizing();
    rig.guest.forget_writes(true);
    let mut id = rig.one(MANY);
    while why(&rig, id).is_none() {
        rig.unregister(&[id]).unwrap();
        id = rig.one(MANY);
    }
    let full = rig.registry.usage();
    let retry = rig.next_retry();
    rig.guest.forget_writes(false);
    let guest = Rc::clone(&rig.guest);
    let looked = retry.look(&*guest);
    // None of these changes can start a look of its own meanwhile.
    let other = rig.one("p:other filler_000");
    rig.unregister(&[other]).unwrap();
    rig.registry.end_retry(looked, &*guest);
    let usage = rig.registry.usage();
    assert!(
        usage.instances < full.instances / 2,
        "{usage:?} of {full:?}"
    );
    assert!(
        usage.left_behind < full.left_behind,
        "{usage:?} of {full:?}"
    );
    for _ in 0..4 {
        rig.registry.retry_jumps(&*guest);
    }
    assert_eq!(why(&rig, id), None);
}
