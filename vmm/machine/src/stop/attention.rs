//! How a virtual CPU is told that something wants its attention.
//!
//! ```text
//!   who asks                      the virtual CPU, before every KVM_RUN
//!   1. raise the flag             1. forget kicks (immediate_exit = 0)
//!   2. kick                       2. look at the flag
//! ```
//! Invariant: a virtual CPU that is asked while it runs looks at its flag before it executes much
//! more of the guest. A kick that comes before "forget" is forgotten, but the look that follows
//! sees the flag it was about; one that comes after makes the next `KVM_RUN` return at once. Either
//! pair in the other order loses one. `tests/attention.rs` proves that by trying every order.

use super::atomic::{AtomicBool, Ordering};

/// One virtual CPU's flag.
#[derive(Debug)]
pub(crate) struct Attention(AtomicBool);

impl Attention {
    /// Nobody asks.
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Asks for attention; `kick` gets the virtual CPU out of the guest.
    pub(crate) fn raise(&self, kick: impl FnOnce()) {
        self.0.store(true, Ordering::Release);
        kick();
    }

    /// Nothing is wanted any more.
    pub(crate) fn lower(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Whether attention is wanted. Kicks are left as they are.
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Called by the virtual CPU before it enters the guest: whether attention is wanted.
    pub(crate) fn look(&self, forget_kicks: impl FnOnce()) -> bool {
        forget_kicks();
        self.is_raised()
    }
}
