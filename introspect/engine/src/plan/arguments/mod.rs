//! Resolves fetch arguments to captures at a hit, and to the schema for printing them.
//!
//! Invariant: every argument is found where the calling convention and the kernel's types say, or the probe is
//! refused with the column of the part that cannot be found; nothing is guessed. The actions of the probe
//! contain what the arguments need: registers to record, and captured items after those that the user asked
//! for.

mod addresses;
mod chain;
mod filter;
mod flags;
mod function;
pub(crate) mod histogram;
mod names;
mod parameter;
mod refused;
mod resolve;
mod syscall;
mod types;
mod value;

pub use filter::on_any_event;
pub(crate) use resolve::{Resolved, resolve};
