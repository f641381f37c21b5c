//! Tests busy guests: every call is accounted for while probes are registered and unregistered at random, and the
//! end of a guest that dies during hits is reported.
//!
//! The workload counts its own calls by the kernel function they enter, and rests between stretches. A probe that
//! stays registered over a stretch must have counted the same number of calls. A seed decides all random choices.
//! The test prints it, `HVPROBE_STRESS_SEED` sets it, and `HVPROBE_STRESS_SECONDS` makes the test longer.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::time::{Duration, Instant};

use hvprobe_engine::{Refused, RegisterError};
use hvprobe_machine::{EndReason, Machine, MachineConfig, Mechanism, ProbeId, ProbeSpec, State};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::progress::Progress;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, infos, is_short, probe, rig, rig_cpus, rounds,
    values,
};
use hvprobe_tests::{names, wait};

/// Functions that the kernel enters once for each call that the workload counts under their name.
const COUNTED: [&str; 11] = [
    "__x64_sys_getpgid",
    "__x64_sys_getsid",
    "__x64_sys_nanosleep",
    "pipe_write",
    "pipe_read",
    "futex_wake_op",
    "__x64_sys_fork",
    "__x64_sys_waitid",
    "__x64_sys_mremap",
    "__x64_sys_newstat",
    "__x64_sys_sched_setaffinity",
];

/// Further functions on which other probes are registered and unregistered.
const BUSY: [&str; 13] = [
    "do_getpgid",
    "hrtimer_nanosleep",
    "vfs_read",
    "vfs_write",
    "handle_mm_fault",
    "path_openat",
    "dput",
    "try_to_wake_up",
    "kmem_cache_alloc",
    "do_exit",
    "get_signal",
    "hrtimer_interrupt",
    "wake_up_new_task",
];

/// Functions that every CPU enters very often under any load: they read the time, schedule tasks, handle interrupts
/// and allocate memory. Probed only with jumps, because with exits at all their calls hardly anything else would
/// run.
const HOT: [&str; 17] = [
    "ktime_get",
    "update_process_times",
    "scheduler_tick",
    "tick_sched_timer",
    "hrtimer_start_range_ns",
    "enqueue_task_fair",
    "dequeue_task_fair",
    "update_curr",
    "pick_next_task_fair",
    "finish_task_switch.isra.0",
    "ttwu_do_activate",
    "generic_smp_call_function_single_interrupt",
    "rcu_sched_clock_irq",
    "kmem_cache_free",
    "__alloc_pages",
    "irq_exit_rcu",
    "update_load_avg",
];

/// Maximum number of calls of a counted function that are followed at a time: more than the workload has tasks.
const MAXACTIVE: usize = 64;
/// Number of changes in each stretch.
const CHANGES: usize = 25;
/// Minimum number of hits of the staying probes between two changes.
const PACE: u64 = 100;
/// Exclusive upper bound of the offsets that are probed in a function.
const REACH: u64 = 48;

fn setting(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Probes that are registered and unregistered at random.
struct Crowd {
    random: Random,
    /// Functions to probe whose calls the workload counts.
    counted: Vec<&'static str>,
    /// Further functions to probe.
    busy: Vec<&'static str>,
    /// Probes that are registered at present.
    here: Vec<ProbeId>,
    changes: u64,
    accepted: usize,
    /// Numbers of probes in refused batches, by the reason.
    refused: BTreeMap<&'static str, usize>,
}

impl Crowd {
    /// Registers, unregisters, disables or enables random probes.
    fn change(&mut self, running: &Running) {
        let machine = &running.machine;
        self.changes += 1;
        match self.random.below(10) {
            0..4 => {
                let batch: Vec<ProbeSpec> = (0..=self.random.below(6))
                    .map(|_| self.newcomer())
                    .collect();
                match machine.register(&batch) {
                    Ok(ids) => {
                        self.accepted += ids.len();
                        self.here.extend(ids);
                    }
                    // Nothing of the batch was registered.
                    Err(error) => {
                        let why = expected(&error).unwrap_or_else(|| panic!("{}", chain(&error)));
                        *self.refused.entry(why).or_default() += batch.len();
                    }
                }
            }
            4..7 => {
                let chosen = self.some();
                self.here.retain(|id| !chosen.contains(id));
                must(machine.unregister(&chosen));
            }
            7 => must(machine.disable(&self.some())),
            _ => must(machine.enable(&self.some())),
        }
    }

    fn newcomer(&mut self) -> ProbeSpec {
        let function = if self.random.chance(50) {
            self.random.pick(&self.counted)
        } else {
            self.random.pick(&self.busy)
        };
        if self.random.chance(30) {
            return ProbeSpec {
                maxactive_auto: self.random.chance(50),
                ..probe(&format!("r {function}"))
            };
        }
        let offset = if self.random.chance(60) {
            0
        } else {
            self.random.below(REACH)
        };
        let mut spec = probe(&format!("p {function}+{offset}"));
        spec.disabled = self.random.chance(10);
        spec.mechanism = match self.random.below(4) {
            0 => Some(Mechanism::Boosted),
            1 => Some(Mechanism::Stepped),
            _ => None,
        };
        spec.actions.post = self.random.chance(20);
        spec
    }

    fn some(&mut self) -> Vec<ProbeId> {
        let random = &mut self.random;
        let here = self.here.iter().copied();
        here.filter(|_| random.chance(40)).collect()
    }
}

/// Returns a name for this refusal, if a randomly chosen place may be refused for that reason.
fn expected(error: &RegisterError) -> Option<&'static str> {
    let RegisterError::Refused { source, .. } = error else {
        return None;
    };
    match source {
        Refused::Boundary(_) => Some("not the start of an instruction"),
        Refused::OffsetOutside { .. } | Refused::Padding { .. } => Some("outside the function"),
        Refused::Forbidden { .. } | Refused::NeverReturns { .. } => Some("forbidden"),
        Refused::Instruction { .. } => Some("cannot be carried out elsewhere"),
        Refused::Mechanism { .. } => Some("can only be emulated"),
        _ => None,
    }
}

