//! Tests probes without exits, in a stock guest.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::spawn;

use hvprobe_arch::insn::instruction_len;
use hvprobe_arch::regs::Gpr;
use hvprobe_engine::Unoptimized;
use hvprobe_hit::event::EventKind;
use hvprobe_machine::{Event, Machine, Mechanism, ProbeInfo, ProbeSpec, Refusals, Subscription};
use hvprobe_spec::{Comparison, Condition, Item, RegisterSet};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, info, infos, is_short, optimizing_guest, probe, rig, rig_cpus,
    rounds, values,
};

const FUNCTION: &str = "__x64_sys_getpgid";

fn mechanism(info: &ProbeInfo) -> Mechanism {
    match (info.mechanism, &info.unoptimized) {
        (Some(mechanism), None) => mechanism,
        other => panic!("not optimized: {other:?}"),
    }
}

#[test]
fn hits_at_an_entry_are_all_recorded_without_exits() {
    const CALLS: usize = 20_000;
    if rig("an optimized probe").is_none() {
        return;
    }
    let calls = CALLS.to_string();
    let mut config = optimizing_guest(1, &["workload", "held", "calls", "getpgid", &calls]);
    config.probes = vec![probe(&format!("p {FUNCTION}"))];
    let mut running = Running::shared(&config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let mut stream = machine.subscribe(Vec::new(), 1 << 16);
    let before = machine.probes().remove(0);
    assert_eq!(mechanism(&before), Mechanism::Optimized);
    let runs = exits(&machine);
    machine.console_input(b"\n");
    running.wait_for("calls:");
    let runs = exits(&machine) - runs;
    assert!(runs < CALLS as u64 / 10, "{runs} exits for {CALLS} hits");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let after = machine.probes().remove(0);
    assert_eq!((after.counts.hits, after.counts.missed), (CALLS as u64, 0));
    let (events, dropped) = take(&machine, &mut stream);
    // A busy host may not keep up; lost events are counted.
    assert_eq!(events.len() as u64 + dropped, CALLS as u64);
    assert!(!events.is_empty());
    let at = after.addr.expect("placed").0;
    assert!(events.iter().all(|event| event.regs.rip == at));
    let tasks: Vec<_> = events.iter().filter_map(|event| event.task).collect();
    assert!(tasks.len() == events.len() && tasks.iter().all(|task| task.comm() == "workload"));
    assert!(events.is_sorted_by_key(|event| event.guest_tsc));
    assert!(events.is_sorted_by_key(|event| event.host_ns));
}

#[test]
fn calls_are_followed_to_their_returns_without_exits() {
    if rig("an optimized return probe").is_some() {
        follow_calls(None, 0);
    }
}

#[test]
fn calls_whose_entry_exits_are_followed_to_their_returns_without_another() {
    if rig("a return probe with one exit").is_some() {
        follow_calls(Some(Mechanism::Emulated), 1);
    }
}

/// Follows calls with two return probes and a kprobe, all with the mechanism `forced`, if one is given. Each call
/// must take `expected` exits.
fn follow_calls(forced: Option<Mechanism>, expected: usize) {
    const CALLS: usize = 5_000;
    let calls = CALLS.to_string();
    let mut config = optimizing_guest(1, &["workload", "held", "calls", "getpgid", &calls]);
    let shared = ["r8:outer", "p:entry", "r8:inner"];
    config.probes = shared
        .map(|kind| ProbeSpec {
            mechanism: forced,
            ..probe(&format!("{kind} {FUNCTION}"))
        })
        .into();
    let mut running = Running::shared(&config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let mut stream = machine.subscribe(Vec::new(), 1 << 16);
    let ids = machine
        .probes()
        .iter()
        .map(|probe| probe.id)
        .collect::<Vec<_>>();
    let runs = exits(&machine);
    machine.console_input(b"\n");
    running.wait_for("calls:");
    let runs = exits(&machine) - runs;
    let most = CALLS * expected + CALLS / 10;
    assert!(
        (CALLS * expected..most).contains(&usize::try_from(runs).expect("few")),
        "{runs} exits for {CALLS} calls"
    );
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let (events, dropped) = take(&machine, &mut stream);
    assert_eq!(events.len() as u64 + dropped, 3 * CALLS as u64);
    for probe in machine.probes() {
        let counts = probe.counts;
        let all = (counts.hits, counts.missed, counts.orphans);
        assert_eq!(all, (CALLS as u64, 0, 0), "{}", probe.name);
    }
    let (mut callers, mut untimed) = (Vec::new(), 0);
    for event in &events {
        match event.kind {
            EventKind::Return(call) => {
                // Occasionally a time is unknown; see below.
                let is_timed = call.entry_ns > 0 && event.host_ns > 0;
                assert!(!is_timed || call.entry_ns <= event.host_ns, "{event:?}");
                untimed += usize::from(!is_timed);
                // If the entry takes an exit, the host determines the time of the entry, and the counter's value
                // there is unknown.
                let is_known = call.entry_tsc != 0;
                assert_eq!(is_known, expected == 0, "{event:?}");
                assert!(!is_known || call.entry_tsc < event.guest_tsc, "{event:?}");
                assert_eq!(call.entry.rip, machine.probes()[0].addr.expect("placed").0);
                assert_eq!(event.regs.rsp, call.entry.rsp + 8);
                callers.push(event.regs.rip);
            }
            EventKind::Hit => assert_eq!(event.probe, ids[1]),
            other => panic!("{other:?}"),
        }
    }
    assert!(
        untimed * 100 < events.len(),
        "{untimed} of {}",
        events.len()
    );
    // Both return probes report the same caller.
    callers.sort_unstable();
    callers.dedup();
    assert_eq!(callers.len(), 1, "{callers:x?}");
}

#[test]
fn a_breakpoint_and_a_jump_report_the_same() {
    const CALLS: u64 = 300;
    if rig("the same events with and without exits").is_none() {
        return;
    }
    let mut runs = Vec::new();
    for optimize in [false, true] {
        let mut config = optimizing_guest(1, &["workload", "calls", "getpgid", "300"]);
        config.optimize = optimize;
        let spec = |definition: &str, value| {
            let mut spec = probe(definition);
            spec.actions.capture = vec![Item::Stack(0), Item::Stack(2)];
            spec.actions.registers = RegisterSet::from_iter([Gpr::Rsi]);
            spec.actions.when = vec![Condition {
                register: Gpr::Rsi,
                comparison: Comparison::Equal,
                value,
            }];
            spec
        };
        // At the entry, RSI holds the number of the system call.
        let number = u64::try_from(libc::SYS_getpgid).expect("a number");
        let taken = |kind| spec(&format!("{kind} {FUNCTION}"), number);
        let left = |kind| spec(&format!("{kind} {FUNCTION}"), number + 1);
        config.probes = vec![taken("p"), left("p"), taken("r"), left("r")];
        let mut running = Running::shared(&config);
        let machine = running.machine.clone();
        let (ending, events, printed) = running.finish();
        assert_clean(&ending, &printed, 0);
        let probes = machine.probes();
        let counts: Vec<_> = probes
            .iter()
            .map(|probe| (probe.counts.hits, probe.counts.vetoed, probe.counts.missed))
            .collect();
        let (all, none) = ((CALLS, 0, 0), (0, CALLS, 0));
        assert_eq!(counts, [all, none, all, none], "optimize: {optimize}");
        // Addresses on the stack and times are left out, because they differ from boot to boot.
        let event = |event: &Event| {
            let entry = match event.kind {
                // The result is reported although RAX is not shown.
                EventKind::Return(call) => Some((call.entry.rsi, call.entry.rip, event.regs.rax)),
                _ => None,
            };
            let words = event.captured.bytes();
            (
                probes.iter().position(|probe| probe.id == event.probe),
                event.vcpu,
                (
                    event.regs.rip,
                    event.regs.rsi,
                    event.task.map(|task| task.comm()),
                ),
                // Return address.
                words[..8].to_vec(),
                words.len(),
                entry,
            )
        };
        runs.push(events.iter().map(event).collect::<Vec<_>>());
    }
    let jumps = runs.pop().expect("two runs");
    assert_eq!(runs.pop().expect("two runs"), jumps);
}

fn exits(machine: &Machine) -> u64 {
    machine.pause().expect("running");
    let runs = machine.ioctls()[0].run;
    machine.resume().expect("paused");
    runs
}

/// Returns every event that `stream` has received by now, and the number of lost events.
fn take(machine: &Machine, stream: &mut Subscription) -> (Vec<Event>, u64) {
    assert!(machine.flush_events(), "events are not handed on");
    let (mut events, mut dropped) = (Vec::new(), 0);
    while let Some(delivery) = stream.try_next() {
        events.extend(delivery.events);
        dropped += delivery.dropped;
    }
    (events, dropped)
}

#[test]
fn every_call_of_busy_vcpus_is_counted_while_the_probe_changes_its_mechanism() {
    if rig("optimized and not, in turns").is_none() {
        return;
    }
    let cpus = u32::try_from(rig_cpus()).expect("few");
    let threads = cpus.to_string();
    let mut config = optimizing_guest(cpus, &["workload", "stdin-hold", &threads]);
    // Only the workload calls this function.
    config.probes = vec![probe(&format!("p {FUNCTION}"))];
    let mut running = Running::shared(&config);
    running.hear_no_more();
    running.wait_for("ready");
    let machine = running.machine.clone();
    let id = machine.probes()[0].id;
    // A second probe, which is unregistered during the test.
    let (inner, text) = ("do_getpgid", running.text("do_getpgid"));
    let leaving = running.register(probe(&format!("p {inner}")));
    // Each listing of probes first reads the records in the ring, which is much work for one processor.
    let mut hits = 0;
    let turns = rounds(12);
    for turn in 0..=turns {
        running.wait_while_running(|machine| {
            let probe = info(machine, id);
            assert_eq!(mechanism(&probe), Mechanism::Optimized);
            probe.counts.hits > hits + 100
        });
        if turn == turns {
            break;
        }
        machine.set_optimization(false).expect("the guest stops");
        let probe = info(&machine, id);
        assert_eq!(probe.mechanism, Some(Mechanism::Emulated));
        hits = probe.counts.hits;
        machine.set_optimization(true).expect("the guest stops");
    }
    assert!(info(&machine, leaving).counts.hits > 0);
    machine.unregister(&[leaving]).expect("registered");
    assert_eq!(running.text(inner), text);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let calls: i64 = values(&printed, "calls").into_iter().sum();
    let counts = info(&machine, id).counts;
    assert_eq!(i64::try_from(counts.hits), Ok(calls), "{counts:?}");
    assert_eq!(counts.missed, 0, "{counts:?}");
}

#[test]
fn tasks_that_are_preempted_in_detours_hold_nothing_up() {
    if rig("optimized probes in a preemptible kernel").is_none() {
        return;
    }
    let cpus = u32::try_from(rig_cpus()).expect("few").max(2);
    // Far more threads than processors, so that each is preempted again and again, at any point.
    let threads = (8 * cpus).to_string();
    let mut config = optimizing_guest(cpus, &["workload", "stdin-hold", &threads]);
    config.cmdline += " preempt=full";
    config.probes = [
        format!("p {FUNCTION}"),
        "p do_getpgid".to_owned(),
        format!("r{threads} {FUNCTION}"),
    ]
    .map(|definition| probe(&definition))
    .into();
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    for probe in machine.probes() {
        assert_eq!(mechanism(&probe), Mechanism::Optimized, "{}", probe.name);
    }
    let mut stream = machine.subscribe(Vec::new(), 1 << 16);
    let counting = spawn(move || {
        let mut counts = (0, 0);
        while let Some(delivery) = stream.blocking_next() {
            counts.0 += delivery.events.len() as u64;
            counts.1 += delivery.dropped;
        }
        counts
    });
    // Each listing of probes reads all finished records, even those after unfinished ones.
    let listed = |machine: &Machine| machine.probes().iter().map(|it| it.counts.hits).min();
    let last = Cell::new(listed(&machine));
    for _ in 0..rounds(20) {
        let before = last.get();
        running.wait_while_running(|machine| {
            last.set(listed(machine));
            last.get() > before.map(|hits| hits + 100)
        });
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let calls: i64 = values(&printed, "calls").into_iter().sum();
    let calls = u64::try_from(calls).expect("a number of calls");
    let (events, dropped) = counting.join().expect("no panic");
    eprintln!("{calls} calls, {events} events, {dropped} dropped");
    for probe in machine.probes() {
        let counts = probe.counts;
        let all = (counts.hits, counts.missed, counts.orphans);
        assert_eq!(all, (calls, 0, 0), "{}", probe.name);
    }
    assert_eq!(events + dropped, 3 * calls);
    assert!(events > 0);
}

/// Functions executed in every getpgid, in every timer interrupt, and between tasks.
const HOT: [&str; 12] = [
    "do_getpgid",
    "find_task_by_vpid",
    "__task_pid_nr_ns",
    "hrtimer_interrupt",
    "update_process_times",
    "scheduler_tick",
    "try_to_wake_up",
    "ktime_get",
    "kmem_cache_alloc",
    "kmem_cache_free",
    "handle_mm_fault",
    "vfs_write",
];

#[test]
fn hot_functions_carry_jumps_at_every_instruction_that_allows_one() {
    if rig("jumps in hot functions").is_some() {
        let offsets: &[u64] = match is_short() {
            true => &[0, 5],
            false => &[0, 1, 2, 3, 4, 5, 6],
        };
        jumps_at(offsets, [10, 5]);
    }
}

#[test]
fn hot_functions_carry_jumps_further_in_too() {
    if rig("jumps further in hot functions").is_some() {
        jumps_at(&[7, 8, 9, 10, 11, 12, 13], [2, 10]);
    }
}

/// Tries probes at these `offsets` from the entries of the hot functions, one offset after the other. More than
/// `more_than[0]` of them must become jumps over one instruction, and more than `more_than[1]` jumps over several.
fn jumps_at(offsets: &[u64], more_than: [u32; 2]) {
    let cpus = u32::try_from(rig_cpus()).expect("few");
    let threads = cpus.to_string();
    let mut running = Running::shared(&optimizing_guest(
        cpus,
        &["workload", "stdin-hold", &threads],
    ));
    running.hear_no_more();
    running.wait_for("ready");
    let machine = running.machine.clone();
    let hot = HOT.map(names::own);
    let original: Vec<Vec<u8>> = hot.iter().map(|name| running.text(name)).collect();
    // Number of jumps over one instruction, and over several.
    let mut jumps = [0, 0];
    let mut reasons = BTreeMap::new();
    for &offset in offsets {
        let specs: Vec<_> = hot
            .iter()
            .map(|name| probe(&format!("p {name}+{}", names::entry(name) + offset)))
            .collect();
        // Skips offsets that are not the start of an instruction or cannot be probed.
        let registered = machine.register_batch(&specs, Refusals::Skip);
        let mut ids = registered
            .unwrap_or_else(|error| panic!("{}", chain(&error)))
            .ids();
        if ids.is_empty() {
            continue;
        }
        // After this many calls, the guest has executed the jumps, and a wrong one would have crashed it.
        let own = running.register(probe("p __x64_sys_getpgid"));
        running.wait_while_running(|machine| info(machine, own).counts.hits > 200);
        for probe in infos(&machine, &ids) {
            match (probe.mechanism, &probe.unoptimized) {
                (Some(Mechanism::Optimized), _) => {
                    let at = probe.addr.expect("placed");
                    let (name, offset) = probe.symbol.expect("placed");
                    let index = hot
                        .iter()
                        .position(|hot| *hot == name)
                        .expect("one of them");
                    let code = &original[index][usize::try_from(offset).expect("small")..];
                    let len = instruction_len(code, at).expect("an instruction");
                    jumps[usize::from(len < 5)] += 1;
                }
                (_, Some(why)) => *reasons.entry(reason(why)).or_insert(0) += 1,
                other => panic!("{other:?}"),
            }
        }
        ids.push(own);
        machine.unregister(&ids).expect("registered");
    }
    for (name, original) in hot.iter().zip(&original) {
        assert_eq!(&running.text(name), original, "{name}");
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    eprintln!(
        "{} jumps over one instruction, {} over several",
        jumps[0], jumps[1]
    );
    for (why, count) in reasons {
        eprintln!("{count:>5}  {why}");
    }
    assert!(
        jumps[0] > more_than[0] && jumps[1] > more_than[1],
        "{jumps:?}"
    );
}

/// Returns why a probe is not optimized, without addresses.
fn reason(why: &Unoptimized) -> String {
    let text = why.to_string();
    let words = text.split(' ').filter(|word| !word.contains("0x"));
    words.collect::<Vec<_>>().join(" ")
}
