//! A user-space debugger: plants int3s in a child's text, which hvprobe must leave alone.
//!
//! ```text
//!   planted ──child runs into it──► at it ──bytes back, one step──► past it ──► planted
//! ```
//! Child and debugger count, and their counts must agree.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_long, c_uint};

use crate::child::Child;
use crate::shared::Shared;
use crate::sys::checked;

const INT3: c_long = 0xcc;

/// The function with the breakpoint.
#[inline(never)]
extern "C" fn debugged(calls: &AtomicU64) {
    calls.fetch_add(1, Ordering::Relaxed);
}

/// Makes a child call a function with a breakpoint `count` times. Prints the number of breakpoints and steps
/// that the debugger saw.
pub(crate) fn run(count: u64) -> Result<(), Box<dyn Error>> {
    let calls = Shared::<AtomicU64>::new()?;
    let function: extern "C" fn(&AtomicU64) = debugged;
    let child = Child::start(|| {
        request(libc::PTRACE_TRACEME, 0, 0, 0)?;
        // SAFETY: has no preconditions.
        checked(unsafe { libc::raise(libc::SIGSTOP) })?;
        for _ in 0..count {
            std::hint::black_box(function)(&calls);
        }
        Ok(())
    })?;
    let debugger = Debugger(&child);
    debugger.expect(libc::SIGSTOP)?;
    let at = c_long::try_from(function as usize)?;
    let original = debugger.read(at)?;
    let planted = (original & !0xff) | INT3;
    debugger.write(at, planted)?;
    let (mut breakpoints, mut steps) = (0_u64, 0_u64);
    debugger.go(libc::PTRACE_CONT)?;
    for _ in 0..count {
        debugger.expect(libc::SIGTRAP)?;
        breakpoints += 1;
        let after = debugger.instruction_pointer()?;
        if after != at + 1 {
            return Err(format!("stopped at {after:#x}, not behind {at:#x}").into());
        }
        debugger.write(at, original)?;
        debugger.set_instruction_pointer(at)?;
        debugger.go(libc::PTRACE_SINGLESTEP)?;
        debugger.expect(libc::SIGTRAP)?;
        steps += 1;
        if debugger.instruction_pointer()? == at {
            return Err("a single-step did not get on".into());
        }
        debugger.write(at, planted)?;
        debugger.go(libc::PTRACE_CONT)?;
    }
    child.end()?.succeeded()?;
    let called = calls.load(Ordering::Relaxed);
    if called != count {
        return Err(format!("the function was entered {called} times, not {count}").into());
    }
    println!("breakpoints: {breakpoints}");
    println!("steps: {steps}");
    Ok(())
}

struct Debugger<'a>(&'a Child);

impl Debugger<'_> {
    /// Waits until the child stops with `signal`.
    fn expect(&self, signal: c_int) -> io::Result<()> {
        let status = self.0.wait()?;
        if libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == signal {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the debugged child did not stop with signal {signal}: status {status:#x}"
        )))
    }

    fn go(&self, how: c_uint) -> io::Result<()> {
        request(how, self.0.pid(), 0, 0)
    }

    fn read(&self, at: c_long) -> io::Result<c_long> {
        let mut word: c_long = 0;
        // Unlike the C library's function, the system call stores the word that it read.
        request(
            libc::PTRACE_PEEKTEXT,
            self.0.pid(),
            at,
            (&raw mut word).expose_provenance().cast_signed() as c_long,
        )?;
        Ok(word)
    }

    fn write(&self, at: c_long, word: c_long) -> io::Result<()> {
        request(libc::PTRACE_POKETEXT, self.0.pid(), at, word)
    }

    fn instruction_pointer(&self) -> io::Result<c_long> {
        let mut value: c_long = 0;
        let into = (&raw mut value).expose_provenance().cast_signed() as c_long;
        request(libc::PTRACE_PEEKUSER, self.0.pid(), rip_offset()?, into)?;
        Ok(value)
    }

    fn set_instruction_pointer(&self, at: c_long) -> io::Result<()> {
        request(libc::PTRACE_POKEUSER, self.0.pid(), rip_offset()?, at)
    }
}

/// Returns the offset of RIP for `PTRACE_PEEKUSER`: `regs.rip` of `struct user`, whose first member is `regs`.
fn rip_offset() -> io::Result<c_long> {
    c_long::try_from(std::mem::offset_of!(libc::user_regs_struct, rip)).map_err(io::Error::other)
}

/// Makes the system call `ptrace(2)`.
fn request(request: c_uint, pid: c_int, address: c_long, data: c_long) -> io::Result<()> {
    // SAFETY: of the requests used here, those that store do so to a word of ours, passed as
    // `data`; the others touch the child's memory only.
    checked(unsafe { libc::syscall(libc::SYS_ptrace, c_long::from(request), pid, address, data) })
        .map(drop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn debugger_and_child_agree() {
        super::run(20).unwrap();
    }
}
