//! KVM vCPUs: setup, running, and kicks.

pub(crate) mod config;
pub(crate) mod failure;
pub(crate) mod fd;
mod features;
mod kick;

pub use config::configure;
pub use fd::{Counters, CpuFd, Exit, Ioctls};
pub use kick::{Guard, Kickable};
