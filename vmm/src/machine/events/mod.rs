//! Events on their way from the collector to whoever listens.

pub(crate) mod notice;
pub(crate) mod queue;
pub(crate) mod subscription;
