//! Sessions of clients, and what ends with them.

pub(crate) mod book;
pub(crate) mod keeper;
pub(crate) mod owners;
