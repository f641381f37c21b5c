//! Probes of a batch that turn out to be impossible only while the virtual CPUs are stopped.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_fixtures::{MODULE_FRAMES, work};

use super::*;
use crate::registered::{Refusals, Registered};
use crate::testing::SLOTS;
use crate::unoptimized::Unoptimized;
use crate::world::StopError;

/// Number of fillers in the fixture. Each begins with several instructions, one of which begins at byte three
/// or four.
const FILLERS: usize = 600;

fn filler(n: usize) -> String {
    format!("p filler_{n:03}")
}

/// Returns a probe that requires a jump.
fn forced(definition: &str) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(Mechanism::Optimized),
        ..spec(definition)
    }
}

/// Writes addresses into the guest's memory as if tasks were interrupted under the jumps that these fillers would
/// get.
fn interrupted(rig: &Rig, fillers: impl IntoIterator<Item = usize>) {
    for (word, n) in (0..).zip(fillers) {
        // `push rbp; mov rbp, rsp; nop`, and `mov rax, [rdi+8]; push rbp`.
        let inside = rig.at(&format!("filler_{n:03}"), 4);
        rig.guest
            .mem
            .write_u64(MODULE_FRAMES.wrapping_add(8 * word), inside.0)
            .expect("in memory");
    }
}

impl Rig {
    fn skipping(&mut self, specs: &[ProbeSpec]) -> Result<Registered, RegisterError> {
        self.registry
            .register_batch(specs, Refusals::Skip, &*self.guest)
    }
}

fn positions(done: &Registered) -> (Vec<usize>, Vec<usize>) {
    let probes = done.probes.iter().map(|(index, _)| *index).collect();
    let skipped = done.skipped.iter().map(|skipped| skipped.index).collect();
    (probes, skipped)
}

#[test]
fn probes_refused_in_the_stop_are_left_out_in_that_stop() {
    let mut rig = Rig::optimizing();
    interrupted(&rig, [1, 3, 4]);
    let specs: Vec<_> = (0..6).map(|n| forced(&filler(n))).collect();
    let before = rig.visible();
    let mut done = Registered::default();
    let stops = rig.stops_of(|rig| done = rig.skipping(&specs).unwrap());
    assert_eq!(stops, 1);
    assert_eq!(positions(&done), (vec![0, 2, 5], vec![1, 3, 4]));
    for skipped in &done.skipped {
        let source = Unoptimized::Interrupted;
        let at = rig.at(&skipped.target, 0);
        assert_eq!(skipped.why, Refused::Unoptimized { at, source });
        assert_eq!(rig.byte(at), before_byte(&rig, at));
    }
    assert_eq!(rig.list().len(), 3);
    for id in done.ids() {
        assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    }
    rig.unregister(&done.ids()).unwrap();
    assert!(same_text(&rig, &before));
}

/// Returns the image's byte at `at`.
fn before_byte(rig: &Rig, at: Gva) -> u8 {
    rig.guest.image.bytes_at(at, 1).expect("text")[0]
}

/// Returns whether the guest sees the same memory as `before`, except the page-table entries of the detours.
fn same_text(rig: &Rig, before: &[u8]) -> bool {
    let after = rig.visible();
    let pairs = after.iter().zip(before);
    pairs.clone().all(|(now, then)| now == then || *then == 0)
}

#[test]
fn one_probe_refused_in_the_stop_keeps_the_batch_back_in_that_stop() {
    let mut rig = Rig::optimizing();
    interrupted(&rig, [3]);
    let specs: Vec<_> = (0..6).map(|n| forced(&filler(n))).collect();
    let before = rig.visible();
    // Any later stop to remove something would fail.
    rig.guest.meanwhile(|guest| guest.refuse_stops(true));
    let mut result = Ok(Vec::new());
    let stops = rig.stops_of(|rig| result = rig.try_register(&specs));
    let (index, why) = refusal(result);
    assert_eq!(index, 3);
    assert!(matches!(why, Refused::Unoptimized { .. }), "{why}");
    assert_eq!(stops, 1);
    assert!(rig.list().is_empty());
    assert!(same_text(&rig, &before));
    assert!(rig.guest.table().is_empty());
}

#[test]
fn a_guest_that_stops_no_second_time_keeps_what_was_planted_and_nothing_else() {
    let mut rig = Rig::optimizing();
    interrupted(&rig, [1, 3]);
    rig.guest.meanwhile(|guest| guest.refuse_stops(true));
    let specs: Vec<_> = (0..4).map(|n| forced(&filler(n))).collect();
    let done = rig.skipping(&specs).unwrap();
    assert_eq!(positions(&done), (vec![0, 2], vec![1, 3]));
    assert_eq!(rig.list().len(), 2);
    assert_eq!(rig.byte(rig.at("filler_001", 0)), 0x48);
}

#[test]
fn an_error_in_the_stop_leaves_nothing_planted() {
    for refusals in [Refusals::Skip, Refusals::Fail] {
        let mut rig = Rig::optimizing();
        let old = rig.one("p filler_101");
        let at = rig.addr(old);
        // The old probe's jump has to be removed for a probe under it, and cannot be.
        rig.guest
            .meanwhile(move |guest| guest.write(at.wrapping_add(2), &[0x99]));
        let specs = [spec("p filler_000"), spec("p filler_101+4"), spec(BOOSTED)];
        let before = rig.list();
        let text = rig.visible();
        let result = rig.registry.register_batch(&specs, refusals, &*rig.guest);
        assert!(result.is_err(), "{result:?}");
        assert_eq!(rig.list().len(), before.len());
        for name in ["filler_000", "filler_001"] {
            assert_ne!(rig.byte(rig.at(name, 0)), INT3);
            assert_ne!(rig.byte(rig.at(name, 0)), 0xe9);
        }
        assert_eq!(
            rig.byte(rig.at("filler_101", 4)),
            text_byte(&rig, &text, "filler_101", 4)
        );
    }
}

