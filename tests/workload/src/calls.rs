//! System calls made an exact number of times.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};

use crate::sys;

/// Where PCs show how far their firmware has come: nobody listens.
const IDLE_PORT: u16 = 0x80;

/// A cheap system call that no other program in the test guest makes on its own, or something to
/// compare it with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// No system call: a byte written to [`IDLE_PORT`], which takes an exit and nothing else.
    Out,
    Getpgid,
    Getsid,
    SchedGetPriorityMax,
}

impl Call {
    pub(crate) fn named(name: &str) -> Result<Self, Box<dyn Error>> {
        match name {
            "out" => {
                sys::grant_port(IDLE_PORT)?;
                Ok(Self::Out)
            }
            "getpgid" => Ok(Self::Getpgid),
            "getsid" => Ok(Self::Getsid),
            "sched_get_priority_max" => Ok(Self::SchedGetPriorityMax),
            _ => Err(format!("no system call `{name}` here; see `workload help`").into()),
        }
    }

    /// Enters the kernel, or leaves the guest, once.
    pub(crate) fn make(self) -> io::Result<()> {
        let (number, argument) = match self {
            Self::Out => {
                sys::write_port(IDLE_PORT, 0);
                return Ok(());
            }
            Self::Getpgid => (libc::SYS_getpgid, 0),
            Self::Getsid => (libc::SYS_getsid, 0),
            Self::SchedGetPriorityMax => (libc::SYS_sched_get_priority_max, libc::SCHED_OTHER),
        };
        sys::plain(number, argument)
    }
}

/// Makes `count` calls.
pub(crate) fn make(call: Call, count: u64) -> io::Result<()> {
    (0..count).try_for_each(|_| call.make())
}

/// Makes `count` calls and prints the number made.
pub(crate) fn repeat(call: Call, count: u64) -> Result<(), Box<dyn Error>> {
    make(call, count)?;
    println!("calls: {count}");
    Ok(())
}

/// Makes `count` one-byte reads of `/dev/zero` and prints the number made.
pub(crate) fn read_zeros(count: u64) -> Result<(), Box<dyn Error>> {
    let mut zeros = File::open("/dev/zero")?;
    let mut byte = [0xff];
    for _ in 0..count {
        zeros.read_exact(&mut byte)?;
    }
    println!("reads: {count}");
    Ok(())
}
