//! How events get from the collector to listeners.

pub(crate) mod notice;
pub mod queue;
pub(crate) mod subscription;
