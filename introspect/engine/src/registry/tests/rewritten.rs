//! The guest changes text under a probe.

use super::*;

#[test]
fn probe_whose_int3_the_guest_replaced_is_gone_and_its_text_never_written_again() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    rig.guest.write(at, &[0x90]);
    assert_eq!(rig.state(id), ProbeState::Gone);
    rig.disable(&[id]).unwrap();
    assert_eq!((rig.byte(at), rig.state(id)), (0x90, ProbeState::Gone));
    let source = Refused::Rewritten { at };
    let result = rig.changes_nothing(|rig| rig.enable(&[id]));
    assert_eq!(result, Err(ChangeError::Refused { id, source }));
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.byte(at), 0x90);
}

#[test]
fn watching_reports_what_the_guest_rewrote_for_good_and_stops_nobody() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec(EMULATED), disabled(BOOSTED), spec("p filler_003")]);
    let [armed, idle, other] = [0, 1, 2].map(|n| rig.addr(ids[n]));
    rig.guest.write(armed, &[0x90]);
    rig.guest.write(idle, &[0x90]);
    let stops = rig.guest.stops();
    let before = rig.guest.mem.snapshot();
    rig.registry.check_text(&*rig.guest);
    assert_eq!(rig.guest.stops(), stops);
    assert!(rig.guest.mem.snapshot() == before);
    // The states stay, even if the guest writes there again.
    rig.guest.write(armed, &[INT3]);
    rig.guest.write(idle, &[0x48]);
    rig.registry.check_text(&*rig.guest);
    let states: Vec<_> = ids.iter().map(|id| rig.state(*id)).collect();
    let gone = ProbeState::Gone;
    assert_eq!(states, [gone.clone(), gone, ProbeState::Placed]);
    for (id, at) in [(ids[0], armed), (ids[1], idle)] {
        let source = Refused::Rewritten { at };
        assert_eq!(rig.enable(&[id]), Err(ChangeError::Refused { id, source }));
    }
    assert_eq!(rig.byte(other), INT3);
}

#[test]
fn place_the_guest_rewrote_takes_no_further_probe_until_it_is_free() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    rig.guest.write(at, &[0x90]);
    let rewritten = (0, Refused::Rewritten { at });
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec(BOOSTED)]));
    assert_eq!(refusal(result), rewritten);
    rig.disable(&[id]).unwrap();
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec(BOOSTED)]));
    assert_eq!(refusal(result), rewritten);
    rig.unregister(&[id]).unwrap();
    // The instruction is now the one that the guest wrote.
    let id = rig.one(BOOSTED);
    assert_eq!(rig.byte(at), INT3);
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.byte(at), 0x90);
}

#[test]
fn disabled_probe_is_gone_while_its_text_is_not_what_it_was() {
    let mut rig = Rig::live();
    let id = rig.register(&[disabled("p vfs_read")])[0];
    let at = rig.addr(id);
    let nop = rig.guest.read::<5>(at);
    rig.guest.write(at, &[0xe8, 1, 2, 3, 4]);
    assert_eq!(rig.state(id), ProbeState::Gone);
    let source = Refused::Rewritten { at };
    let result = rig.changes_nothing(|rig| rig.enable(&[id]));
    assert_eq!(result, Err(ChangeError::Refused { id, source }));
    rig.guest.write(at, &nop);
    assert_eq!(rig.state(id), ProbeState::Placed);
    rig.enable(&[id]).unwrap();
    assert_eq!(rig.byte(at), INT3);
}

#[test]
fn other_probes_are_not_affected() {
    let mut rig = Rig::live();
    let before = rig.visible();
    let ids = rig.register(&specs([EMULATED, BOOSTED]));
    let at = rig.addr(ids[0]);
    rig.guest.write(at, &[0x90]);
    assert_eq!(rig.state(ids[1]), ProbeState::Placed);
    rig.registry.unregister_all(&*rig.guest).unwrap();
    rig.guest.write(at, &[0x55]);
    assert!(rig.visible() == before);
}
