//! The data plane: what happens when a vCPU reaches a probepoint.
//!
//! Invariant: the hit path takes no lock that vCPUs share, allocates nothing and formats nothing. It does not
//! know how probes are registered: the engine gives it one immutable [`ProbeTable`](table::ProbeTable) after
//! another.
//!
//! A hit begins in `hit.rs`, which runs the stages. `report.rs` takes the time and queues the events, `capture.rs`
//! reads their content from the guest, `handlers.rs` and `changes.rs` carry out what probes do, and `step.rs` lets
//! the displaced instruction take effect. `handler.rs` is the interface for vCPUs.

pub mod aggregate;
mod atomics;
pub mod calls;
#[cfg(test)]
mod calls_tests;
mod capture;
mod changes;
mod clock;
mod context;
mod copied_stack;
mod counters;
pub mod event;
mod fetch;
mod filter;
mod followed;
mod guest_memory;
mod handler;
mod handlers;
mod hit;
mod meter;
mod outcome;
pub mod record;
pub mod region;
mod report;
mod restored_frames;
mod returns;
mod stack_trace;
mod state;
mod step;
pub mod table;
mod view;

pub use clock::{Clock, Reading};
pub use copied_stack::Stacks;
pub use counters::{Counters, Counts};
pub use filter::passes_by_task;
pub use followed::Followed;
pub use handler::HitHandler;
pub use meter::Meter;
pub use outcome::{Fault, Held, Inquiry, Outcome};
pub use restored_frames::{RestoredFrames, restore_frame};
pub use returns::entry_data_size;
pub use view::{KernelView, Surroundings};
