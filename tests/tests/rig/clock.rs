//! Tests the accuracy of times in a stock guest. With every mechanism at entry and return, the durations of calls
//! must be those that the guest knows, and all events must be in one order.

use std::arch::x86_64::_rdtsc;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hvprobe_arch::regs::Gpr;
use hvprobe_hit::event::{Call, EventKind};
use hvprobe_machine::{Event, Machine, Mechanism, ProbeId, ProbeSpec};
use hvprobe_spec::Item;
use hvprobe_tests::rig::{Running, assert_clean, optimizing_guest, probe, rig, rounds};

const FUNCTION: &str = "hrtimer_nanosleep";
/// Caller of [`FUNCTION`].
const CALLER: &str = "__x64_sys_nanosleep";
const NAP: Duration = Duration::from_millis(10);
const THREADS: usize = 2;
const NAPS: usize = 24;
/// Tolerance of comparisons of times.
const OFF: Duration = Duration::from_micros(200);

/// Mechanisms at the entries and the returns of the naps.
struct Ways {
    name: &'static str,
    /// Mechanism of the entry, and of the kprobe there; `None` for optimized.
    entry: Option<Mechanism>,
    /// Whether the return takes an exit.
    trampoline: bool,
}

const WAYS: [Ways; 4] = [
    Ways {
        name: "two exits",
        entry: Some(Mechanism::Emulated),
        trampoline: true,
    },
    Ways {
        name: "two exits, stepped",
        entry: Some(Mechanism::Stepped),
        trampoline: true,
    },
    Ways {
        name: "an exit at the entry",
        entry: Some(Mechanism::Emulated),
        trampoline: false,
    },
    Ways {
        name: "no exits",
        entry: None,
        trampoline: false,
    },
];

impl Ways {
    /// Returns a kprobe on [`CALLER`], and a kprobe and a return probe on [`FUNCTION`]. If the two on [`FUNCTION`]
    /// take an exit at the entry, the one on [`CALLER`] takes none; otherwise it takes an exit.
    fn specs(&self) -> Vec<ProbeSpec> {
        let mut returns = ProbeSpec {
            mechanism: self.entry,
            ..probe(&format!("r8:back {FUNCTION}"))
        };
        if self.trampoline {
            // A return probe that reads memory when the function returns needs an exit there.
            returns.actions.capture_at_return = vec![Item::Memory {
                base: Gpr::Rsp,
                offset: 0,
                len: 8,
            }];
        }
        let entry = ProbeSpec {
            mechanism: self.entry,
            ..probe(&format!("p:entry {FUNCTION}"))
        };
        let before = ProbeSpec {
            mechanism: match self.entry {
                None => Some(Mechanism::Emulated),
                Some(_) => None,
            },
            ..probe(&format!("p:before {CALLER}"))
        };
        vec![before, entry, returns]
    }
}

fn call(event: &Event) -> Option<Call> {
    match event.kind {
        EventKind::Return(call) => Some(call),
        _ => None,
    }
}

/// A reading of the host's counter, which has the same frequency as the guest's.
#[derive(Clone, Copy, Debug)]
struct Counter {
    at: Instant,
    ticks: u64,
}

impl Counter {
    fn now() -> Self {
        // SAFETY: RDTSC exists on every x86-64 processor and touches no memory.
        let ticks = unsafe { _rdtsc() };
        Self {
            at: Instant::now(),
            ticks,
        }
    }

    /// Converts `ticks` to a duration, by the counter's rate since this reading.
    fn took(self, ticks: u64) -> Duration {
        let now = Self::now();
        let since = now.ticks.wrapping_sub(self.ticks);
        (now.at - self.at).mul_f64(ticks as f64 / since as f64)
    }
}

/// Duration of a call as measured by each of the guest's clocks, and by the probes of the guest's own kernel
/// (`slept`). These probes measure from just before the function to the end of the sleep in it. Except for a few
/// instructions, that is the duration of the function, including the time taken by a probe at its entry.
#[derive(Clone, Copy, Debug)]
struct GuestTimes {
    clock: Duration,
    pit: Duration,
    slept: Duration,
}

