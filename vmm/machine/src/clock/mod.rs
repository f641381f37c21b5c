//! Clocks of the host and of the guest.

pub(crate) mod host;
mod kvm_sample;
mod marks;
pub(crate) mod relation;
pub(crate) mod times;
