//! What a guest makes of a pause: it stood still, and reports no lockup and no stall afterwards.

use std::thread;
use std::time::Duration;

use hvprobe_tests::rig::{Running, assert_clean, info, optimizing_guest, probe, rig};

/// The shortest timeouts the kernel takes.
const WATCHDOGS: &str = " rcupdate.rcu_cpu_stall_timeout=3 watchdog_thresh=1";
/// Several of them.
const PAUSE: Duration = Duration::from_secs(12);

#[test]
fn a_guest_that_was_paused_sees_no_stall() {
    if rig("a pause").is_none() {
        return;
    }
    let command = "echo 1 > /proc/sys/kernel/watchdog_thresh; workload held hammer 2 2";
    let mut config = optimizing_guest(2, &["sh", "-c", command]);
    config.cmdline.push_str(WATCHDOGS);
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let calls = running.register(probe("p __x64_sys_getpgid"));
    machine.console_input(b"\n");
    // In the middle of what it does.
    running.wait_while_running(|machine| info(machine, calls).counts.hits > 100);
    machine.pause().expect("it runs");
    thread::sleep(PAUSE);
    machine.resume().expect("it stands");
    running.wait_for("over");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