fn text_byte(rig: &Rig, text: &[u8], symbol: &str, offset: u64) -> u8 {
    let start = rig.at("_stext", 0);
    let offset = rig.at(symbol, offset).offset_from(start).expect("text");
    text[usize::try_from(0x2_0000 + offset).expect("small")]
}

#[test]
fn probes_that_cannot_be_stopped_for_leave_nothing_behind() {
    let mut rig = Rig::optimizing();
    let specs: Vec<_> = (0..50).map(|n| forced(&filler(n))).collect();
    rig.guest.refuse_stops(true);
    for _ in 0..300 {
        let result = rig.skipping(&specs);
        let stop = StopError::Unresponsive {
            vcpu: 1,
            waited: std::time::Duration::from_secs(10),
        };
        assert_eq!(result, Err(RegisterError::Stop(stop)));
    }
    rig.guest.refuse_stops(false);
    // Probes refused in the stop leave nothing behind either.
    interrupted(&rig, 0..50);
    for _ in 0..300 {
        assert_eq!(rig.skipping(&specs).unwrap().probes, []);
    }
    rig.guest
        .mem
        .write(MODULE_FRAMES, &[0; 8 * 50])
        .expect("in memory");
    // There is as much room for detours as at first.
    let all: Vec<_> = (0..FILLERS).map(|n| forced(&filler(n))).collect();
    let done = rig.skipping(&all).unwrap();
    assert_eq!(done.probes.len(), FILLERS, "{:?}", done.skipped.first());
}

/// Returns the number of checks of sites and reads of memory during `act`, and the number of stops.
fn work_of(rig: &mut Rig, act: impl FnOnce(&mut Rig)) -> (u64, u64) {
    let before = work();
    let stops = rig.stops_of(act);
    (work() - before, stops)
}

/// Checks that twice as many probes take little more than twice the work, and the same number of stops.
fn check_linear(what: &str, take: impl Fn(usize) -> (u64, u64)) {
    let (half, stops) = take(FILLERS / 2);
    let (whole, again) = take(FILLERS);
    assert_eq!((stops, again), (1, 1), "{what}");
    assert!(whole < 5 * half / 2, "{what}: {half}, then {whole}");
}

#[test]
fn the_work_for_a_batch_grows_with_its_length_however_many_are_refused() {
    check_linear("interrupted tasks", |count| {
        let mut rig = Rig::optimizing();
        interrupted(&rig, (0..count).filter(|n| n % 8 != 0));
        let specs: Vec<_> = (0..count).map(|n| forced(&filler(n))).collect();
        work_of(&mut rig, |rig| {
            let done = rig.skipping(&specs).unwrap();
            assert_eq!(done.probes.len(), count.div_ceil(8));
        })
    });
    check_linear("no jump possible", |count| {
        let mut rig = Rig::optimizing();
        // The two probes at each place require different mechanisms.
        let pair = |n| [forced(&filler(n)), post(&filler(n))];
        let specs: Vec<_> = (0..count).flat_map(pair).collect();
        work_of(&mut rig, |rig| {
            let done = rig.skipping(&specs).unwrap();
            assert_eq!(done.probes.len(), count);
            let (_, skipped) = positions(&done);
            assert!(skipped.iter().all(|index| index % 2 == 0));
        })
    });
    check_linear("text that changes", |count| {
        let mut rig = Rig::optimizing();
        let changed: Vec<_> = (0..count).map(|n| rig.at(&filler(n)[2..], 0)).collect();
        rig.guest.meanwhile(move |guest| {
            for at in changed.iter().skip(1) {
                guest.write(*at, &[0x99]);
            }
        });
        let specs: Vec<_> = (0..count).map(|n| spec(&filler(n))).collect();
        work_of(&mut rig, |rig| {
            let done = rig.skipping(&specs).unwrap();
            assert_eq!(done.probes.len(), 1);
        })
    });
    check_linear("no slots", |count| {
        let mut rig = Rig::live();
        let specs: Vec<_> = (0..count / 2).map(|n| post(&filler(2 * n + 1))).collect();
        work_of(&mut rig, |rig| {
            let done = rig.skipping(&specs).unwrap();
            assert_eq!(done.probes.len(), SLOTS);
        })
    });
}

#[test]
fn a_jump_that_a_refused_probe_had_kept_away_comes_in_a_second_stop() {
    let mut rig = Rig::optimizing();
    // Under the jump of the inner probe, but after that of the outer one.
    let inside = rig.at("filler_000", 5);
    let word = rig.guest.mem.write_u64(MODULE_FRAMES, inside.0);
    word.expect("in memory");
    let specs = [spec("p filler_000"), forced("p filler_000+1")];
    let mut done = Registered::default();
    let stops = rig.stops_of(|rig| done = rig.skipping(&specs).unwrap());
    assert_eq!((stops, positions(&done)), (2, (vec![0], vec![1])));
    assert_eq!(rig.mechanism(done.ids()[0]), Mechanism::Optimized);
}
