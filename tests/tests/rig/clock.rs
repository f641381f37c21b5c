//! What times are worth, on a stock guest: durations of calls whose length the guest knows, whichever
//! way their entries and returns are seen; and one order of all events.

use std::collections::BTreeMap;
use std::time::Duration;

use hvprobe_arch::regs::Gpr;
use hvprobe_hit::event::{Call, EventKind};
use hvprobe_machine::{Event, Machine, Mechanism, ProbeId, ProbeSpec};
use hvprobe_spec::Item;
use hvprobe_tests::rig::{Running, assert_clean, optimizing_guest, probe, rig};

const FUNCTION: &str = "hrtimer_nanosleep";
/// What calls it.
const CALLER: &str = "__x64_sys_nanosleep";
const NAP: Duration = Duration::from_millis(10);
const THREADS: usize = 2;
const NAPS: usize = 12;
/// What a time may be off.
const OFF: Duration = Duration::from_micros(200);

/// How the entries and the returns of the naps are seen.
struct Ways {
    name: &'static str,
    /// Of the entry, and of the kprobe there.
    entry: Option<Mechanism>,
    /// Whether the return takes an exit too.
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
    /// A return probe and a kprobe, and one on what calls the function, which is the other way.
    fn specs(&self) -> Vec<ProbeSpec> {
        let mut returns = ProbeSpec {
            mechanism: self.entry,
            ..probe(&format!("r8:back {FUNCTION}"))
        };
        if self.trampoline {
            // Memory other than the stack cannot be read without an exit.
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

/// A nap as the guest has it.
#[derive(Clone, Copy, Debug)]
struct Nap {
    /// From before the call until after it, by the guest's clock.
    start: Duration,
    end: Duration,
    /// How long the thread was off its processor meanwhile, as the guest's scheduler says: all of that is
    /// in the call.
    asleep: Duration,
}

impl Nap {
    fn told(&self) -> Duration {
        self.end - self.start
    }
}

/// The naps that the workload tells of, by thread.
fn naps(printed: &str) -> BTreeMap<i32, Vec<Nap>> {
    let mut naps: BTreeMap<i32, Vec<Nap>> = BTreeMap::new();
    let told = |line: &str| {
        let mut words = line.trim().strip_prefix("nap: ")?.split(' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        Some([number()?, number()?, number()?])
    };
    for [thread, start, end] in printed.lines().filter_map(told) {
        let [start, end] = [start, end].map(Duration::from_nanos);
        let asleep = asleep(printed, thread, start, end);
        let of_thread = naps.entry(thread.try_into().expect("a thread"));
        of_thread.or_default().push(Nap { start, end, asleep });
    }
    naps
}

/// From when on a thread slept between `start` and `end` until it was back, by the guest's `sched_switch`.
fn asleep(trace: &str, thread: u64, start: Duration, end: Duration) -> Duration {
    let (leaves, comes) = (format!("prev_pid={thread} "), format!("next_pid={thread} "));
    let (mut left, mut asleep) = (None, Duration::ZERO);
    for line in trace.lines() {
        let Some((before, switch)) = line.split_once(": sched_switch: ") else {
            continue;
        };
        let at = before
            .split_whitespace()
            .last()
            .and_then(|at| at.parse().ok());
        let at = Duration::from_secs_f64(at.expect("seconds"));
        if at < start || at > end {
            continue;
        }
        let sleeps = switch.contains("prev_state=S");
        if switch.contains(&leaves) && sleeps && left.is_none() {
            left = Some(at);
        } else if switch.contains(&comes)
            && let Some(left) = left
        {
            asleep = at - left;
        }
    }
    asleep
}

fn check(name: &str, ids: &[ProbeId], events: &[Event], naps: &BTreeMap<i32, Vec<Nap>>) {
    let mut slept = 0;
    for (thread, told) in naps {
        let of_thread = |id| {
            let by = |event: &&Event| {
                event.probe == id && event.task.is_some_and(|task| task.pid == *thread)
            };
            events.iter().filter(by).collect::<Vec<_>>()
        };
        let [before, entry, back] = [0, 1, 2].map(|n| of_thread(ids[n]));
        for events in [&before, &entry, &back] {
            assert_eq!(events.len(), told.len(), "{name}");
        }
        for (n, nap) in told.iter().enumerate() {
            let (before, entry, back) = (before[n], entry[n], back[n]);
            let call = call(back).expect("a return");
            let what =
                format!("{name}, {thread}'s nap {n}, {nap:?}: {before:?} {entry:?} {back:?}");
            assert!(call.entry_ns > 0 && back.host_ns > 0, "no time: {what}");
            let took = Duration::from_nanos(back.host_ns.saturating_sub(call.entry_ns));
            // The thread may lose its processor on the way into the call, or out of it, but not in its sleep.
            let least = nap.asleep.max(NAP).mul_f64(0.95);
            assert!(took + OFF >= least, "{took:?}: {what}");
            assert!(took <= nap.told().mul_f64(1.05) + OFF, "{took:?}: {what}");
            slept += usize::from(nap.asleep >= NAP / 2);
            let off = Duration::from_nanos(entry.host_ns.abs_diff(call.entry_ns));
            assert!(off <= OFF, "{off:?}: {what}");
            // All mechanisms are in one order.
            assert!(before.seq < entry.seq && entry.seq < back.seq, "{what}");
        }
    }
    // Where the scheduler's word is missing, as a host that is busy may make it, nothing is said.
    let all = THREADS * NAPS;
    assert!(
        slept * 2 > all,
        "{name}: the guest's scheduler knows of {slept} of {all} naps"
    );
    eprintln!("{name}: {slept} of {all} durations held against the guest's scheduler");
}

fn durations(cpus: u32) {
    let (threads, count) = (THREADS.to_string(), NAPS.to_string());
    let rounds = WAYS.len();
    let script = format!(
        "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing; echo mono > trace_clock; \
         cd events/sched/sched_switch; echo 'prev_comm == workload || next_comm == workload' > filter; \
         echo 1 > enable; cd /sys/kernel/tracing; \
         for round in $(seq {rounds}); do echo ready $round; read line; echo > trace; \
         workload naps {threads} {count}; cat trace; echo end of round $round; done"
    );
    let mut running = Running::boot(optimizing_guest(cpus, &["sh", "-c", &script]));
    let mut seen = 0;
    for (round, ways) in (1..).zip(&WAYS) {
        let printed = running.wait_for(&format!("ready {round}"));
        let before = printed.len();
        let machine = running.machine.clone();
        let ids = machine.register(&ways.specs()).expect("they can be probed");
        assert_mechanisms(&machine, ways);
        machine.console_input(b"\n");
        let over = format!("end of round {round}");
        let printed = running.wait_printed(|printed| {
            printed
                .get(before..)
                .is_some_and(|printed| printed.contains(&over))
        });
        let all = THREADS * NAPS;
        let printed = &printed[before..];
        assert!(printed.contains(&format!("naps: {all}")), "{printed}");
        machine.unregister(&ids).expect("they are registered");
        let expected = ids.len() * all;
        let wanted = |events: &[Event]| {
            let naps = events.iter().skip(seen);
            naps.filter(|event| by_workload(event)).count() >= expected
        };
        let events = running.wait_events(wanted);
        let events: Vec<Event> = events.iter().skip(seen).copied().collect();
        seen += events.len();
        let naps = naps(printed);
        assert_eq!(naps.len(), THREADS, "{printed}");
        check(&format!("{cpus} CPUs, {}", ways.name), &ids, &events, &naps);
    }
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
