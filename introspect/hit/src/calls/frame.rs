//! Calls and frames, as seen by code that looks at all of them.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;

/// A frame in which none of its probes is interested any longer. [`Calls::remove`](super::Calls::remove) asks
/// what to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The task whose frame it is.
    pub task: Gva,
    /// Address on the stack where the return address is, or was.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
}

/// What to do with a [`Frame`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It will not return through the trampoline: forget it.
    Forget,
    /// It may still return through the trampoline: remember its return address, without reports. The next
    /// [`Calls::remove`](super::Calls::remove) asks again.
    Keep,
}

/// What [`Calls::remove`](super::Calls::remove) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of entries that were removed.
    pub forgotten: u32,
    /// Number of entries that stay without being reported, including those of earlier removals.
    pub kept: u32,
}

/// An entry, for code that looks at all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveCall {
    /// The task that made the call.
    pub task: Gva,
    /// Address of the return address on the stack.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
    /// The probe; `None` if it has left.
    pub probe: Option<ProbeId>,
    /// The [`id`](super::Entry::id) of the entry.
    pub id: u64,
    /// Host time of the entry, nanoseconds of `CLOCK_MONOTONIC`.
    pub host_ns: u64,
}
