//! From the terms of the wire to those of the engine and the machine, and back.

pub(crate) mod actions;
pub(crate) mod anchor;
pub(crate) mod budget;
pub(crate) mod convert;
pub(crate) mod event;
pub(crate) mod registration;
