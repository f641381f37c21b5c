//! Software walks of the guest's page tables.
//!
//! A walk reads at most one entry per level and allocates nothing, so hostile tables cannot make it loop: a table
//! that points to itself is read again at the next level. Formats are those of 4- and 5-level paging (SDM vol. 3,
//! 4.5). Bits that a processor would report as reserved are ignored; permission bits are reported, and only
//! [`PageTables::write_as_process`] enforces them.

pub mod entry;
mod tables;
mod walker;

pub use tables::{Levels, Mapping, PageTables, WalkError};
pub use walker::Walker;
