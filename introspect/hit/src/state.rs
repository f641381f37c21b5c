//! State of one vCPU that changes from hit to hit.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;

use super::event::EventProducer;
use super::report::Taken;

/// A stepped instruction that has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) site: u32,
    /// The stack pointer at the probepoint.
    pub(crate) rsp: u64,
    /// RFLAGS.IF at the probepoint, at its bit position.
    pub(crate) interrupts: u64,
    pub(crate) taken: Taken,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) at: Gva,
    /// The member that holds the vCPU. The members after it have not run.
    pub(crate) probe: ProbeId,
    pub(crate) taken: Taken,
}

/// State that changes from hit to hit.
#[derive(Debug)]
pub(crate) struct HitState {
    pub(crate) vcpu: u32,
    pub(crate) events: EventProducer,
    pub(crate) flight: Option<InFlight>,
    pub(crate) put_off: Option<InFlight>,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) after_sti: bool,
}

impl HitState {
    pub(crate) fn is_stepping(&self) -> bool {
        self.flight.is_some() || self.put_off.is_some()
    }
}
