//! Virtual CPUs of KVM: set up, run, and taken out of it.

pub(crate) mod config;
pub(crate) mod failure;
pub(crate) mod fd;
mod features;
mod kick;

pub use config::configure;
pub use fd::{Counters, CpuFd, Exit, Ioctls};
pub use kick::{Guard, Kickable};
