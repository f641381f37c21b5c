//! SIGINT, SIGTERM and SIGHUP as events that the lab reads, instead of a sudden end.
//!
//! While a [`Signals`] exists, the three signals are blocked in this thread and read from a descriptor. Dropping it
//! restores the signal mask. Threads and children inherit the mask. So take the signals before starting threads,
//! and [reset] them in children.

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

use anyhow::{Context, Result};

/// The signals that ask a program to end.
const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Receives the signals that ask the lab to end.
#[derive(Debug)]
pub(crate) struct Signals {
    descriptor: File,
    previous: libc::sigset_t,
}

impl Signals {
    pub(crate) fn take() -> Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set, which sigaddset then changes.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in ENDING {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            set.assume_init()
        };
        let mut previous = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both pointers are to sets of ours; on success the old mask is written.
        let result = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, previous.as_mut_ptr())
        };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result)).context("cannot block signals");
        }
        // SAFETY: the call above succeeded, so it has written the old mask.
        let previous = unsafe { previous.assume_init() };
        // SAFETY: the set is initialised; the call makes a new descriptor.
        let descriptor =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error()).context("cannot receive signals");
        }
        Ok(Self {
            // SAFETY: the descriptor is new and nothing else owns it.
            descriptor: unsafe { File::from_raw_fd(descriptor) },
            previous,
        })
    }

    /// Returns the number of the next signal that has arrived, or an error if none has.
    pub(crate) fn next(&self) -> Result<i32> {
        // A signalfd returns whole records, each of which begins with the signal's number.
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        (&self.descriptor)
            .read_exact(&mut record)
            .context("cannot read a signal")?;
        let mut number = [0; 4];
        number.copy_from_slice(&record[..4]);
        Ok(i32::from_ne_bytes(number))
    }

    /// Receives all signals that have arrived, and ignores them.
    pub(crate) fn forget(&self) {
        while self.next().is_ok() {}
    }
}

/// Sends this process a signal that one of several [`Signals`] has received, so that another one also receives it.
pub(crate) fn pass_on(signal: i32) {
    // SAFETY: neither call has preconditions. The signal does not end the process: it is blocked in all threads,
    // because it is read from a descriptor.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// Resets the signals of a child that is about to execute a program. Unblocks all signals, and stops ignoring those
/// that ask a program to end, which a background job of a shell ignores. Async-signal-safe.
pub(crate) fn reset() -> io::Result<()> {
    for signal in ENDING {
        // SAFETY: the default action needs no handler.
        if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before it is used; no old mask is asked for.
    let result = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: `previous` is the mask that was in force; no old mask is asked for.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const self.previous,
                std::ptr::null_mut(),
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_received_instead_of_ending_the_process() {
        let signals = Signals::take().unwrap();
        // SAFETY: raise has no preconditions.
        unsafe { libc::raise(libc::SIGHUP) };
        assert_eq!(signals.next().unwrap(), libc::SIGHUP);
    }
}
