//! Machines: guests with probes in their kernels.

mod boot;
mod clock;
mod config;
mod console;
mod crash;
mod decide;
mod detours;
mod events;
mod guest;
mod live;
#[allow(
    clippy::module_inception,
    reason = "the next step makes a crate of the outer one"
)]
mod machine;
mod probes;
mod shared;
mod stop;
mod supervisor;
mod throttle;
mod tripwire;
mod vcpu;

pub use hvprobe_engine::{ProbeInfo, ProbeState, Refusals, Registered, Skipped, Throttled};
pub use hvprobe_hit::event::Event;
pub use hvprobe_spec::{Budget, Excess, Mechanism, ProbeId, ProbeSpec};

pub use crate::vcpu::fd::Ioctls;
pub use boot::BootError;
pub use config::{DEFAULT_CMDLINE, EndReason, Ending, MachineConfig, State, Status};
pub use console::{Console, Printed};
pub use decide::{AnswerError, Asker, DecisionCounts, Decisions, Question, Token};
pub use events::notice::ThrottleNotice;
pub(crate) use events::queue::{Entrance, Exit, Taken, queue};
pub(crate) use events::subscription::Listen;
pub use events::subscription::{Delivery, Subscription};
pub use machine::{Machine, NmiError, PauseError, ReadError};
