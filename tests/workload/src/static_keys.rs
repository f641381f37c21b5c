//! Makes the kernel rewrite its own text by flipping jump labels and static calls.
//!
//! Each switch is set to its other value and back, so the kernel is left as it was.

use std::error::Error;
use std::io;

use crate::files;

/// A file whose value decides the state of a static key: the file and two values.
type Switch = (&'static str, [&'static str; 2]);

const SWITCHES: [Switch; 5] = [
    // `sched_schedstats`, in the scheduler's hot paths.
    ("/proc/sys/kernel/sched_schedstats", ["1", "0"]),
    // `delayacct_key`.
    ("/proc/sys/kernel/task_delayacct", ["1", "0"]),
    // `timers_migration_enabled`, in the timer interrupt.
    ("/proc/sys/kernel/timer_migration", ["0", "1"]),
    // Tracepoints: a key and a static call each.
    (
        "/sys/kernel/tracing/events/sched/sched_switch/enable",
        ["1", "0"],
    ),
    (
        "/sys/kernel/tracing/events/raw_syscalls/sys_enter/enable",
        ["1", "0"],
    ),
];

/// Flips every switch to its other value and back `count` times. Prints the number of flips.
pub(crate) fn run(count: u64) -> Result<(), Box<dyn Error>> {
    let mut usable = Vec::new();
    for switch in SWITCHES {
        match files::read(switch.0) {
            Ok(_) => usable.push(switch),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                println!("not in this kernel: {}", switch.0);
            }
            Err(error) => return Err(error.into()),
        }
    }
    if usable.is_empty() {
        return Err("this kernel has none of the switches".into());
    }
    for _ in 0..count {
        for (path, values) in &usable {
            for value in values {
                files::write(path, value)?;
            }
        }
    }
    println!("switches: {}", usable.len());
    println!("flips: {}", 2 * count * u64::try_from(usable.len())?);
    Ok(())
}
