//! What is asked of a guest while a stack of it is followed.

use hvprobe_arch::Gva;

/// The guest whose stack it is.
pub trait Surroundings {
    /// The word at `at`.
    fn word(&self, at: Gva) -> Option<u64>;

    /// Where the call that has `found` in the place of its return address, at `slot`, returns to;
    /// `None` if that cannot be told.
    fn returns_to(&self, found: Gva, slot: Gva) -> Option<Gva>;

    /// Where the instruction is whose copy is at `at`, in code that is not the kernel's own; `at` itself if
    /// it is none.
    fn in_place(&self, at: Gva) -> Gva;
}
