//! Probes registered before the kernel's text is final.

use hvprobe_arch::insn::Refusal;

use super::*;
use crate::registered::PROBES_MAX;

#[test]
fn probes_of_a_booting_guest_wait_and_are_planted_in_one_stop() {
    let mut rig = Rig::booting();
    let mut ids = Vec::new();
    let registering = rig.changes_nothing_in_memory(|rig| {
        rig.stops_of(|rig| ids = rig.register(&specs([EMULATED, BOOSTED, "p vfs_read"])))
    });
    assert_eq!(registering, 0);
    for info in rig.list() {
        assert_eq!((info.state, info.addr), (ProbeState::Pending, None));
    }
    assert_eq!(rig.stops_of(|rig| assert_eq!(rig.go_live(None), [])), 1);
    for id in ids {
        assert_eq!(rig.state(id), ProbeState::Placed);
        assert_eq!(rig.byte(rig.addr(id)), INT3);
    }
}

#[test]
fn what_is_illegal_by_the_image_is_refused_at_once() {
    let mut rig = Rig::booting();
    let batch = specs([EMULATED, "p vfs_read+5"]);
    let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
    assert_eq!(index, 1);
    assert!(matches!(why, Refused::Boundary(_)), "{why}");
}

#[test]
fn pending_probe_that_turned_out_impossible_is_refused_and_the_others_are_planted() {
    let mut rig = Rig::booting();
    let ids = rig.register(&specs([EMULATED, BOOSTED, "p vfs_read+9"]));
    // Boot-time patching writes a `hlt` there.
    rig.guest.write(rig.at("filler_001", 0), &[0xf4]);
    let stops = rig.guest.stops();
    let why = Refused::Instruction {
        at: rig.at("filler_001", 0),
        why: Refusal::Halt,
    };
    assert_eq!(rig.go_live(None), [(ids[1], why.clone())]);
    assert_eq!(rig.guest.stops() - stops, 1);
    assert_eq!(rig.state(ids[1]), ProbeState::Refused(why.to_string()));
    for id in [ids[0], ids[2]] {
        assert_eq!(rig.byte(rig.addr(id)), INT3);
    }
    // The refused probe is still registered, stays refused, and can be unregistered.
    rig.disable(&ids).unwrap();
    rig.enable(&ids).unwrap();
    assert_eq!(rig.byte(rig.at("filler_001", 0)), 0xf4);
    rig.unregister(&ids).unwrap();
    assert!(rig.list().is_empty());
}

#[test]
fn text_that_changes_until_the_stop_refuses_all_probes_there_still_in_one_stop() {
    let mut rig = Rig::booting();
    let ids = rig.register(&specs([BOOSTED, EMULATED, BOOSTED, "p vfs_read"]));
    let at = rig.at("filler_001", 0);
    rig.guest
        .meanwhile(move |guest| guest.write(at.wrapping_add(3), &[0x10]));
    let why = Refused::TextChanged { at };
    let mut refused = Vec::new();
    assert_eq!(rig.stops_of(|rig| refused = rig.go_live(None)), 1);
    assert_eq!(refused, [(ids[0], why.clone()), (ids[2], why.clone())]);
    assert_eq!(rig.byte(at), 0x48);
    assert_eq!(rig.byte(rig.addr(ids[1])), INT3);
    assert_eq!(rig.byte(rig.addr(ids[3])), INT3);
    assert_eq!(rig.state(ids[0]), ProbeState::Refused(why.to_string()));
}

#[test]
fn nothing_can_be_planted_when_the_breakpoint_entry_has_changed() {
    let mut rig = Rig::booting();
    let gate = rig.gate();
    let ids = rig.register(&[spec(EMULATED), spec(BOOSTED), disabled("p vfs_read")]);
    rig.guest.write(gate.at(), &[0x0f, 0x01, 0xca]);
    let refused = rig.changes_nothing_in_memory(|rig| rig.go_live(Some(gate)));
    let why = Refused::TextChanged { at: gate.at() };
    assert_eq!(refused, [(ids[0], why.clone()), (ids[1], why)]);
    assert_eq!(rig.state(ids[2]), ProbeState::Placed);
}

#[test]
fn guest_that_does_not_stop_leaves_everything_pending() {
    let mut rig = Rig::booting();
    let ids = rig.register(&specs([EMULATED, BOOSTED]));
    rig.guest.refuse_stops(true);
    let view = rig.guest.view();
    rig.changes_nothing(|rig| {
        rig.registry
            .go_live(view, None, &*rig.guest)
            .expect_err("it does not stop")
    });
    let late = rig.one("p vfs_read");
    assert_eq!(rig.state(late), ProbeState::Pending);
    rig.guest.refuse_stops(false);
    assert_eq!(rig.go_live(None), []);
    for id in [ids[0], ids[1], late] {
        assert_eq!(rig.byte(rig.addr(id)), INT3);
    }
}

#[test]
fn pending_probes_are_unregistered_without_a_stop() {
    let mut rig = Rig::booting();
    let ids = rig.register(&specs([EMULATED, BOOSTED]));
    rig.unregister(&ids[..1]).unwrap();
    assert_eq!(rig.guest.stops(), 0);
    rig.go_live(None);
    assert_eq!(rig.byte(rig.at("filler_000", 0)), 0x55);
    assert_eq!(rig.byte(rig.at("filler_001", 0)), INT3);
}

#[test]
fn a_machine_has_no_more_probes_than_it_may() {
    for (room, max) in [(3, 3), (usize::MAX, PROBES_MAX)] {
        let mut rig = Rig::booting();
        rig.registry = rig.registry.with_room(room);
        let ids = rig.register(&vec![spec(EMULATED); max]);
        let (_, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&[spec(BOOSTED)])));
        assert_eq!(why, Refused::TooManyProbes { there: max, max });
        rig.registry.unregister(&ids[..1], &*rig.guest).unwrap();
        rig.register(&[spec(BOOSTED)]);
    }
}
