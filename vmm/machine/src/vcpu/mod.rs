//! The threads of vCPUs.

pub(crate) mod catch;
mod debug;
pub(crate) mod run;
pub(crate) mod shared;
