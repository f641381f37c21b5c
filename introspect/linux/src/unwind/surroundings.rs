//! What is asked of a guest while a stack of it is followed.

use hvprobe_arch::Gva;

/// The guest whose stack it is.
pub trait Surroundings {
    /// The word at `at`.
    fn word(&self, at: Gva) -> Option<u64>;

    /// Where the call that has `found` in the place of its return address, at `slot`, returns to;
    /// `None` if that cannot be told. It may be in code that is not the kernel's own.
    fn returns_to(&self, found: Gva, slot: Gva) -> Option<Gva>;

    /// Where the instruction is that code which is not the kernel's own, with `at` in it, stands for, and how many
    /// bytes of the stack that code has pushed there; `at` itself, and none, if it is the kernel's.
    fn in_place(&self, at: Gva) -> (Gva, u64);
}
