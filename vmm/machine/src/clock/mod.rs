//! Clocks of the host and of the guest.

pub(crate) mod host;
mod marks;
pub(crate) mod relation;
pub(crate) mod times;
mod told;
