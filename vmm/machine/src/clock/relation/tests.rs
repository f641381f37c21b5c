use hvprobe_hit::Clock as _;
use hvprobe_vm::vcpu::Counters;
use proptest::prelude::*;

use super::*;
use crate::clock::host::HostClock;

/// Address of KVM's sample in these tests.
const SAMPLE_AT: u64 = 0x1000;
/// Ticks of the host's counter per nanosecond of the kvmclocks in these tests: 2 GHz.
const TICKS: u64 = 2;
const MS: u64 = 1_000_000;

fn since(from: u64, offset: u64, version: u32) -> Since {
    Since {
        from,
        offset,
        version: Some(version),
    }
}

fn ram() -> Arc<GuestRam> {
    Arc::new(GuestRam::new(64 << 20).unwrap())
}

/// Writes a sample as KVM does.
fn write_sample(ram: &GuestRam, version: u32, tsc: u64, ns: u64) {
    let put = |offset, value| ram.write_u64(Gpa(SAMPLE_AT + offset), value).unwrap();
    put(0, u64::from(version));
    put(8, tsc);
    put(16, ns);
}

/// Returns a kvmclock that follows the host's counter, at two ticks per nanosecond.
fn kvmclock() -> Kvmclock {
    Kvmclock {
        read: Arc::new(|| Some(rdtsc() / TICKS)),
        first: Moment { ns: 0, tsc: 0 },
        last: Moment {
            ns: rdtsc() / TICKS,
            tsc: rdtsc() / TICKS * TICKS,
        },
    }
}

/// Returns the time of a stamp without a position.
fn time(timeline: &Timeline, cpu: Option<u32>, tsc: u64) -> Option<u64> {
    let when = timeline.now()(Stamp {
        cpu,
        tsc,
        position: None,
    });
    match when {
        When::At(ns) => Some(ns),
        When::Placed(ns) => panic!("at {ns}, though it has no place"),
        When::After(ns) => {
            assert_eq!(ns, 0);
            None
        }
    }
}

fn stalling(ram: &Arc<GuestRam>) -> Arc<Relation> {
    let relation = Relation::new(Arc::clone(ram), None);
    relation.set_sample_at(SAMPLE_AT | 1);
    relation.set_stalling();
    Arc::new(relation)
}

#[test]
fn a_reading_has_the_offset_that_was_in_force() {
    let mut offsets = Offsets::default();
    assert_eq!(offsets.at(5), None);
    for (from, offset, version) in [(100, 1, 2), (200, 2, 4), (300, 3, 6)] {
        offsets.note(since(from, offset, version));
    }
    let at = [50, 100, 199, 200, 299, 300, 10_000].map(|tsc| offsets.at(tsc));
    assert_eq!(at, [1, 1, 1, 2, 2, 3, 3].map(Some));
    // A sample was missed, so the nearer of the known ones applies.
    offsets.note(since(400, 4, 10));
    assert_eq!([349, 351].map(|tsc| offsets.at(tsc)), [3, 4].map(Some));
    // The counter was set back.
    offsets.note(since(10, 9, 12));
    assert_eq!([5, 350].map(|tsc| offsets.at(tsc)), [9, 9].map(Some));
}

proptest! {
    /// The older offsets are, the fewer of them are kept. But one is always found.
    #[test]
    fn little_is_kept_of_long_ago(count in 1..20_000_u64, asked in any::<prop::sample::Index>()) {
        let mut offsets = Offsets::default();
        for n in 0..count {
            offsets.note(since(n * 100, n, u32::try_from(n * 2).unwrap()));
        }
        let kept: usize = offsets.levels.iter().map(VecDeque::len).sum();
        prop_assert!(kept <= KEPT * offsets.levels.len() && offsets.levels.len() < 10);
        let asked = u64::try_from(asked.index(usize::try_from(count).unwrap())).unwrap();
        let found = offsets.at(asked * 100 + 5).unwrap();
        let age = count - asked;
        let off = found.abs_diff(asked);
        prop_assert!(off <= age / 64 && (off == 0 || age > KEPT as u64), "{found} for {asked} of {count}");
    }
}

