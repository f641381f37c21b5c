//! Interrupts a virtual CPU that does not leave the guest by itself.
//!
//! Invariant: the thread that is signalled is alive. The signal is sent under a lock, which that thread takes at
//! the end of each run.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Interval at which the time is checked. The signal is repeated at this interval, because a signal that arrives
/// just before `KVM_RUN` has no effect.
const PERIOD: Duration = Duration::from_millis(250);

/// The thread to interrupt, its deadline, and whether the deadline has passed.
#[derive(Debug, Default)]
struct Watched {
    runner: Option<(libc::pthread_t, Instant)>,
    expired: bool,
}

/// Thread that watches the runs of another one.
#[derive(Debug)]
pub(super) struct Watchdog {
    watched: Arc<Mutex<Watched>>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

fn lock(watched: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchdog {
    pub(super) fn new() -> Self {
        install_handler();
        let watched = Arc::new(Mutex::new(Watched::default()));
        let (end, ended) = mpsc::channel::<()>();
        let shared = Arc::clone(&watched);
        let thread = thread::spawn(move || {
            while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let mut watched = lock(&shared);
                if let Some((runner, deadline)) = watched.runner
                    && Instant::now() >= deadline
                {
                    watched.expired = true;
                    // SAFETY: the runner is alive: at the end of its run, it needs the lock that is held here. The
                    // signal has a handler.
                    unsafe { libc::pthread_kill(runner, signal()) };
                }
            }
        });
        Self {
            watched,
            end: Some(end),
            thread: Some(thread),
        }
    }

    /// Runs `guest` on this thread and interrupts it after `limit`. Returns its result, and whether it was
    /// interrupted.
    pub(super) fn watch<T>(&self, limit: Duration, guest: impl FnOnce() -> T) -> (T, bool) {
        // SAFETY: has no preconditions.
        let runner = unsafe { libc::pthread_self() };
        *lock(&self.watched) = Watched {
            runner: Some((runner, Instant::now() + limit)),
            expired: false,
        };
        let result = guest();
        let mut watched = lock(&self.watched);
        watched.runner = None;
        (result, watched.expired)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the signal that interrupts a run. It differs from those with which machines and micro-guests kick their
/// vCPUs.
fn signal() -> libc::c_int {
    SIGRTMIN() + 2
}

fn install_handler() {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(error) = register_signal_handler(signal(), nothing) {
            eprintln!("a run that hangs will not be interrupted: {error}");
        }
    });
}
