//! Model check of how a virtual CPU is told that its attention is wanted: the same source that the
//! machine uses, under `loom`, which tries every order of the threads' steps and every value the
//! memory model allows them to read. `cargo test -p hvprobe-machine --test attention`

use std::cell::Cell;

use loom::sync::atomic::{AtomicU8, Ordering};
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::{sync::atomic, thread};

#[path = "../src/stop/attention.rs"]
mod attention;

use attention::Attention;

/// What others share with a virtual CPU's thread.
struct Vcpu {
    attention: Attention,
    /// A signal was sent and its handler has not run yet.
    signal: Mutex<bool>,
    sent: Condvar,
    /// What attention is wanted for: written before it is asked for.
    request: AtomicU8,
}

impl Vcpu {
    fn signal(&self) -> MutexGuard<'_, bool> {
        self.signal.lock().expect("not poisoned")
    }
}

/// The thread itself, with what only it touches.
struct Itself<'a> {
    shared: &'a Vcpu,
    immediate_exit: Cell<bool>,
}

impl Itself<'_> {
    /// The kernel may run the signal handler between any two steps.
    fn interrupt(&self) {
        if std::mem::take(&mut *self.shared.signal()) {
            self.immediate_exit.set(true);
        }
    }

    /// Stays in the guest until a signal comes; it has no other reason to leave it.
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

/// The loop of a virtual CPU until it has seen that its attention is wanted.
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

// A wake-up that is lost leaves the virtual CPU in the guest, which loom reports as a deadlock.

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
