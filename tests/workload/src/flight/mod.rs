//! Calls that stay in the kernel for long, for return probes: they sleep, move to another CPU, nest in
//! themselves, or never return.

pub(crate) mod deaths;
pub(crate) mod execs;
pub(crate) mod nested;
pub(crate) mod ping_pong;
pub(crate) mod sleepers;
