//! Outcome of a hit.

use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_spec::{Decision, ProbeId};

use super::event::Event;
use super::table::HookSet;

/// What the vCPU has to do next. After every outcome its IDTR must also point to the table that
/// [`HitHandler::window`](crate::HitHandler::window) returns, or to the guest's own table if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The int3 is not ours: the guest must get it.
    Foreign,
    /// Continue with the changed registers; with `shadow`, interrupts stay held off for one more instruction, as
    /// after `sti`.
    Resume {
        /// Whether to hold interrupts off.
        shadow: bool,
    },
    /// The displaced instruction faults: raise this exception at RIP, the probepoint.
    Fault(Fault),
    /// The vCPU waits with these registers (RIP is the probepoint) for what [`Held`] says. Then it calls
    /// [`HitHandler::resume`](crate::HitHandler::resume).
    Hold(Held),
}

/// An exception that an emulated instruction raises (SDM vol. 3, chapter 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Number of the exception.
    pub vector: u8,
    /// Error code, if the exception has one.
    pub error_code: Option<u32>,
    /// For a page fault that the processor has not raised itself: the address accessed, which goes to CR2.
    pub address: Option<Gva>,
}

/// What a vCPU waits for at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The machine is to be paused, for this probe, until a client resumes it.
    Stop(ProbeId),
    /// A client is to be asked for a decision. [`HitHandler::question`](crate::HitHandler::question) has the
    /// details.
    Ask(ProbeId),
    /// The engine has to be notified that the guest has reached these hooks.
    Engine {
        /// The hooks.
        hooks: HookSet,
        /// First argument of the function that has the hooks.
        argument: Gva,
    },
}

/// What a client is asked at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// The hit, without the position and the cost that its streamed event has.
    pub event: Event,
    /// Time that the client has to answer, counted from the event's host time.
    pub deadline: Duration,
    /// What is done if the client does not answer in time.
    pub default: Decision,
}
