//! What the unwinder asks of the guest.

use hvprobe_arch::Gva;

/// The guest whose stack is unwound.
pub trait Surroundings {
    /// Returns the word at `at`.
    fn word(&self, at: Gva) -> Option<u64>;

    /// Returns the real return address of the call whose stack slot is `slot`. The slot holds `found`, which may
    /// have been put there instead. `None` if the real address is unknown. The result may lie in code that is not
    /// the kernel's own.
    fn returns_to(&self, found: Gva, slot: Gva) -> Option<Gva>;

    /// If the code at `at` is not the kernel's own, returns the address of the kernel's instruction for which it
    /// stands, and the number of bytes that the code has pushed onto the stack. For the kernel's own code, returns
    /// `at` and 0.
    fn in_place(&self, at: Gva) -> (Gva, u64);
}
