//! Registering and unregistering batches: whole or not at all, in one stop.

use super::*;
use crate::world::StopError;

const BATCH: [&str; 5] = [
    EMULATED,
    BOOSTED,
    "p vfs_read",
    "p vfs_read+0xd",
    "p filler_003",
];

#[test]
fn batch_is_planted_in_one_stop() {
    let mut rig = Rig::live();
    let mut ids = Vec::new();
    assert_eq!(rig.stops_of(|rig| ids = rig.register(&specs(BATCH))), 1);
    for id in &ids {
        assert_eq!(rig.byte(rig.addr(*id)), INT3);
        assert_eq!(rig.state(*id), ProbeState::Placed);
    }
}

#[test]
fn batch_is_unregistered_in_one_stop_and_every_byte_is_back() {
    let mut rig = Rig::live();
    let before = rig.visible();
    let ids = rig.register(&specs(BATCH));
    assert_eq!(rig.stops_of(|rig| rig.unregister(&ids).unwrap()), 1);
    assert!(rig.visible() == before);
    assert!(rig.list().is_empty());
}

#[test]
fn illegal_probe_at_any_index_is_named_before_anything_is_stopped() {
    for bad in 0..BATCH.len() {
        let mut rig = Rig::live();
        let mut batch = specs(BATCH);
        batch[bad] = spec("p vfs_read+0x13");
        let stops = rig.guest.stops();
        let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
        assert_eq!(index, bad);
        assert!(matches!(why, Refused::Instruction { .. }), "{why}");
        assert_eq!(rig.guest.stops(), stops);
    }
}

#[test]
fn text_changed_between_check_and_stop_is_named_and_the_batch_rolled_back() {
    // Offset of the last byte of each instruction. Except for the first instruction, it is not the byte that is
    // written.
    let last = [0, 3, 4, 3, 3];
    for bad in 0..BATCH.len() {
        let mut rig = Rig::with_gate();
        let probe = rig.one(BATCH[bad]);
        let at = rig.addr(probe);
        rig.unregister(&[probe]).unwrap();
        let changed = at.wrapping_add(last[bad]);
        rig.guest
            .meanwhile(move |guest| guest.write(changed, &[0x99]));
        let was = rig.byte(changed);
        let before = rig.visible();
        let (index, why) = refusal(rig.try_register(&specs(BATCH)));
        assert_eq!((index, why), (bad, Refused::TextChanged { at }));
        assert_eq!(rig.byte(changed), 0x99);
        rig.guest.write(changed, &[was]);
        assert!(rig.visible() == before);
        assert!(rig.list().is_empty());
    }
}

#[test]
fn whichever_write_fails_nothing_is_left_behind() {
    // One of the probes is stepped.
    let batch = || [specs(BATCH), vec![post("p filler_005")]].concat();
    let mut succeeded = None;
    for failing in 0..300 {
        let mut rig = Rig::with_gate();
        let before = (rig.guest.mem.visible(), rig.guest.table());
        rig.guest.mem.fail_after(failing);
        if rig.try_register(&batch()).is_ok() {
            succeeded = Some(failing);
            break;
        }
        assert!(rig.guest.mem.visible() == before.0, "write {failing}");
        assert!(std::sync::Arc::ptr_eq(&rig.guest.table(), &before.1));
        assert!(rig.list().is_empty());
        // Registration succeeds once memory works again.
        rig.register(&batch());
    }
    // The region's table and its entry, the page of code, its entry, 256 stubs and the trampoline, the
    // window's table and its entry, a page of slots and its entry, four slots, the gate, six int3s and five
    // of the engine's own.
    assert_eq!(succeeded, Some(2 + 2 + 256 + 1 + 2 + 2 + 4 + 1 + 11));
}

#[test]
fn probes_registered_before_survive_a_failed_batch() {
    let mut rig = Rig::live();
    let first = rig.register(&[spec(EMULATED), disabled("p filler_001")]);
    let mut batch = specs(BATCH);
    batch.push(spec("p nobody"));
    let (index, _) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
    assert_eq!(index, BATCH.len());
    assert_eq!(rig.byte(rig.addr(first[0])), INT3);
    let next = rig.one("p filler_004");
    assert!(first.iter().all(|id| *id < next));
}

#[test]
fn ten_probes_at_one_address_share_one_patch_until_the_last_leaves() {
    let mut rig = Rig::live();
    let before = rig.visible();
    let ids = rig.register(&specs([BOOSTED; 10]));
    let planted = rig.visible();
    for id in &ids[..9] {
        rig.unregister(&[*id]).unwrap();
        assert!(rig.visible() == planted);
    }
    rig.unregister(&ids[9..]).unwrap();
    assert!(rig.visible() == before);
}

#[test]
fn unknown_or_repeated_id_is_named_and_nothing_is_unregistered() {
    let mut rig = Rig::live();
    let a = rig.one(EMULATED);
    let b = rig.one(BOOSTED);
    let nobody = ProbeId(99);
    for (ids, id, index) in [
        (vec![a, b, nobody], nobody, 2),
        (vec![a, b, a], a, 2),
        (vec![nobody, a], nobody, 0),
    ] {
        let result = rig.changes_nothing(|rig| rig.unregister(&ids));
        assert_eq!(result, Err(ChangeError::NoSuchProbe { id, index }));
    }
    for enabled in [true, false] {
        let result =
            rig.changes_nothing(|rig| rig.registry.set_enabled(&[a, nobody], enabled, &*rig.guest));
        let index = 1;
        assert_eq!(result, Err(ChangeError::NoSuchProbe { id: nobody, index }));
    }
}

#[test]
fn nothing_changes_when_the_guest_does_not_stop() {
    let mut rig = Rig::with_gate();
    let ids = rig.register(&[spec(EMULATED), disabled(BOOSTED)]);
    rig.guest.refuse_stops(true);
    let stop = StopError::Unresponsive {
        vcpu: 1,
        waited: std::time::Duration::from_secs(10),
    };
    let result = rig.changes_nothing(|rig| rig.try_register(&specs(["p filler_003"])));
    assert_eq!(result, Err(RegisterError::Stop(stop)));
    let refused = Err(ChangeError::Stop(stop));
    assert_eq!(rig.changes_nothing(|rig| rig.unregister(&ids)), refused);
    assert_eq!(rig.changes_nothing(|rig| rig.enable(&ids)), refused);
    assert_eq!(rig.changes_nothing(|rig| rig.disable(&ids)), refused);
    rig.guest.refuse_stops(false);
    rig.unregister(&ids).unwrap();
}
