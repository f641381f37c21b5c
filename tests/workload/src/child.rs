//! Child processes that run a function of this program.
//!
//! The calls that start children and wait for them (`clone`, `wait4`) are not counted.

use std::io;

use libc::c_int;

use crate::sys::{self, checked};

/// A child that has not been waited for. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Child(c_int);

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(c_int),
    Killed(c_int),
}

impl End {
    /// Returns an error unless the child exited with 0.
    pub(crate) fn succeeded(self) -> io::Result<()> {
        if self == Self::Exited(0) {
            return Ok(());
        }
        Err(io::Error::other(format!("a child process: {self:?}")))
    }
}

impl Child {
    /// Starts a child that runs `work`, and exits with 0 if that succeeds and with 1 otherwise. The calling
    /// process must have only one thread: locks that other threads hold would stay locked in the child.
    pub(crate) fn start(work: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        // SAFETY: the caller has one thread, by the rule above.
        match checked(unsafe { libc::fork() })? {
            0 => match work() {
                Ok(()) => sys::exit(0),
                Err(error) => {
                    eprintln!("workload: child: {error}");
                    sys::exit(1)
                }
            },
            pid => Ok(Self(pid)),
        }
    }

    pub(crate) fn pid(&self) -> c_int {
        self.0
    }

    pub(crate) fn kill(&self) -> io::Result<()> {
        // SAFETY: touches no memory; the child was not waited for, so the number is its own.
        checked(unsafe { libc::kill(self.0, libc::SIGKILL) }).map(drop)
    }

    /// Waits until the child has ended.
    pub(crate) fn end(self) -> io::Result<End> {
        let status = self.wait()?;
        std::mem::forget(self);
        Ok(if libc::WIFSIGNALED(status) {
            End::Killed(libc::WTERMSIG(status))
        } else {
            End::Exited(libc::WEXITSTATUS(status))
        })
    }

    /// Waits until the child has stopped or ended; returns the status as `wait4(2)` does.
    pub(crate) fn wait(&self) -> io::Result<c_int> {
        let mut status = 0;
        // SAFETY: room for the status.
        checked(unsafe { libc::waitpid(self.0, &raw mut status, 0) })?;
        Ok(status)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.kill();
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_distinguishes_exit_from_killing() {
        let fine = Child::start(|| Ok(())).unwrap();
        assert_eq!(fine.end().unwrap(), End::Exited(0));
        let failing = Child::start(|| Err(io::ErrorKind::Other.into())).unwrap();
        assert!(failing.end().unwrap().succeeded().is_err());
        let endless = Child::start(|| {
            loop {
                sys::moment();
            }
        });
        let endless = endless.unwrap();
        endless.kill().unwrap();
        assert_eq!(endless.end().unwrap(), End::Killed(libc::SIGKILL));
    }
}
