//! FAT12, FAT16 and FAT32, as on EFI system partitions.
//!
//! Read here and not by the crate `fatfs` (0.3), which calculates with numbers of the boot sector without checks,
//! and follows a circle of clusters without end.
//!
//! Invariant: a chain of clusters is followed only as far as the size of the file says, or the limit for folders.

mod files;
mod folder;
mod volume;

pub(crate) use files::Fat;
