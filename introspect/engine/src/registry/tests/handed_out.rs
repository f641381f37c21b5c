//! Allocations are released, even after many repetitions.

use hvprobe_arch::detour::Header;

use super::*;

#[test]
fn return_probes_come_and_go_without_end() {
    /// Twice the number of probes for which there is room: each has 4096 stubs of 16 bytes, in 4 MiB of code. A
    /// call's number comes from the place of its stub.
    const TIMES: u32 = 2 * (4 << 20) / (4096 * 16);
    let mut rig = Rig::optimizing();
    for time in 0..TIMES {
        let id = rig.one("r4096 filler_000");
        assert_eq!(rig.info(id).unoptimized, None, "{time}");
        rig.unregister(&[id]).unwrap();
    }
}

#[test]
fn numbers_of_records_come_again_after_all_others_and_never_twice_at_a_time() {
    let mut rig = Rig::optimizing();
    let number = |rig: &Rig, id| {
        let source = rig.registry.code.sources.get(id).expect("it is optimized");
        source.number()
    };
    let stays = rig.one("r2 filler_000");
    let leaves = rig.one("r2 filler_002");
    assert_eq!([stays, leaves].map(|id| number(&rig, id)), [0, 1]);
    // Calls in flight may still return there.
    rig.unregister(&[leaves]).unwrap();
    assert_eq!(rig.registry.code.ghost_sources.len(), 1);
    rig.registry.code.next_number = Header::SOURCES - 2;
    let numbers = [4, 6, 8, 10].map(|n| {
        let id = rig.one(&format!("r2 filler_{n:03}"));
        assert_eq!(rig.info(id).unoptimized, None);
        number(&rig, id)
    });
    assert_eq!(numbers, [Header::SOURCES - 2, Header::SOURCES - 1, 2, 3]);
}

#[test]
fn calls_of_a_place_that_was_given_back_are_called_like_none_before() {
    let mut rig = Rig::optimizing();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let id = rig.one("r4096 filler_000");
        let source = rig.registry.code.sources.get(id).expect("it is optimized");
        let calls = source.followed().expect("a return probe's");
        let generation = calls
            .at
            .wrapping_add(hvprobe_arch::detour::InstanceLayout::GENERATION);
        let used = hvprobe_arch::mem::PhysMemory::read_u64(&rig.guest.mem, generation).unwrap();
        assert!(seen.insert((calls.stubs, used >> 24)));
        rig.unregister(&[id]).unwrap();
    }
    let places: std::collections::BTreeSet<_> = seen.iter().map(|(at, _)| *at).collect();
    assert!(places.len() < seen.len(), "no place came again");
}
