//! Tests probes that are registered and unregistered at functions that sleep. Calls wait in the code of
//! unregistered probes, often of several at once, and every call must return to its caller.
//!
//! A seed decides the random choices. The test prints it, `HVPROBE_CHURN_SEED` sets it, and `HVPROBE_CHURN_SECONDS`
//! makes the test longer.

use std::env;
use std::time::{Duration, Instant};

use hvprobe_machine::{Mechanism, ProbeId, ProbeSpec};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::names;
use hvprobe_tests::progress::Progress;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, info, optimizing_guest, probe, rig, rounds,
};

/// Functions in which the guest's loops sleep or spend most of their time.
const FUNCTIONS: [&str; 10] = [
    "pipe_read",
    "pipe_write",
    "vfs_read",
    "vfs_write",
    "ksys_read",
    "do_nanosleep",
    "hrtimer_nanosleep",
    "schedule_hrtimeout_range",
    "do_sys_poll",
    "do_wait",
];
/// Maximum number of probes at a time.
const MOST: usize = 12;
/// Minimum number of changes.
const CHANGES: u32 = 40;
/// Maximum time for which changes continue because no unregistered probe has had a hit.
const PATIENCE: Duration = Duration::from_secs(90);

/// Four loops that block and wake, until a line is read.
const LOOPS: &str = "n=0; while [ $n -lt 4 ]; do \
    (while [ ! -e /tmp/over ]; do usleep 2000; echo; done | cat >/dev/null) & n=$((n+1)); done; \
    echo ready; read line; : >/tmp/over; wait; echo finished";

fn setting(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Returns a random probe: a return probe with 4096 instances, so that others soon need its memory; a return probe
/// with the default number of instances; or a kprobe.
fn newcomer(random: &mut Random, functions: &[&str]) -> ProbeSpec {
    let function = random.pick(functions);
    let mut spec = probe(&match random.below(10) {
        0..5 => format!("r4096 {function}"),
        5..8 => format!("r {function}"),
        _ => format!("p {function}"),
    });
    spec.mechanism = match random.below(5) {
        0 => Some(Mechanism::Emulated),
        1 => Some(Mechanism::Stepped),
        _ => None,
    };
    spec.maxactive_auto = spec.is_return() && random.chance(15);
    spec.actions.post = !spec.is_return() && random.chance(20);
    spec
}

/// Registers and unregisters random probes, one at a time, in a guest with `cpus` CPUs.
fn every_call_comes_home(cpus: u32) {
    let seed = setting("HVPROBE_CHURN_SEED").unwrap_or(u64::from(cpus));
    let time = Duration::from_secs(setting("HVPROBE_CHURN_SECONDS").unwrap_or(0));
    eprintln!("HVPROBE_CHURN_SEED={seed}");
    let mut random = Random::new(&[seed]);
    let mut running = Running::shared(&optimizing_guest(cpus, &["sh", "-c", LOOPS]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let functions: Vec<&str> = names::known(&FUNCTIONS)
        .into_iter()
        .map(names::own)
        .collect();
    let original: Vec<Vec<u8>> = functions.iter().map(|name| running.text(name)).collect();
    let (started, mut progress) = (Instant::now(), Progress::start());
    let mut here: Vec<ProbeId> = Vec::new();
    let (mut changes, mut refused, mut hits) = (0_u32, 0, 0);
    // A guest that gets little time on a busy machine hits a probe only now and then.
    let none_yet = |hits| hits == 0 && started.elapsed() < PATIENCE;
    while changes < rounds(CHANGES) || started.elapsed() < time || none_yet(hits) {
        changes += 1;
        if here.len() < MOST && (here.is_empty() || random.chance(50)) {
            match machine.register(&[newcomer(&mut random, &functions)]) {
                Ok(ids) => here.extend(ids),
                // The memory for instances is limited.
                Err(error) => {
                    let why = chain(&error);
                    assert!(why.contains("instances"), "{why}");
                    refused += 1;
                }
            }
        } else {
            let n = random.below(here.len() as u64);
            let id = here.swap_remove(usize::try_from(n).expect("small"));
            hits += info(&machine, id).counts.hits;
            if let Err(error) = machine.unregister(&[id]) {
                panic!("a change failed: {}", chain(&error));
            }
        }
        progress.print(format_args!("{changes} changes, {hits} hits"));
    }
    if let Err(error) = machine.unregister(&here) {
        panic!("the last change failed: {}", chain(&error));
    }
    for (name, original) in functions.iter().zip(&original) {
        assert_eq!(&running.text(name), original, "{name}");
    }
    let took = started.elapsed();
    eprintln!("{changes} changes in {took:?}, {refused} refused, {hits} hits of those that left");
    assert!(hits > 0);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert!(printed.contains("finished"), "{printed}");
    assert_clean(&ending, &printed, 0);
}

#[test]
fn calls_of_two_vcpus_come_home_whatever_comes_and_goes() {
    if rig("a churn with 2 vCPUs").is_some() {
        every_call_comes_home(2);
    }
}

#[test]
fn calls_of_four_vcpus_come_home_whatever_comes_and_goes() {
    if rig("a churn with 4 vCPUs").is_some() {
        every_call_comes_home(4);
    }
}

#[test]
fn a_call_that_sleeps_while_others_take_its_probes_place_comes_home() {
    if rig("a call that sleeps").is_none() {
        return;
    }
    let commands = "mkfifo /tmp/pipe; exec 3<>/tmp/pipe; echo ready; read line; \
        cat </tmp/pipe 3>&- & read line; exec 3>&-; wait; echo finished";
    let mut running = Running::shared(&optimizing_guest(1, &["sh", "-c", commands]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let register = |definitions: &[&str]| {
        let specs: Vec<ProbeSpec> = definitions.iter().map(|text| probe(text)).collect();
        let ids = machine.register(&specs);
        ids.unwrap_or_else(|error| panic!("{}", chain(&error)))
    };
    let unregister = |ids: &[ProbeId]| {
        if let Err(error) = machine.unregister(ids) {
            panic!("{}", chain(&error));
        }
    };
    let read = names::own("pipe_read");
    let sleeping = ["r4096:a", "r:b", "p:entry"].map(|kind| format!("{kind} {read}"));
    let sleeping = register(&sleeping.each_ref().map(String::as_str));
    machine.console_input(b"\n");
    running.wait_while_running(|machine| info(machine, sleeping[2]).counts.hits > 0);
    // Both return probes follow the reader's call, but only the stub of the second one is on its stack.
    unregister(&sleeping[..1]);
    for _ in 0..3 {
        let others = register(&["r4096:c vfs_write", "r4096:d vfs_read"]);
        unregister(&others);
    }
    machine.console_input(b"\n");
    running.wait_for("finished");
    assert_eq!(info(&machine, sleeping[1]).counts.hits, 1);
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
