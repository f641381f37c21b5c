//! Processes that execute another program while calls are in flight.
//!
//! `__x64_sys_execve` and `bprm_execve` are entered once per round; they begin in one address space and return
//! in another. In odd rounds a second thread executes the program and is the only one left afterwards.

use std::error::Error;
use std::ffi::CStr;
use std::{io, thread};

use crate::child::Child;

const SELF: &CStr = c"/proc/self/exe";

/// Executes this program again `count` times; the new instance does nothing.
pub(crate) fn run(count: u64) -> Result<(), Box<dyn Error>> {
    for round in 0..count {
        let child = Child::start(|| {
            if round % 2 == 0 {
                return Err(execute());
            }
            thread::spawn(execute)
                .join()
                .map_or_else(|_| Err(io::Error::other("the thread panicked")), Err)
        })?;
        child.end()?.succeeded()?;
    }
    println!("execs: {count}");
    Ok(())
}

/// Executes this program. Returns only if that fails.
fn execute() -> io::Error {
    let arguments = [c"workload".as_ptr(), c"nothing".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    // SAFETY: a path and null-terminated arrays of strings, all with their NUL.
    unsafe { libc::execve(SELF.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}