#[test]
fn a_counter_that_stalls_is_followed_by_the_samples_of_kvm() {
    let ram = ram();
    let relation = stalling(&ram);
    let times = Arc::new(Times::new());
    let timeline = Timeline::new(
        Arc::clone(&times),
        Box::new([Arc::clone(&relation)]),
        kvmclock(),
    );
    // KVM has written no sample.
    assert_eq!(time(&timeline, Some(0), 1000), None);
    // The guest's counter is at 5000 at this moment.
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, 5000, start / TICKS);
    let line = times.line();
    let derived = time(&timeline, Some(0), 5000).unwrap();
    assert!(derived.abs_diff(line.at(start)) < 1000, "{derived}");
    // The counter stood still for ten milliseconds, and a hit saw that.
    let later = start + 20 * MS;
    while rdtsc() < later + 2 * MS {}
    write_sample(&ram, 4, 6000, later / TICKS);
    let mut own = kvmclock();
    relation.renew(relation.sample().unwrap(), &mut own);
    assert!(6000_u64.wrapping_sub(relation.offset()).abs_diff(later) < 10_000);
    let [entry, back] = [5500, 6500].map(|tsc| time(&timeline, Some(0), tsc).unwrap());
    let line = times.line();
    let wanted = line.at(later + 500) - line.at(start + 500);
    assert!((back - entry).abs_diff(wanted) < 1000, "{}", back - entry);
    // A record cannot be from the future.
    assert_eq!(time(&timeline, Some(0), 6000 + 1_000_000 * MS), None);
}

#[test]
fn while_kvm_writes_what_is_new_a_counter_that_stalls_has_a_time_only_for_what_is_past() {
    let ram = ram();
    let timeline = Timeline::new(
        Arc::new(Times::new()),
        Box::new([stalling(&ram)]),
        kvmclock(),
    );
    let start = rdtsc() / TICKS * TICKS;
    for (version, tsc, ns) in [(2, 5000, 0), (4, 6000, 1000)] {
        write_sample(&ram, version, tsc, start / TICKS + ns);
        assert!(time(&timeline, Some(0), tsc + 1).is_some());
    }
    write_sample(&ram, 5, 7000, start / TICKS);
    assert!(time(&timeline, Some(0), 5500).is_some());
    assert_eq!(time(&timeline, Some(0), 6500), None);
    write_sample(&ram, 6, 7000, start / TICKS + 2000);
    assert!(time(&timeline, Some(0), 6500).is_some());
}

#[test]
fn of_no_known_virtual_cpu_there_is_a_time_only_if_all_agree() {
    let ram = ram();
    let times = Arc::new(Times::new());
    let relations = [0, 1].map(|_| Arc::new(Relation::new(Arc::clone(&ram), None)));
    let [one, two] = relations.clone();
    let timeline = Timeline::new(times, Box::new(relations), kvmclock());
    let tsc = rdtsc();
    let time_of = |cpu, tsc| time(&timeline, cpu, tsc);
    assert_eq!(time_of(None, tsc), None);
    one.note(tsc - 10, 0);
    assert_eq!(time_of(None, tsc), None);
    two.note(tsc - 10, 100);
    assert!(time_of(None, tsc).is_some());
    assert!(time_of(Some(7), tsc).is_some());
    // The guest has set one of them.
    two.note(tsc - 5, 10 * MS);
    assert_eq!(time_of(None, tsc), None);
    assert!(time_of(Some(1), tsc).is_some());
}

#[test]
fn hits_and_records_of_a_steady_counter_have_one_time() {
    let times = Arc::new(Times::new());
    let relation = Arc::new(Relation::new(ram(), None));
    let timeline = Timeline::new(
        Arc::clone(&times),
        Box::new([Arc::clone(&relation)]),
        kvmclock(),
    );
    let mut clock = HostClock::new(times, relation, kvmclock());
    let mut reads = 0;
    for offset in [123_u64, 123, 1 << 40, 1 << 40] {
        clock.learn(|| {
            reads += 1;
            let tsc = rdtsc().wrapping_add(offset);
            Some(Counters { tsc, kvmclock: 0 })
        });
        let hit = clock.now();
        let ago = rdtsc().wrapping_add(offset).wrapping_sub(hit.guest_tsc);
        // The hit is slightly in the future if learning was interrupted: the shorter a reading, the more exact the
        // offset.
        let ago = ago.cast_signed();
        assert!(ago.unsigned_abs() < MS, "{ago}");
        let derived = time(&timeline, Some(0), hit.guest_tsc).unwrap();
        assert!(derived.abs_diff(hit.host_ns) < 20_000, "{derived} {hit:?}");
    }
    // There are more reads only if this thread was interrupted.
    assert!(reads >= 8);
}