impl GuestTimes {
    /// Returns the duration if both clocks agree on it. If they do not, `clock` is wrong, and the result is `None`.
    /// `clock` is derived from the processor's counter, which sometimes stops for milliseconds on a host with an
    /// unstable counter. Then the clock catches up, so that a nap ends early.
    fn agreed(self) -> Option<Duration> {
        let agreed = self.clock.abs_diff(self.pit) <= OFF;
        agreed.then_some(self.clock.max(self.pit))
    }
}

/// Returns the durations that the guest printed, by thread. They alternate: that of a call that does not sleep,
/// then that of a nap.
fn naps(printed: &str) -> BTreeMap<i32, Vec<GuestTimes>> {
    let mut naps: BTreeMap<i32, Vec<GuestTimes>> = BTreeMap::new();
    for line in printed.lines() {
        if let Some(nap) = line.trim().strip_prefix("nap: ") {
            let number = |word: &str| word.parse::<u64>().expect("a number");
            let words: Vec<u64> = nap.split(' ').map(number).collect();
            let (Some(thread), calls) = (words.first(), words[1..].chunks_exact(3)) else {
                panic!("{line}");
            };
            assert_eq!((calls.len(), calls.remainder().len()), (2, 0), "{line}");
            let thread = i32::try_from(*thread).expect("a thread");
            let times = calls.map(|call| {
                let [clock, pit, slept] = [call[0], call[1], call[2]].map(Duration::from_nanos);
                GuestTimes { clock, pit, slept }
            });
            naps.entry(thread).or_default().extend(times);
        }
    }
    naps
}

/// Compares all calls of a batch with the durations that the guest printed. Returns the number of naps whose
/// duration agrees with what the kernel's own probes measured.
fn check(
    name: &str,
    ids: &[ProbeId],
    events: &[Event],
    naps: &BTreeMap<i32, Vec<GuestTimes>>,
    since: Counter,
) -> usize {
    let mut close = 0;
    for (thread, measured) in naps {
        let of_thread = |id| {
            let by = |event: &&Event| {
                event.probe == id && event.task.is_some_and(|task| task.pid == *thread)
            };
            events.iter().filter(by).collect::<Vec<_>>()
        };
        let [before, entry, back] = [0, 1, 2].map(|n| of_thread(ids[n]));
        for events in [&before, &entry, &back] {
            assert_eq!(events.len(), measured.len(), "{name}");
        }
        let agreed: Vec<_> = measured.iter().map(|one| one.agreed()).collect();
        for (n, times) in measured.iter().enumerate() {
            let (before, entry, back) = (before[n], entry[n], back[n]);
            let call = call(back).expect("a return");
            let took = Duration::from_nanos(back.host_ns.saturating_sub(call.entry_ns));
            let is_nap = n % 2 == 1;
            if is_nap && agreed[n].is_some() && entry.host_ns > 0 {
                let off = times.slept.abs_diff(took);
                close += usize::from(off <= times.slept.mul_f64(0.05) + OFF);
            }
            // Skips calls during which the guest's clock was wrong, and those next to them. Their records may have
            // no time, or may be ordered among the records of a neighbouring call on another virtual CPU.
            let around = &agreed[n.saturating_sub(1)..agreed.len().min(n + 2)];
            let (Some(longest), true) = (agreed[n], around.iter().all(Option::is_some)) else {
                continue;
            };
            let what =
                format!("{name}, {thread}'s nap {n} of {times:?}: {before:?} {entry:?} {back:?}");
            assert!(call.entry_ns > 0 && back.host_ns > 0, "no time: {what}");
            assert!(took <= longest.mul_f64(1.05) + OFF, "{took:?}: {what}");
            if is_nap {
                assert!(took + OFF >= NAP.mul_f64(0.95), "{took:?}: {what}");
            }
            // The kprobe and the return probe are hit at the same entry, but the guest may have handled an
            // interrupt between the two hits.
            let off = Duration::from_nanos(entry.host_ns.abs_diff(call.entry_ns));
            let between = match call.entry_tsc {
                // One exit serves both probes.
                0 => Duration::ZERO,
                tsc => since.took(tsc.abs_diff(entry.guest_tsc)),
            };
            // A record that is read at once has no time if KVM announced a future time to the guest.
            assert!(
                entry.host_ns == 0 || off.abs_diff(between) <= OFF,
                "{off:?}, {between:?}: {what}"
            );
            // Events of all mechanisms are in one order.
            assert!(before.seq < entry.seq && entry.seq < back.seq, "{what}");
        }
    }
    close
}

