//! Errors of the hidden region.

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::OutOfRange;
use hvprobe_arch::paging::WalkError;
use hvprobe_hit::region::Window;

/// Why the region could not be mapped, or why no slot could be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HiddenError {
    /// Every entry of the window is in use.
    #[error("no empty page-table entry between {} and {} for the out-of-line slots", .0.start, .0.end)]
    WindowFull(Window),
    /// The kernel's page tables cannot be walked.
    #[error("the kernel's page tables cannot be followed to the slots' window")]
    Walk(#[from] WalkError),
    /// The host memory of the region is missing.
    #[error("the memory for out-of-line slots is missing")]
    Memory(#[from] OutOfRange),
    /// The region is not mapped, or does not contain the address.
    #[error("the memory for out-of-line slots is not mapped there")]
    NotMapped,
    /// All slots are in use.
    #[error("all {0} out-of-line slots are in use: unregister probes that are stepped")]
    OutOfSlots(u64),
    /// Slots are free, but all too far from the memory that the instruction refers to.
    #[error(
        "all out-of-line slots within reach of what it refers to are in use: unregister probes that are stepped"
    )]
    NoneInReach,
    /// The guest changed the page-table entry, which was then left alone.
    #[error("the guest changed the page-table entry at {at} that maps the slots")]
    EntryChanged {
        /// Physical address of the entry.
        at: Gpa,
    },
}
