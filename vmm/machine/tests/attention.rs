//! Model check of requests for a vCPU's attention. Compiles the same source as the machine under `loom`, which
//! tries every order of the threads' steps and every value that the memory model allows them to read.
//! Run with `cargo test -p hvprobe-machine --test attention`.

use std::cell::Cell;

use loom::sync::atomic::{AtomicU8, Ordering};
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::{sync::atomic, thread};

#[path = "../src/stop/attention.rs"]
mod attention;

use attention::Attention;

/// Part of a vCPU that its thread shares with others.
struct Vcpu {
    attention: Attention,
    /// Whether a signal was sent whose handler has not run yet.
    signal: Mutex<bool>,
    sent: Condvar,
    /// The reason for the request, written before it is made.
    request: AtomicU8,
}

impl Vcpu {
    fn signal(&self) -> MutexGuard<'_, bool> {
        self.signal.lock().expect("not poisoned")
    }
}

/// Part of a vCPU that only its own thread uses.
struct Itself<'a> {
    shared: &'a Vcpu,
    immediate_exit: Cell<bool>,
}

impl Itself<'_> {
    /// Runs the signal handler if a signal was sent, as the kernel may between any two steps.
    fn interrupt(&self) {
        if std::mem::take(&mut *self.shared.signal()) {
            self.immediate_exit.set(true);
        }
    }

    /// Runs the guest until a signal arrives or `immediate_exit` is set. Nothing else ends the run.
    fn kvm_run(&self) {
        let mut signal = self.shared.signal();
        while !std::mem::take(&mut *signal) && !self.immediate_exit.get() {
            signal = self.shared.sent.wait(signal).expect("not poisoned");
        }
        self.immediate_exit.set(true);
    }

    fn forget_kicks(&self) {
        self.interrupt();
        self.immediate_exit.set(false);
        self.interrupt();
    }
}

fn vcpu() -> Arc<Vcpu> {
    Arc::new(Vcpu {
        attention: Attention::new(),
        signal: Mutex::new(false),
        sent: Condvar::new(),
        request: AtomicU8::new(0),
    })
}

fn kick(vcpu: &Vcpu) {
    *vcpu.signal() = true;
    vcpu.sent.notify_one();
}

/// Runs the loop of a vCPU until it has seen the request for its attention. Returns the reason for the request.
fn run_until_asked(vcpu: &Vcpu) -> u8 {
    let itself = Itself {
        shared: vcpu,
        immediate_exit: Cell::new(false),
    };
    while !vcpu.attention.look(|| itself.forget_kicks()) {
        itself.kvm_run();
    }
    vcpu.request.load(Ordering::Relaxed)
}

// A lost wakeup leaves the vCPU in the guest, which loom reports as a deadlock.

#[test]
fn a_running_vcpu_that_is_asked_looks() {
    loom::model(|| {
        let vcpu = vcpu();
        let asked = Arc::clone(&vcpu);
        let thread = thread::spawn(move || run_until_asked(&asked));
        vcpu.request.store(7, Ordering::Relaxed);
        vcpu.attention.raise(|| kick(&vcpu));
        assert!(vcpu.attention.is_raised());
        assert_eq!(thread.join().unwrap(), 7, "it sees what it was asked for");
    });
}

#[test]
fn a_request_that_is_taken_back_does_not_hide_the_next() {
    loom::model(|| {
        let vcpu = vcpu();
        let asked = Arc::clone(&vcpu);
        let thread = thread::spawn(move || run_until_asked(&asked));
        vcpu.attention.raise(|| kick(&vcpu));
        vcpu.attention.lower();
        vcpu.attention.raise(|| kick(&vcpu));
        thread.join().unwrap();
    });
}
