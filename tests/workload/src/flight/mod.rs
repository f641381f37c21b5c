//! Calls that stay in the kernel for long: asleep, moved to another CPU, nested in themselves, or
//! never to return. For return probes.

pub(crate) mod deaths;
pub(crate) mod execs;
pub(crate) mod nested;
pub(crate) mod ping_pong;
pub(crate) mod sleepers;
