//! Machines: guests with probes in their kernels. Runs the probe engine on a KVM virtual machine.
//!
//! Servers use only this crate, not the crate `vm` below it. So this crate re-exports what they need of `vm`: the
//! checks of the host ([`host`]), and the causes of a failed boot ([`BootError`]).

mod aggregate;
mod boot;
mod claims;
mod clock;
mod config;
mod console;
mod crash;
mod decide;
mod detours;
mod events;
mod gate;
mod guest;
pub mod host;
mod kernel_file;
mod live;
mod machine;
mod metrics;
mod probes;
mod stop;
mod supervisor;
mod throttle;
mod tripwire;
mod vcpu;
mod waiting;

pub use aggregate::{AGGREGATION_BYTES, AGGREGATIONS_MAX, AggregateError, Aggregation};
pub use boot::BootError;
pub use claims::{LetGo, Owner};
pub use config::{Bounds, DEFAULT_CMDLINE, EndReason, Ending, MachineConfig, State, Status};
pub use console::{Console, Printed};
pub use decide::{AnswerError, Asker, DecisionCounts, Decisions, MISSES, Question, Token};
pub use events::notice::ThrottleNotice;
pub use events::queue;
pub use events::subscription::{Delivery, Listen, Subscription};
pub use hvprobe_engine::{ProbeInfo, ProbeState, Refusals, Registered, Skipped, Throttled, Usage};
pub use hvprobe_hit::event::Event;
pub use hvprobe_spec::{Budget, Excess, Mechanism, ProbeId, ProbeSpec};
pub use hvprobe_vm::memory::MemoryError;
pub use hvprobe_vm::vcpu::Ioctls;
pub use hvprobe_vm::{CatchMode, CpuError};
pub use kernel_file::KernelFile;
pub use machine::{Machine, NmiError, PauseError, ReadError};
