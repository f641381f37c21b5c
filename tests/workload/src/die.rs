//! Ends or stops the guest while calls are being made.

use std::error::Error;
use std::{fs, io};

use crate::files;
use crate::hammer;
use crate::sys::{self, checked};

const SYSRQ: &str = "/proc/sysrq-trigger";

/// How the guest ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// A kernel panic; what follows is up to the command line (`panic=`).
    Panic,
    /// A reset by this CPU while the others still run: by triple fault in a kernel that was booted with
    /// `reboot=t`.
    Triple,
    /// An orderly `reboot(2)`: the other CPUs are stopped first.
    Reboot,
    /// A panic that waits for ever: this CPU spins with interrupts enabled, the others halt with interrupts
    /// disabled.
    Hang,
}

impl How {
    pub(crate) fn named(name: &str) -> Result<Self, Box<dyn Error>> {
        match name {
            "panic" => Ok(Self::Panic),
            "triple" => Ok(Self::Triple),
            "reboot" => Ok(Self::Reboot),
            "hang" => Ok(Self::Hang),
            _ => Err(format!("no way to die is called `{name}`; see `workload help`").into()),
        }
    }
}

/// Prints `ready`, makes calls on all CPUs, and ends the guest when stdin has a line or ends.
pub(crate) fn amid_calls(how: How) -> Result<(), Box<dyn Error>> {
    println!("ready");
    hammer::hammer(sys::available_cpus()?, || {
        io::stdin().read_line(&mut String::new())?;
        die(how)?;
        Err(io::Error::other("still alive"))
    })
}

fn die(how: How) -> io::Result<()> {
    match how {
        How::Panic => fs::write(SYSRQ, "c"),
        How::Hang => {
            files::write("/proc/sys/kernel/panic", "0")?;
            fs::write(SYSRQ, "c")
        }
        How::Triple => fs::write(SYSRQ, "b"),
        How::Reboot => {
            // SAFETY: has no preconditions; nothing here is worth a sync.
            checked(unsafe { libc::reboot(libc::RB_AUTOBOOT) }).map(drop)
        }
    }
}
