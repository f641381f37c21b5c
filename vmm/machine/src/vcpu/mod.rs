//! The threads of vCPUs.

pub(crate) mod catch;
pub(crate) mod run;
pub(crate) mod shared;
