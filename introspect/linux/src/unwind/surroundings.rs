//! What the unwinder asks of the guest.

use hvprobe_arch::Gva;

/// The guest whose stack is unwound.
pub trait Surroundings {
    /// Returns the word at `at`.
    fn word(&self, at: Gva) -> Option<u64>;

    /// Returns the return address of the call whose stack slot `slot` holds `found`, which may have been put in
    /// place of the real one; `None` if that is unknown. The result may lie in code that is not the kernel's
    /// own.
    fn returns_to(&self, found: Gva, slot: Gva) -> Option<Gva>;

    /// For code that is not the kernel's own, returns the address of the instruction that the code at `at`
    /// stands for, and the number of bytes that this code has pushed onto the stack. For the kernel's code,
    /// returns `at` and 0.
    fn in_place(&self, at: Gva) -> (Gva, u64);
}
