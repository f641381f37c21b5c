//! Makes system calls an exact number of times.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys;

/// The port at which PCs show the progress of their firmware. No device listens there.
const IDLE_PORT: u16 = 0x80;

/// Text to which the argument of [`Call::Text`] points, in static memory. Its address is not a valid process id.
static TEXT: [u8; 65] = *b"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\0";

/// Unreadable addresses: near zero; in a process; just below the end of the processes' addresses, and just below
/// the start of the kernel's; non-canonical; in an empty part of the kernel's half; and values that look like
/// errors.
const NOWHERE: [u64; 12] = [
    0,
    8,
    0xff8,
    0x5000_0000_0000,
    0x7fff_ffff_effc,
    0x7fff_ffff_fff8,
    0x8000_0000_0000,
    0x1234_5678_9abc_def0,
    0xffff_7fff_ffff_fffc,
    0xffff_8000_0000_0000,
    0xffff_ffff_ffff_f000,
    0xffff_ffff_ffff_fffe,
];

/// A cheap system call that no other program in the test guest makes on its own, or something to compare such a
/// call with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// Not a system call: a byte written to [`IDLE_PORT`], which takes an exit and does nothing else.
    Out,
    Getpgid,
    Getsid,
    SchedGetPriorityMax,
    /// `getpgid` with the address of [`TEXT`] as its argument, which is not a valid id.
    Text,
    /// `getpgid` of each address of [`NOWHERE`] in turn; errors are ignored.
    Nowhere,
    /// Reads a byte from `/dev/zero` and writes it to `/dev/null`: one `vfs_read` and one `vfs_write`. Stands for a
    /// program that does little but system calls.
    Copy(Devices),
    /// `epoll_wait` on the first instance of a chain in which each instance watches the next one. The last instance
    /// watches a socket that is ready. The call goes deep, and takes the same path each time.
    EpollWait(&'static OwnedFd),
}

/// Device files that stay open as long as the program runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Devices {
    zero: &'static File,
    null: &'static File,
}

impl Devices {
    fn open() -> io::Result<Self> {
        let keep = |file| -> &'static File { Box::leak(Box::new(file)) };
        Ok(Self {
            zero: keep(File::open("/dev/zero")?),
            null: keep(OpenOptions::new().write(true).open("/dev/null")?),
        })
    }

    fn copy(self) -> io::Result<()> {
        let (mut zero, mut null) = (self.zero, self.null);
        let mut byte = [0];
        zero.read_exact(&mut byte)?;
        null.write_all(&byte)
    }
}

/// Number of instances in the longest chain that the kernel allows: one more than `EP_MAX_NESTS` in fs/eventpoll.c.
const CHAIN: usize = 5;

/// Creates a chain of epoll instances and returns the first one. The last one watches a socket that can always
/// be written to.
fn chain() -> io::Result<&'static OwnedFd> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let mut next: &OwnedFd = Box::leak(Box::new(socket.into()));
    let mut ready = libc::EPOLLOUT;
    for _ in 0..CHAIN {
        let front = sys::epoll()?;
        sys::epoll_add(front.as_fd(), next.as_fd(), ready)?;
        next = Box::leak(Box::new(front));
        ready = libc::EPOLLIN;
    }
    Ok(next)
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
            "text" => Ok(Self::Text),
            "nowhere" => Ok(Self::Nowhere),
            "copy" => Ok(Self::Copy(Devices::open()?)),
            "epoll_wait" => Ok(Self::EpollWait(chain()?)),
            _ => Err(format!("no system call `{name}` here; see `workload help`").into()),
        }
    }

    /// Makes the call.
    pub(crate) fn make(self) -> io::Result<()> {
        let (number, argument) = match self {
            Self::Out => {
                sys::write_port(IDLE_PORT, 0);
                return Ok(());
            }
            Self::Copy(devices) => return devices.copy(),
            Self::EpollWait(front) => return sys::epoll_wait(front.as_fd()),
            Self::Nowhere => {
                static NEXT: AtomicUsize = AtomicUsize::new(0);
                let next = NEXT.fetch_add(1, Ordering::Relaxed);
                sys::getpgid(NOWHERE[next % NOWHERE.len()]);
                return Ok(());
            }
            Self::Text => return sys::getpgid_of_nobody(TEXT.as_ptr().addr()),
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
