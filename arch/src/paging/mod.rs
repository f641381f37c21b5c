//! The guest's page tables, walked in software with the host's authority.
//!
//! A walk reads at most one entry per level and allocates nothing, so no table, however hostile,
//! makes it loop or grow: a table that points to itself is simply read again at the next level.
//! Formats are those of 4- and 5-level paging (SDM vol. 3, 4.5). Bits that a processor would
//! report as reserved are ignored; permission bits are reported, never enforced.

pub mod entry;
mod tables;
mod walker;

pub use tables::{Levels, Mapping, PageTables, WalkError};
pub use walker::Walker;
