//! Conversion between the types of the wire and those of the engine and the machine.
//!
//! A request has the same two forms at both ends, so clients use this as well.

pub mod actions;
pub(crate) mod anchor;
mod arguments;
pub mod budget;
pub(crate) mod convert;
pub(crate) mod event;
mod fetched;
pub(crate) mod histogram;
pub(crate) mod mask;
pub(crate) mod page;
pub mod registers;
pub(crate) mod registration;
pub(crate) mod types;
