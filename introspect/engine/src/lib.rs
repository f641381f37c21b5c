//! The control plane: which probes exist, where each is planted, and every change to the guest's text.
//!
//! A registration is one pass: a batch is expanded (`registry/expand.rs`), planned (`plan/`), placed
//! (`registry/place.rs`) and planted (`registry/plant.rs`), and the guest's text is changed (`registry/commit.rs`).
//! The pass ends with a new probe table for the data plane (`registry/table.rs`). The engine reaches guest memory
//! and stops virtual CPUs only through [`World`], so it runs, and is tested, without KVM.

mod aggregate;
pub(crate) mod code;
mod error;
mod explain;
mod guest;
mod info;
mod plan;
mod refusal;
mod registered;
pub(crate) mod registry;
mod remedy;
mod sites;
#[cfg(test)]
mod testing;
mod unoptimized;
mod world;

pub use code::{HiddenError, HiddenRegion, outermost_slots};
pub use error::{ChangeError, RegisterError};
pub use explain::{Explained, explain};
pub use info::{Awaited, ProbeInfo, ProbeState, Shown, Throttled};
pub use plan::arguments::on_any_event;
pub use refusal::Refused;
pub use registered::{BATCH_MAX, PROBES_MAX, Refusals, Registered, Skipped};
pub use registry::{HookOutcome, Looked, Registry, Retry, Usage};
pub use remedy::Remedy;
pub use unoptimized::Unoptimized;
pub use world::{Standing, StopError, WhileStopped, World};