fn durations(cpus: u32) {
    let count = rounds(NAPS);
    let ways = WAYS.len();
    // Each line that is typed starts the next batch, and the last line ends the guest.
    let script = format!("workload naps {THREADS} {count} {ways} && read line");
    let mut running = Running::boot(optimizing_guest(cpus, &["sh", "-c", &script]));
    let since = Counter::now();
    let mut seen = 0;
    for (batch, ways) in WAYS.iter().enumerate() {
        let name = format!("{cpus} CPUs, {}", ways.name);
        let machine = running.machine.clone();
        let before = running.wait_for(&format!("ready: {batch}")).len();
        let ids = machine.register(&ways.specs()).expect("they can be probed");
        assert_mechanisms(&machine, ways);
        machine.console_input(b"\n");
        let over = format!("over: {batch}");
        let printed = running.wait_printed(|printed| {
            let new = printed.get(before..);
            new.is_some_and(|printed| printed.contains(&over))
        });
        let expected = ids.len() * THREADS * count * 2;
        let wanted = |events: &[Event]| {
            let naps = events.iter().skip(seen);
            naps.filter(|event| by_workload(event)).count() >= expected
        };
        let events = running.wait_events(wanted);
        let events: Vec<Event> = events.iter().skip(seen).copied().collect();
        seen += events.len();
        let naps = naps(&printed[before..]);
        assert_eq!(naps.len(), THREADS, "{printed}");
        let close = check(&name, &ids, &events, &naps, since);
        let all = THREADS * count;
        let summary = format!("{name}: {close} of {all} durations as the guest has them");
        eprintln!("{summary}");
        // Not all of them agree: threads may be preempted between two probes, and on a host without spare
        // processors the clocks disagree.
        assert!(close * 2 > all, "{summary}");
        machine.unregister(&ids).expect("they are registered");
    }
    running.machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert!(events.is_sorted_by_key(|event| event.seq));
    let timed: Vec<&Event> = events.iter().filter(|event| event.host_ns > 0).collect();
    let late: Vec<_> = timed
        .windows(2)
        .filter(|pair| pair[0].host_ns > pair[1].host_ns)
        .collect();
    assert!(
        late.is_empty(),
        "{} events out of order, of {}: {late:#?}",
        late.len(),
        timed.len()
    );
}

fn by_workload(event: &Event) -> bool {
    event.task.is_some_and(|task| task.comm() == "workload")
}

fn assert_mechanisms(machine: &Machine, ways: &Ways) {
    for probe in machine.probes() {
        let wanted = if probe.name == "before" {
            match ways.entry {
                None => Mechanism::Emulated,
                Some(_) => Mechanism::Optimized,
            }
        } else {
            ways.entry.unwrap_or(Mechanism::Optimized)
        };
        assert_eq!(probe.mechanism, Some(wanted), "{probe:?}");
    }
}

#[test]
fn a_nap_takes_as_long_as_the_guest_says_on_one_cpu() {
    if rig("durations on one CPU").is_some() {
        durations(1);
    }
}

#[test]
fn a_nap_takes_as_long_as_the_guest_says_on_two_cpus() {
    if rig("durations on two CPUs").is_some() {
        durations(2);
    }
}

#[test]
fn a_nap_takes_as_long_as_the_guest_says_on_four_cpus() {
    if rig("durations on four CPUs").is_some() {
        durations(4);
    }
}