#[test]
fn a_counter_that_does_not_go_on_by_itself_is_seen_to_stall() {
    let ram = ram();
    let times = Arc::new(Times::new());
    let relation = Arc::new(Relation::new(Arc::clone(&ram), None));
    let mut clock = HostClock::new(times, Arc::clone(&relation), kvmclock());
    let mut tsc = 77_000;
    let mut read = || {
        // The counter does not advance, even while a reading takes long.
        tsc -= 1;
        Some(Counters {
            tsc,
            kvmclock: SAMPLE_AT | 1,
        })
    };
    clock.learn(&mut read);
    assert!(relation.stalls.load(Ordering::Relaxed));
    assert_eq!(relation.lock().at(77_000), None);
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, 90_000, start / TICKS);
    let (hit, now) = (clock.now(), rdtsc());
    assert!((90_000..=90_000 + now - start + 10_000).contains(&hit.guest_tsc));
    // KVM's last sample is noted whenever the vCPU is parked.
    write_sample(&ram, 4, 95_000, start / TICKS);
    clock.learn(&mut read);
    let newest = relation.lock().newest().map(|newest| newest.from);
    assert_eq!(newest, Some(95_000));
}

/// At first the counter seemed not to stall, and its offset came from readings. KVM's last sample is still the one
/// from that time. It was not kept, because it showed the same offset.
#[test]
fn a_counter_that_is_seen_to_stall_late_has_a_time_at_once() {
    let ram = ram();
    let relation = Arc::new(Relation::new(Arc::clone(&ram), None));
    relation.set_sample_at(SAMPLE_AT | 1);
    let times = Arc::new(Times::new());
    let timeline = Timeline::new(
        Arc::clone(&times),
        Box::new([Arc::clone(&relation)]),
        kvmclock(),
    );
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, 5000, start / TICKS);
    relation.note(4000, 5000_u64.wrapping_sub(start));
    let line = times.line();
    let off = |tsc| {
        let derived = time(&timeline, Some(0), tsc).expect("a time");
        derived.abs_diff(line.at(start - 5000 + tsc))
    };
    assert!(off(5100) < 1000);
    relation.set_stalling();
    assert_eq!(relation.lock().newest(), None);
    assert!(off(5100) < 1000);
    assert!(off(4900) < 1000);
}

#[test]
fn samples_of_kvm_from_before_a_counter_was_seen_to_stall_still_hold() {
    let ram = ram();
    let relation = Arc::new(Relation::new(Arc::clone(&ram), None));
    relation.set_sample_at(SAMPLE_AT | 1);
    let mut kvmclock = kvmclock();
    let start = rdtsc() / TICKS * TICKS;
    for (version, tsc, ns) in [(2, 5000, 0), (4, 6000, MS), (6, 7000, 2 * MS)] {
        write_sample(&ram, version, tsc, start / TICKS + ns);
        relation.renew(relation.sample().unwrap(), &mut kvmclock);
    }
    relation.note(8000, 1);
    relation.set_stalling();
    let [first, second, third] = [5500, 6500, 7500].map(|tsc| relation.lock().at(tsc).unwrap());
    assert_eq!(first.wrapping_sub(second), TICKS * MS - 1000);
    assert_eq!(second.wrapping_sub(third), TICKS * MS - 1000);
    assert_ne!(relation.lock().at(9000), Some(1));
}

/// Makes ten runs with a counter that advances only while it is read. In each run, every tenth read takes longer
/// than the time between reads.
#[test]
fn a_counter_that_stalls_is_not_taken_for_one_that_goes_on_while_it_is_read_slowly() {
    for slow in 0..10 {
        let relation = Arc::new(Relation::new(ram(), None));
        let times = Arc::new(Times::new());
        let mut clock = HostClock::new(times, Arc::clone(&relation), kvmclock());
        let (mut tsc, mut reads) = (77_000, 0);
        clock.learn(|| {
            let start = rdtsc();
            let ticks = if reads % 10 == slow { 2 * MS } else { 0 };
            while rdtsc() < start + ticks {}
            tsc += rdtsc() - start;
            reads += 1;
            Some(Counters {
                tsc,
                kvmclock: SAMPLE_AT | 1,
            })
        });
        assert!(relation.stalls.load(Ordering::Relaxed), "{slow}");
    }
}

