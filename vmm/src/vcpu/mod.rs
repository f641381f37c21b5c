//! Virtual CPUs of KVM: set up, run, and taken out of it.

pub mod config;
pub mod fd;
mod features;
pub mod kick;
