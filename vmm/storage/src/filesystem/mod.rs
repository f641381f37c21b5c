//! File systems: which one a partition has, and files in those that are read here, ext4 and FAT.
//!
//! Invariant: reading ends. Folders, files, chains of clusters and symbolic links have limits, and the reader of
//! ext4, which is not ours, runs on a thread with a deadline.

mod ext4;
mod ext4_worker;
mod fat;
pub(crate) mod kind;
pub(crate) mod open;
pub(crate) mod resolve;
pub(crate) mod tree;
