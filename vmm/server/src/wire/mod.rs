//! Conversion between messages and the types of the engine and the machine, which only the server has.

pub(crate) mod anchor;
pub(crate) mod convert;
pub(crate) mod event;
pub(crate) mod histogram;
pub(crate) mod mask;
pub(crate) mod page;
pub(crate) mod registration;
pub(crate) mod types;
