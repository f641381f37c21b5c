//! Tests that a guest reports no lockup and no stall after a pause.
//!
//! `HVPROBE_PAUSE_SECONDS` adds a pause of this length, of a guest with 4 GiB and 4 CPUs.

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use hvprobe_machine::MachineConfig;
use hvprobe_tests::progress;
use hvprobe_tests::rig::{Running, assert_clean, info, optimizing_guest, probe, rig};

/// Shortest timeouts that the kernel accepts.
const WATCHDOGS: &str = " rcupdate.rcu_cpu_stall_timeout=3 watchdog_thresh=1";
/// Duration of a pause: several times these timeouts.
const PAUSE: Duration = Duration::from_secs(12);

#[test]
fn a_guest_that_was_paused_sees_no_stall() {
    if rig("a pause").is_some() {
        pause(optimizing_guest(2, &[]), PAUSE);
    }
}

#[test]
fn a_large_guest_that_was_paused_for_long_sees_no_stall() {
    let seconds = env::var("HVPROBE_PAUSE_SECONDS").ok();
    if rig("a long pause").is_none() {
        return;
    }
    let Some(seconds) = seconds else {
        eprintln!("skipped: HVPROBE_PAUSE_SECONDS says for how long");
        return;
    };
    let config = MachineConfig {
        memory: 4 << 30,
        ..optimizing_guest(4, &[])
    };
    let seconds = seconds.parse().expect("a number of seconds");
    pause(config, Duration::from_secs(seconds));
}

fn pause(mut config: MachineConfig, length: Duration) {
    let command = format!(
        "echo 1 > /proc/sys/kernel/watchdog_thresh; workload held hammer 2 {}",
        config.cpus
    );
    config.command = ["sh", "-c", &command].map(str::to_owned).to_vec();
    config.cmdline.push_str(WATCHDOGS);
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let calls = running.register(probe("p __x64_sys_getpgid"));
    machine.console_input(b"\n");
    // Pauses the guest in the middle of its work.
    running.wait_while_running(|machine| info(machine, calls).counts.hits > 100);
    machine.pause().expect("it runs");
    let since = Instant::now();
    while let Some(left) = length.checked_sub(since.elapsed()) {
        thread::sleep(left.min(progress::EVERY));
        progress::print(format_args!("paused for {:?}", since.elapsed()));
    }
    machine.resume().expect("it stands");
    running.wait_for("over");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
