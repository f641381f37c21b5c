//! What can be booted: boot entries in the file systems of an image, and which of them is the default.
//!
//! Invariant: an entry is used only if all of it is known. What depends on the machine (as a condition in
//! `grub.cfg` may) makes the entries that need it unusable, with the reason; nothing is guessed.

mod bls;
mod bls_entries;
pub(crate) mod choice;
mod collect;
pub(crate) mod entry;
mod fallback;
mod grub;
mod grub_entries;
mod pieces;
mod uki;
mod version;
mod volume;

pub(crate) use collect::{Found, collect};
pub(crate) use volume::Volume;