#[test]
fn a_counter_that_the_guest_has_set_is_followed_before_anybody_reads_it() {
    let ram = ram();
    let relation = Arc::new(Relation::new(Arc::clone(&ram), None));
    let times = Arc::new(Times::new());
    let timeline = Timeline::new(
        Arc::clone(&times),
        Box::new([Arc::clone(&relation)]),
        kvmclock(),
    );
    let mut clock = HostClock::new(Arc::clone(&times), Arc::clone(&relation), kvmclock());
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, start, start / TICKS);
    clock.learn(|| {
        Some(Counters {
            tsc: rdtsc(),
            kvmclock: SAMPLE_AT | 1,
        })
    });
    let exact = relation.offset();
    let time_of = |tsc| time(&timeline, Some(0), tsc).unwrap();
    let hit = clock.now();
    assert!(time_of(hit.guest_tsc).abs_diff(hit.host_ns) < 20_000);
    // The reading stays in force although KVM's sample shows the same offset less exactly.
    assert_eq!(relation.offset(), exact);
    const AHEAD: u64 = 1 << 50;
    let set = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 4, set + AHEAD, set / TICKS);
    let line = times.line();
    assert!(time_of(set + AHEAD + 100).abs_diff(line.at(set + 100)) < 20_000);
    // Records from before the counter was set also have their times, and a hit that takes an exit uses the same
    // offset.
    assert!(time_of(hit.guest_tsc).abs_diff(hit.host_ns) < 20_000);
    let hit = clock.now();
    assert!(hit.guest_tsc > AHEAD);
    assert!(time_of(hit.guest_tsc).abs_diff(hit.host_ns) < 20_000);
}

#[test]
fn a_hit_sees_the_sample_that_the_collector_read_first() {
    let ram = ram();
    let relation = Arc::new(Relation::new(Arc::clone(&ram), None));
    let times = Arc::new(Times::new());
    let mut clock = HostClock::new(Arc::clone(&times), Arc::clone(&relation), kvmclock());
    clock.learn(|| {
        Some(Counters {
            tsc: 5000,
            kvmclock: SAMPLE_AT | 1,
        })
    });
    let timeline = Timeline::new(times, Box::new([Arc::clone(&relation)]), kvmclock());
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, 5000, start / TICKS);
    assert!(time(&timeline, Some(0), 5000).is_some());
    let (hit, now) = (clock.now(), rdtsc());
    assert!((5000..=5000 + now - start + 10_000).contains(&hit.guest_tsc));
}

#[test]
fn a_record_stands_between_the_hits_around_it_whatever_its_counter_seems_to_say() {
    const HEAD: u64 = 0x2000;
    let ram = ram();
    let relation = Arc::new(Relation::new(Arc::clone(&ram), Some(Gpa(HEAD))));
    relation.set_sample_at(SAMPLE_AT | 1);
    relation.set_stalling();
    let times = Arc::new(Times::new());
    let timeline = Timeline::new(
        Arc::clone(&times),
        Box::new([Arc::clone(&relation)]),
        kvmclock(),
    );
    let start = rdtsc() / TICKS * TICKS;
    write_sample(&ram, 2, 5000, start / TICKS);
    let ns = times.line().at(start);
    while rdtsc() < start + 8 * MS {}
    // There are two hits, and records before, between and after them. All records seem to be at about one
    // millisecond.
    ram.write_u64(Gpa(HEAD), 3).unwrap();
    relation.mark(ns + 50_000);
    ram.write_u64(Gpa(HEAD), 5).unwrap();
    relation.mark(ns + 80_000);
    let when = |tsc, position| {
        timeline.now()(Stamp {
            cpu: Some(0),
            tsc,
            position: Some(position),
        })
    };
    let when_at = |position| when(5000 + MS * TICKS, position);
    assert_eq!([0, 2].map(when_at), [When::Placed(ns + 50_000 - 1); 2]);
    assert_eq!([3, 4].map(when_at), [When::Placed(ns + 80_000 - 1); 2]);
    assert!(matches!(when_at(5), When::At(at) if at > ns + 80_000));
    relation.mark(ns + 3 * MS);
    assert_eq!([5, 6].map(when_at), [When::Placed(ns + 3 * MS + 1); 2]);
    assert_eq!(when_at(4), When::Placed(ns + 80_000 - 1));
    // A record that seems to be from the future has no time, but its position among the hits is known.
    let to_come = 5000 + 1_000_000 * MS;
    let after = [0, 3, 6].map(|position| when(to_come, position));
    let hits = [0, ns + 50_000 + 1, ns + 3 * MS + 1];
    assert_eq!(after, hits.map(When::After));
}