fn must<E: std::error::Error>(changed: Result<(), E>) {
    if let Err(error) = changed {
        panic!("a change failed: {}", chain(&error));
    }
}

/// Returns the sum of the probes' hits.
fn hits(machine: &Machine, ids: &[ProbeId]) -> u64 {
    let probes = machine.probes();
    let of_these = probes.iter().filter(|probe| ids.contains(&probe.id));
    of_these.map(|probe| probe.counts.hits).sum()
}

/// Returns the number of calls of each counted function since the workload's start, as it printed them last.
fn calls(printed: &str) -> HashMap<&'static str, i64> {
    let last = |function| values(printed, function).last().copied();
    COUNTED
        .iter()
        .map(|&function| (function, last(function).expect("the workload counts it")))
        .collect()
}

/// Makes random changes to the probes of a guest with `cpus` CPUs, and checks the counts after each stretch.
/// Continues for `stretches` stretches, or for `HVPROBE_STRESS_SECONDS` seconds if that is longer.
fn every_call_is_accounted_for(cpus: u32, stretches: u32, optimize: bool) {
    let seed = setting("HVPROBE_STRESS_SEED").unwrap_or(1);
    let least = Duration::from_secs(setting("HVPROBE_STRESS_SECONDS").unwrap_or(0));
    eprintln!("HVPROBE_STRESS_SEED={seed}");
    let command = ["workload", "stress-directed", &seed.to_string()];
    let mut running = Running::shared(&MachineConfig {
        optimize,
        ..guest(cpus, &command)
    });
    let mut before = calls(&running.wait_for("ready"));
    let machine = running.machine.clone();
    let hot = if optimize { &HOT[..] } else { &[] };
    let here = |functions: &[&'static str]| names::known(functions).into_iter().map(names::own);
    let busy: Vec<_> = here(&BUSY).chain(here(hot)).collect();
    // The workload names its calls as in Linux 6.1.
    let known = names::known(&COUNTED);
    let counted: Vec<_> = known.iter().map(|function| names::own(function)).collect();
    let functions = [&counted[..], &busy].concat();
    let original: Vec<Vec<u8>> = functions.iter().map(|name| running.text(name)).collect();
    // A probe and a return probe on each counted function stay registered.
    let staying: Vec<ProbeSpec> = counted
        .iter()
        .flat_map(|function| {
            let calls = probe(&format!("p {function}"));
            let returns = if function.contains("nanosleep") {
                ProbeSpec {
                    maxactive_auto: true,
                    ..probe(&format!("r {function}"))
                }
            } else {
                probe(&format!("r{MAXACTIVE} {function}"))
            };
            [calls, returns]
        })
        .collect();
    let staying = machine
        .register(&staying)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let mut hits_before: HashMap<ProbeId, u64> = staying.iter().map(|&id| (id, 0)).collect();
    let mut crowd = Crowd {
        random: Random::new(&[seed]),
        counted,
        busy,
        here: Vec::new(),
        changes: 0,
        accepted: 0,
        refused: BTreeMap::new(),
    };
    let started = Instant::now();
    let mut progress = Progress::start();
    let mut stretch = 0;
    while stretch < stretches || started.elapsed() < least {
        stretch += 1;
        machine.console_input(b"go\n");
        running.wait_printed(|printed| {
            printed.matches("going").count() >= usize::try_from(stretch).expect("a few")
        });
        for _ in 0..CHANGES {
            let seen = hits(&machine, &staying);
            let hits = || hits(&machine, &staying);
            wait::until("hits", hits, |now| *now >= seen + PACE);
            crowd.change(&running);
        }
        machine.console_input(b"stop\n");
        let now = calls(&running.wait_for(&format!("stretch {stretch} is over")));
        for (pair, function) in staying.chunks(2).zip(&known) {
            let made = now[function] - before[function];
            for &id in pair {
                let probe = info(&machine, id);
                let counts = probe.counts;
                let what = format!(
                    "stretch {stretch} of seed {seed}, {}: {counts:?}",
                    probe.definition
                );
                let new = counts.hits - hits_before.insert(id, counts.hits).unwrap_or(0);
                assert_eq!(i64::try_from(new).expect("a count"), made, "{what}");
                // There is an instance for every task, and all calls return.
                assert_eq!((counts.missed, counts.orphans), (0, 0), "{what}");
            }
        }
        before = now;
        progress.print(format_args!(
            "{stretch} stretches, {} changes",
            crowd.changes
        ));
    }
    let probes = machine.probes();
    let hits: u64 = probes.iter().map(|probe| probe.counts.hits).sum();
    let missed: u64 = probes.iter().map(|probe| probe.counts.missed).sum();
    let made: i64 = before.values().sum();
    eprintln!(
        "{stretch} stretches of {made} calls, {:?}: {} changes, {} probes came, refused were {:?}; \
         those that are left had {hits} hits, {missed} missed",
        started.elapsed(),
        crowd.changes,
        crowd.accepted,
        crowd.refused
    );
    assert!(crowd.accepted > 10);
    let all: Vec<ProbeId> = probes.iter().map(|probe| probe.id).collect();
    must(machine.unregister(&all));
    for (name, original) in functions.iter().zip(&original) {
        assert_eq!(&running.text(name), original, "{name}");
    }
    machine.console_input(b"end\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn every_call_of_two_vcpus_is_accounted_for_while_probes_come_and_go() {
    if rig("stress with 2 vCPUs").is_some() {
        every_call_is_accounted_for(2, rounds(5), false);
    }
}

#[test]
fn every_call_is_accounted_for_while_jumps_and_breakpoints_take_turns() {
    if rig("stress with jumps").is_some() {
        every_call_is_accounted_for(2, rounds(5), true);
    }
}

#[test]
fn every_call_of_four_vcpus_is_accounted_for_while_probes_come_and_go() {
    if rig("stress with 4 vCPUs").is_some() {
        every_call_is_accounted_for(4, 2, false);
    }
}

#[test]
fn every_call_of_four_vcpus_is_accounted_for_while_jumps_and_breakpoints_take_turns() {
    if rig("stress with jumps and 4 vCPUs").is_some() {
        every_call_is_accounted_for(4, 2, true);
    }
}

/// Boots a guest with probes on functions that all its CPUs call, and makes it end in the way `how`.
fn dying(how: &str) -> Running {
    let cpus = u32::try_from(rig_cpus().clamp(1, 2)).expect("two at most");
    let mut config = guest(cpus, &["workload", "die", how]);
    if how == "triple" {
        config.cmdline += " reboot=t";
    }
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let specs = [
        probe("p __x64_sys_getpgid"),
        probe("r __x64_sys_getpgid"),
        ProbeSpec {
            mechanism: Some(Mechanism::Stepped),
            ..probe("p do_getpgid")
        },
    ];
    let ids = machine
        .register(&specs)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let hits = || infos(&machine, &ids).into_iter().map(|it| it.counts.hits);
    wait::until(
        "hit of each probe",
        || hits().collect::<Vec<_>>(),
        |hits| !hits.contains(&0),
    );
    machine.console_input(b"\n");
    running
}

#[test]
fn guests_that_die_amid_hits_are_reported() {
    if rig("guests that die").is_none() {
        return;
    }
    let ways = ["panic", "triple", "reboot"];
    for how in &ways[..if is_short() { 2 } else { 3 }] {
        let mut running = dying(how);
        let machine = running.machine.clone();
        let (ending, printed) = running.end();
        let expected = match *how {
            "triple" => matches!(ending.reason, Some(EndReason::TripleFault(_))),
            _ => ending.reason == Some(EndReason::Reset),
        };
        assert!(expected, "{how}: {ending:?}:\n{printed}");
        assert_eq!(ending.guest_status, None, "{how}");
        assert!(matches!(machine.status().state, State::Stopped(_)), "{how}");
        // The machine still answers requests.
        assert!(machine.pause().is_err(), "{how}");
        assert!(machine.register(&[probe("p vfs_read")]).is_err(), "{how}");
        let _ = machine.probes();
    }
}

#[test]
fn a_guest_that_hangs_amid_hits_can_be_probed_and_stopped() {
    if rig("a guest that hangs").is_none() {
        return;
    }
    let mut running = dying("hang");
    running.wait_for("end Kernel panic");
    let machine = running.machine.clone();
    assert_eq!(machine.status().state, State::Running);
    let id = running.register(probe("p vfs_read"));
    must(machine.unregister(&[id]));
    let ending = machine.stop();
    assert_eq!(ending.reason, EndReason::Stopped);
    assert_eq!(machine.probes(), []);
}
