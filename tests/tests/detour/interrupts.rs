//! Interrupts a thread repeatedly, at any instruction, and makes it call a function there, like an NMI whose
//! handler hits a probe.

use hvprobe_tests::detour::traps::{self, SignalStack};
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::time::Duration;

pub(crate) use hvprobe_tests::detour::traps::Function;

/// Time between interruptions, if the machine keeps up.
const INTERVAL: Duration = Duration::from_micros(20);

thread_local! {
    /// Function that the handler calls, and the argument of its first call. Like all data of the handler, this is
    /// initialised statically and has no destructor, so a signal handler can access it.
    static CALL: Cell<Option<(Function, u64)>> = const { Cell::new(None) };
    /// Start and end of the code whose interruptions are counted separately.
    static CODE: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    static INSIDE: Cell<u64> = const { Cell::new(0) };
    static NESTED: Cell<u64> = const { Cell::new(0) };
}

extern "C" fn nest(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the context is this handler's.
    let rip = unsafe { traps::interrupted(context) }.cast_unsigned();
    let Some((function, first)) = CALL.get() else {
        return;
    };
    let (start, end) = CODE.get();
    if (start..end).contains(&rip) {
        INSIDE.set(INSIDE.get() + 1);
    }
    let nested = NESTED.get();
    NESTED.set(nested + 1);
    function(first + nested);
}

/// Numbers of interruptions of the thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// All interruptions. At each of them, the function was called.
    pub(crate) nested: u64,
    /// Interruptions inside the given code.
    pub(crate) inside: u64,
}

/// Interruptions of the thread that started them.
pub(crate) struct Interrupts {
    /// Dropped before the stack on which its signals are handled.
    timer: Timer,
    /// Needed because the called function may fault, which puts a second signal frame on the stack. Two frames fill
    /// the alternate stack that a thread has by default.
    stack: SignalStack,
}

impl Interrupts {
    /// Makes the current thread call `function` at each interruption. The argument is `first` in the first call,
    /// and grows by one from call to call. [`Interrupts::inside`] counts the interruptions inside `code`.
    pub(crate) fn start(function: Function, first: u64, code: Range<u64>) -> io::Result<Self> {
        CALL.set(Some((function, first)));
        CODE.set((code.start, code.end));
        INSIDE.set(0);
        NESTED.set(0);
        let stack = SignalStack::new()?;
        traps::handle(libc::SIGALRM, nest)?;
        let timer = Timer::start(INTERVAL)?;
        Ok(Self { timer, stack })
    }

    /// Returns the number of interruptions inside the given code.
    pub(crate) fn inside(&self) -> u64 {
        INSIDE.get()
    }

    /// Ends the interruptions.
    pub(crate) fn stop(self) -> Counts {
        drop(self.timer);
        drop(self.stack);
        CALL.set(None);
        Counts {
            nested: NESTED.get(),
            inside: INSIDE.get(),
        }
    }
}

/// Timer that signals the thread that started it, until it is dropped.
struct Timer(libc::timer_t);

impl Timer {
    fn start(interval: Duration) -> io::Result<Self> {
        // SAFETY: all zeroes is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: has no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: both pointers are valid.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } != 0
        {
            return Err(io::Error::last_os_error());
        }
        let every = libc::timespec {
            tv_sec: 0,
            tv_nsec: interval.subsec_nanos().into(),
        };
        let times = libc::itimerspec {
            it_interval: every,
            it_value: every,
        };
        // SAFETY: the timer exists, and the old value is not requested.
        match unsafe { libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut()) } {
            0 => Ok(Self(timer)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer exists.
        unsafe { libc::timer_delete(self.0) };
    }
}
