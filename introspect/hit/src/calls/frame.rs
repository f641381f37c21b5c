//! Calls and frames, for code that checks all of them.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;

/// A frame whose probes have all left. [`Calls::remove`](super::Calls::remove) asks its caller what to do with it.
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
    /// The frame will not return through the trampoline: forget it.
    Forget,
    /// The frame may still return through the trampoline: keep its return address, but report no call of it. The
    /// next [`Calls::remove`](super::Calls::remove) asks about it again.
    Keep,
}

/// What [`Calls::remove`](super::Calls::remove) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of entries that were removed.
    pub forgotten: u32,
    /// Number of entries that are kept without being reported, including those of earlier removals.
    pub kept: u32,
}

/// An entry, for code that checks all of them.
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
