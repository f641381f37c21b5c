//! From fetch arguments to what is read at a hit, and to the schema by which it is printed.
//!
//! What is kept true: every argument is found where the calling convention and the kernel's types say, or
//! the probe is refused with the column of what cannot be found; nothing is guessed. What an argument needs
//! of a hit is in the probe's actions: registers that are shown, and captured items behind those that the
//! user asked for.

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
