//! The threads of virtual CPUs.

pub(crate) mod catch;
pub(crate) mod run;
pub(crate) mod shared;
