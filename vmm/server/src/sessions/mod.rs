//! Sessions of clients, and what ends with them.

mod book;
pub(crate) mod keeper;
pub(crate) mod owners;
