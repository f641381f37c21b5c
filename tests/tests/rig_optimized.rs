//! Probes without exits, on a stock guest.

use std::thread::{JoinHandle, spawn};

use hvprobe_introspect::event::EventKind;
use hvprobe_tests::rig::{
    Running, assert_clean, info, optimizing_guest, probe, rig, rig_cpus, values,
};
use hvprobe_vmm::machine::{Event, Machine, Mechanism, ProbeInfo};

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
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let stream = follow(&machine);
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
    let (events, dropped) = stream.join().expect("no panic");
    // A busy host may not keep up; what it loses is counted.
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
    const CALLS: usize = 5_000;
    if rig("an optimized return probe").is_none() {
        return;
    }
    let calls = CALLS.to_string();
    let mut config = optimizing_guest(1, &["workload", "held", "calls", "getpgid", &calls]);
    let shared = ["r8:outer", "p:entry", "r8:inner"];
    config.probes = shared
        .map(|kind| probe(&format!("{kind} {FUNCTION}")))
        .into();
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let stream = follow(&machine);
    let ids = machine
        .probes()
        .iter()
        .map(|probe| probe.id)
        .collect::<Vec<_>>();
    let runs = exits(&machine);
    machine.console_input(b"\n");
    running.wait_for("calls:");
    let runs = exits(&machine) - runs;
    assert!(runs < CALLS as u64 / 10, "{runs} exits for {CALLS} calls");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let (events, dropped) = stream.join().expect("no panic");
    assert_eq!(events.len() as u64 + dropped, 3 * CALLS as u64);
    for probe in machine.probes() {
        let counts = probe.counts;
        let all = (counts.hits, counts.missed, counts.orphans);
        assert_eq!(all, (CALLS as u64, 0, 0), "{}", probe.name);
    }
    let mut callers = Vec::new();
    for event in &events {
        match event.kind {
            EventKind::Return(call) => {
                assert!(call.entry_tsc < event.guest_tsc, "{event:?}");
                assert_eq!(call.entry.rip, machine.probes()[0].addr.expect("placed").0);
                assert_eq!(event.regs.rsp, call.entry.rsp + 8);
                callers.push(event.regs.rip);
            }
            EventKind::Hit => assert_eq!(event.probe, ids[1]),
            other => panic!("{other:?}"),
        }
    }
    // Which of the two came first makes no difference to what they tell.
    callers.sort_unstable();
    callers.dedup();
    assert_eq!(callers.len(), 1, "{callers:x?}");
}

fn exits(machine: &Machine) -> u64 {
    machine.pause().expect("running");
    let runs = machine.ioctls()[0].run;
    machine.resume().expect("paused");
    runs
}

/// Every event of a machine until it ends, and how many were lost.
fn follow(machine: &Machine) -> JoinHandle<(Vec<Event>, u64)> {
    let mut stream = machine.subscribe(Vec::new(), 1 << 16);
    spawn(move || {
        let (mut events, mut dropped) = (Vec::new(), 0);
        while let Some(delivery) = stream.blocking_next() {
            events.extend(delivery.events);
            dropped += delivery.dropped;
        }
        (events, dropped)
    })
}

#[test]
fn every_call_of_busy_vcpus_is_counted_while_the_probe_changes_its_mechanism() {
    if rig("optimized and not, in turns").is_none() {
        return;
    }
    let cpus = u32::try_from(rig_cpus()).expect("few");
    let threads = cpus.to_string();
    let mut running = Running::boot(optimizing_guest(
        cpus,
        &["workload", "stdin-hold", &threads],
    ));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let text = running.text(FUNCTION);
    let id = running.register(probe(&format!("p {FUNCTION}")));
    for _ in 0..50 {
        assert_eq!(mechanism(&info(&machine, id)), Mechanism::Optimized);
        machine.set_optimization(false).expect("the guest stops");
        assert_eq!(info(&machine, id).mechanism, Some(Mechanism::Emulated));
        machine.set_optimization(true).expect("the guest stops");
        let hits = info(&machine, id).counts.hits;
        running.wait_while_running(|machine| info(machine, id).counts.hits > hits + 100);
    }
    machine.unregister(&[id]).expect("registered");
    assert_eq!(running.text(FUNCTION), text);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    assert!(!values(&printed, "calls").is_empty());
}
