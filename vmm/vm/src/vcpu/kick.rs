//! Kicks, which get a vCPU's thread out of `KVM_RUN` or out of its wait for a decision.
//!
//! A kick is a signal to the thread. The signal handler runs on that thread and sets `immediate_exit` in the
//! thread's own `kvm_run`, so `KVM_RUN` returns at once even when the signal arrives just before the call (KVM
//! API, 5: `immediate_exit`). A kick also wakes a thread that waits in [`std::thread::park_timeout`].
//!
//! Invariant: the pointer that the handler writes through is set only while the thread owns the mapping.

use std::cell::Cell;
use std::ptr;
use std::sync::Once;
use std::thread::{self, Thread};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

thread_local! {
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: a non-null pointer was set by `Guard::new` on this thread and points into the
        // `kvm_run` mapping, which outlives the guard that clears it.
        unsafe { flag.write_volatile(1) };
    }
}

fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

/// Handle to a thread that can be kicked.
#[derive(Clone, Debug)]
pub struct Kickable {
    /// `None` for a thread that is never in `KVM_RUN`.
    signalled: Option<libc::pthread_t>,
    thread: Thread,
}

impl Kickable {
    /// Returns a handle to the calling thread, which never blocks in `KVM_RUN` and needs no signal.
    #[must_use]
    pub fn without_signal() -> Self {
        Self {
            signalled: None,
            thread: thread::current(),
        }
    }

    /// Makes the thread leave `KVM_RUN`, or return at once from its next `KVM_RUN`, and ends its wait for a
    /// decision. Does nothing if the thread itself calls this, because then it is neither in `KVM_RUN` nor waiting.
    /// The caller must know that the thread is alive.
    pub fn kick(&self) {
        if self.thread.id() == thread::current().id() {
            return;
        }
        self.thread.unpark();
        if let Some(thread) = self.signalled {
            // SAFETY: the caller knows that the thread is alive (a machine keeps the handle only while the thread
            // is in its loop), so the id is valid. The signal has a handler: `Guard::new` ran.
            let _ = unsafe { libc::pthread_kill(thread, kick_signal()) };
        }
    }
}

/// Guard that keeps the calling thread kickable until the guard is dropped.
#[derive(Debug)]
pub struct Guard {
    flag: *mut u8,
}

impl Guard {
    /// Makes the calling thread, which runs `vcpu`, kickable. `vcpu` must outlive the guard.
    pub fn new(vcpu: &mut VcpuFd) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            if let Err(error) = register_signal_handler(kick_signal(), on_kick) {
                tracing::error!(%error, "virtual CPUs cannot be interrupted");
            }
        });
        let flag = &raw mut vcpu.get_kvm_run().immediate_exit;
        IMMEDIATE_EXIT.set(flag);
        Self { flag }
    }

    /// Returns the handle by which other threads kick this one.
    #[must_use]
    pub fn kickable(&self) -> Kickable {
        Kickable {
            // SAFETY: `pthread_self` has no preconditions.
            signalled: Some(unsafe { libc::pthread_self() }),
            thread: thread::current(),
        }
    }

    /// Clears `immediate_exit`. Check the reasons for kicks after this call, not before it: a kick between the
    /// check and this call would be lost.
    #[inline]
    pub fn clear(&self) {
        // SAFETY: points into the `kvm_run` mapping of the `VcpuFd` that outlives the guard.
        unsafe { self.flag.write_volatile(0) };
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}
