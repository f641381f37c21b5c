//! Reads disk images on the host, without mounting: partitions, file systems, and what in them can be booted.
//!
//! ```text
//!  image ─── disk ─── partition ─── filesystem ─── boot
//!            bytes    tables        files          entries, and the default
//! ```
//!
//! Each folder uses only those to its left.
//!
//! Invariant: an image is untrusted input. Every number read from it is checked before use, and every chain that is
//! followed has a limit. Nothing here writes. The limits are those of single steps:
//! an image that was made to harm can still take much time and memory. ext4 and qcow2 are read by crates that are not ours: a panic or an endless walk
//! in `ext4-view` is contained by its thread; `imago` is relied on to check qcow2 images itself.

mod boot;
mod disk;
mod error;
mod filesystem;
mod image;
mod inspection;
mod partition;

pub use boot::choice::Choice;
pub use boot::entry::{Boot, Entry, Origin, Piece};
pub use disk::Format;
pub use error::{FileError, ImageError};
pub use filesystem::kind::FileSystem;
pub use image::{BootFiles, Image};
pub use inspection::{Inspection, Partition};
pub use partition::table::TableKind;

#[cfg(test)]
mod tests;
