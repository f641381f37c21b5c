//! Events on their way from the collector to whoever listens.

pub(crate) mod notice;
pub mod queue;
pub(crate) mod subscription;
