//! Calls and frames, as those see them who look at all of them.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;

/// A frame that none of its probes is interested in any longer: what [`Calls::remove`](super::Calls::remove) asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The task whose frame it is.
    pub task: Gva,
    /// Where on the stack its return address is, or was.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
}

/// What is to become of a [`Frame`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It will not return through the trampoline: forget it.
    Forget,
    /// It may still return through the trampoline: remember where it goes, in silence. The next
    /// [`Calls::remove`](super::Calls::remove) asks again.
    Keep,
}

/// What [`Calls::remove`](super::Calls::remove) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Entries that are gone.
    pub forgotten: u32,
    /// Entries that stay without being reported, those of earlier removals included.
    pub kept: u32,
}

/// One entry, for whoever looks at all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveCall {
    /// The task that made the call.
    pub task: Gva,
    /// Where on the stack the return address is.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
    /// The probe; `None` if it has left.
    pub probe: Option<ProbeId>,
    /// What [`Entry::id`](super::Entry::id) was.
    pub id: u64,
    /// Host time of the entry, nanoseconds of `CLOCK_MONOTONIC`.
    pub host_ns: u64,
}
