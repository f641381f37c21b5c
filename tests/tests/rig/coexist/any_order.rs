//! Tests a guest that traces and probes functions at random, while we probe the same functions at random.
//!
//! Invariant: the guest logs no complaint, its own probes and ours can all be removed, the functions are restored,
//! and no event is lost. A seed decides all steps, and the test prints it. `HVPROBE_STRESS_SEED` sets it, which
//! repeats the steps except for the relative timing of guest and host. `HVPROBE_STRESS_SECONDS` makes the test
//! longer.

use std::env;
use std::time::{Duration, Instant};

use hvprobe_machine::{Machine, ProbeId};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::names;
use hvprobe_tests::progress::Progress;
use hvprobe_tests::rig::{Running, assert_clean, optimizing_guest, probe, rig, rounds, values};

/// Functions that the workload calls, or that every task calls.
const FUNCTIONS: [&str; 4] = ["__x64_sys_getpgid", "do_getpgid", "vfs_read", "ksys_read"];
/// Minimum number of steps that the guest takes.
const STEPS: usize = 80;
/// Maximum number of our probes.
const MOST: usize = 12;

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// Returns a random place in a random function.
fn place(random: &mut Random) -> String {
    let function = random.pick(&FUNCTIONS);
    match random.below(3) {
        0 => function.to_owned(),
        1 => format!("{function}+{}", names::behind_entry(function)),
        // May be in the middle of an instruction, which both the guest and we refuse.
        _ => format!("{function}+{}", random.below(24)),
    }
}

/// Returns a random step of the guest, as a command of its shell. A step that is impossible is ignored.
fn step(random: &mut Random) -> String {
    let number = random.below(4);
    let event = format!("events/kprobes/own{number}");
    match random.below(8) {
        0 => format!(
            "echo {} > set_ftrace_filter; echo function > current_tracer",
            FUNCTIONS.join(" ")
        ),
        1 => "echo nop > current_tracer".to_owned(),
        2 | 3 => format!(
            "echo p:own{number} {} >> kprobe_events && echo 1 > {event}/enable",
            place(random)
        ),
        4 => format!(
            "echo r:own{number} {} >> kprobe_events && echo 1 > {event}/enable",
            random.pick(&FUNCTIONS)
        ),
        5 | 6 => format!("echo 0 > {event}/enable; echo -:own{number} >> kprobe_events"),
        _ => "workload calls getpgid 20".to_owned(),
    }
}

/// Makes a random change to our probes or settings. The change may be refused.
fn change(random: &mut Random, machine: &Machine, ids: &mut Vec<ProbeId>) {
    let chosen = |random: &mut Random, ids: &[ProbeId]| {
        let which: Vec<usize> = (0..ids.len()).collect();
        (!which.is_empty()).then(|| random.pick(&which))
    };
    match random.below(8) {
        0..=2 if ids.len() < MOST => {
            let kind = if random.below(3) == 0 { "r" } else { "p" };
            let definition = match kind {
                "r" => format!("r {}", random.pick(&FUNCTIONS)),
                _ => format!("p {}", place(random)),
            };
            if let Ok(new) = machine.register(&[probe(&definition)]) {
                ids.extend(new);
            }
        }
        3 | 4 => {
            if let Some(which) = chosen(random, ids) {
                machine
                    .unregister(&[ids.swap_remove(which)])
                    .expect("it is ours");
            }
        }
        5 => {
            if let Some(which) = chosen(random, ids) {
                machine.disable(&[ids[which]]).expect("it is ours");
            }
        }
        6 => {
            if let Some(which) = chosen(random, ids) {
                let _maybe = machine.enable(&[ids[which]]);
            }
        }
        _ => {
            let on = random.below(4) != 0;
            machine.set_optimization(on).expect("the guest stops");
        }
    }
}

#[test]
fn whatever_the_guest_and_we_do_neither_comes_in_the_others_way() {
    if rig("the guest's probes and ours in any order").is_none() {
        return;
    }
    let seed = setting("HVPROBE_STRESS_SEED").unwrap_or(1);
    let least = Duration::from_secs(setting("HVPROBE_STRESS_SECONDS").unwrap_or(0));
    eprintln!("seed {seed}");
    let mut random = Random::new(&[seed]);
    // Errors of steps are ignored.
    let script = "cd /sys/kernel/tracing; echo ready; \
                  while read step && test \"$step\" != end; do \
                    eval \"$step\" >/dev/null 2>&1; echo \"done: 1\"; \
                  done; \
                  echo nop > current_tracer; echo > set_ftrace_filter; \
                  for it in events/kprobes/*/enable; do echo 0 > $it; done 2>/dev/null; \
                  echo > kprobe_events; workload calls getpgid 20; echo \"left: $(wc -l < kprobe_events)\"; \
                  read line";
    let mut running = Running::boot(optimizing_guest(2, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let texts = FUNCTIONS.map(|function| running.text(function));
    let mut progress = Progress::start();
    let (begun, mut ids, mut steps) = (Instant::now(), Vec::new(), 0);
    while steps < rounds(STEPS) || begun.elapsed() < least {
        machine.console_input(format!("{}\n", step(&mut random)).as_bytes());
        for _ in 0..random.below(4) {
            change(&mut random, &machine, &mut ids);
        }
        steps += 1;
        running.wait_printed(|printed| values(printed, "done").len() == steps);
        running.forget_events();
        progress.print(format_args!("{steps} steps, {} probes", ids.len()));
    }
    machine.console_input(b"end\n");
    let printed = running.wait_printed(|printed| values(printed, "left").len() == 1);
    assert_eq!(values(&printed, "left"), [0], "{printed}");
    machine.set_optimization(true).expect("the guest stops");
    machine.unregister(&ids).expect("they are ours");
    // The guest removes its own jumps with a delay.
    running.wait_while_running(|machine| {
        let text = |function: &str| {
            let found = machine
                .image()
                .symbols()
                .lookup(function)
                .expect("it was found");
            let mut text = vec![0; usize::try_from(found.size).expect("small")];
            machine.read_kernel(found.addr, &mut text).map(|()| text)
        };
        let same = |(function, before): (&&str, &Vec<u8>)| {
            text(function).is_ok_and(|text| text == *before)
        };
        FUNCTIONS.iter().zip(&texts).all(same)
    });
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
}
