//! Requests for a vCPU's attention.
//!
//! ```text
//!   requester                     the vCPU, before every KVM_RUN
//!   1. raise the flag             1. clear kicks (immediate_exit = 0)
//!   2. kick                       2. look at the flag
//! ```
//! Invariant: a vCPU whose attention is requested while it runs checks its flag before it executes much more of the
//! guest. A kick that arrives before step 1 of the vCPU is lost, but step 2 sees the flag that was raised before
//! the kick. A kick that arrives later makes the next `KVM_RUN` return at once. With either pair of steps in the
//! other order, a request can be lost. `tests/attention.rs` proves the invariant by trying every order.

use super::atomic::{AtomicBool, Ordering};

/// Attention flag of one vCPU.
#[derive(Debug)]
pub(crate) struct Attention(AtomicBool);

impl Attention {
    /// Returns a flag that is not raised.
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Requests attention, then calls `kick`, which gets the vCPU out of the guest.
    pub(crate) fn raise(&self, kick: impl FnOnce()) {
        self.0.store(true, Ordering::Release);
        kick();
    }

    /// Withdraws the request.
    pub(crate) fn lower(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Returns whether attention is requested. Does not clear kicks.
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Clears kicks, then returns whether attention is requested. Called by the vCPU's thread before it enters the
    /// guest. `forget_kicks` clears `immediate_exit`.
    pub(crate) fn look(&self, forget_kicks: impl FnOnce()) -> bool {
        forget_kicks();
        self.is_raised()
    }
}
