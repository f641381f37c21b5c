//! Opens the file system of a partition.

use super::ext4_worker::Ext4;
use super::fat::Fat;
use super::kind::FileSystem;
use super::tree::Tree;
use crate::disk::source::Window;
use crate::error::FileError;

/// Opens the file system `kind` in `part`. Returns `None` if it is not one that is read here.
pub(crate) fn open(kind: FileSystem, part: &Window) -> Option<Result<Box<dyn Tree>, FileError>> {
    match kind {
        FileSystem::Ext4 => Some(Ext4::open(part).map(|tree| Box::new(tree) as Box<dyn Tree>)),
        FileSystem::Fat => Some(Fat::open(part).map(|tree| Box::new(tree) as Box<dyn Tree>)),
        _ => None,
    }
}
