//! A machine's events on their way to its clients.

pub(crate) mod broadcast;
pub(crate) mod codec;
pub(crate) mod published;
