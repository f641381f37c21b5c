//! Partition tables: GPT, MBR, or none.
//!
//! Invariant: every number in a table is checked against the disk before it is used, and chains and tables have
//! limits. A partition that is partly outside of the disk is kept, with a note.

mod gpt;
mod guid;
mod mbr;
pub(crate) mod slot;
pub(crate) mod table;
