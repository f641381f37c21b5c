//! Disabling and enabling registered probes.

use super::*;

#[test]
fn disabling_the_last_enabled_probe_removes_the_patch_and_enabling_one_puts_it_back() {
    let mut rig = Rig::live();
    let original = rig.guest.mem.visible();
    let ids = rig.register(&specs([EMULATED; 3]));
    let at = rig.addr(ids[0]);
    rig.disable(&ids[..2]).unwrap();
    assert_eq!(rig.byte(at), INT3);
    rig.disable(&ids[2..]).unwrap();
    assert!(rig.guest.mem.visible() == original);
    assert_eq!(rig.state(ids[0]), ProbeState::Placed);
    assert!(rig.list().iter().all(|info| info.disabled));
    rig.enable(&ids[1..2]).unwrap();
    assert_eq!(rig.byte(at), INT3);
    let disabled: Vec<_> = rig.list().iter().map(|info| info.disabled).collect();
    assert_eq!(disabled, [true, false, true]);
}

#[test]
fn probe_registered_disabled_plants_nothing_until_it_is_enabled() {
    let mut rig = Rig::with_gate();
    let id = rig.changes_nothing_in_memory(|rig| rig.register(&[disabled(BOOSTED)])[0]);
    assert_eq!(rig.state(id), ProbeState::Placed);
    rig.enable(&[id]).unwrap();
    assert_eq!(rig.byte(rig.addr(id)), INT3);
}

#[test]
fn disabled_probe_is_unregistered_without_a_trace() {
    let mut rig = Rig::live();
    let before = rig.guest.mem.visible();
    let id = rig.register(&[post(BOOSTED)])[0];
    rig.disable(&[id]).unwrap();
    rig.unregister(&[id]).unwrap();
    assert!(rig.guest.mem.visible() == before);
}

#[test]
fn batches_cost_one_stop_however_often_a_probe_is_named() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([EMULATED, BOOSTED, "p vfs_read"]));
    let thrice = ids.repeat(3);
    assert_eq!(rig.stops_of(|rig| rig.disable(&thrice).unwrap()), 1);
    assert!(rig.list().iter().all(|info| info.disabled));
    assert_eq!(rig.stops_of(|rig| rig.enable(&thrice).unwrap()), 1);
    assert!(rig.list().iter().all(|info| !info.disabled));
}

#[test]
fn probe_that_cannot_be_armed_is_named_and_the_whole_batch_stays_disabled() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        disabled(EMULATED),
        // At the address that fails, but not to be enabled.
        disabled("p:bystander filler_003"),
        disabled("p:culprit filler_003"),
        disabled(BOOSTED),
    ]);
    let at = rig.addr(ids[2]);
    // The text changes only after it was checked, just before the stop.
    let changed = at.wrapping_add(3);
    rig.guest
        .meanwhile(move |guest| guest.write(changed, &[0x10]));
    let asked = [ids[0], ids[2], ids[3], ids[0]];
    let before = rig.visible();
    let result = rig.enable(&asked);
    rig.guest.write(changed, &[0x08]);
    assert!(rig.visible() == before);
    assert!(rig.list().iter().all(|info| info.disabled));
    let source = Refused::TextChanged { at };
    assert_eq!(result, Err(ChangeError::Refused { id: ids[2], source }));
}

#[test]
fn probes_are_enabled_and_disabled_while_the_guest_boots_without_a_stop() {
    let mut rig = Rig::booting();
    let ids = rig.register(&[spec(EMULATED), disabled(BOOSTED)]);
    rig.disable(&ids[..1]).unwrap();
    rig.enable(&ids[1..]).unwrap();
    assert_eq!(rig.guest.stops(), 0);
    assert_eq!(rig.go_live(None), []);
    assert_eq!(rig.byte(rig.addr(ids[0])), 0x55);
    assert_eq!(rig.byte(rig.addr(ids[1])), INT3);
}
