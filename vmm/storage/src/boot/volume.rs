//! A file system of the image, open, with its names.

use crate::filesystem::tree::Tree;

/// A file system of the image, open, with the names by which boot entries refer to it.
pub(crate) struct Volume {
    /// Number of the partition; `None` for a disk without partitions.
    pub(crate) number: Option<u32>,
    pub(crate) uuid: Option<String>,
    pub(crate) label: Option<String>,
    pub(crate) partuuid: Option<String>,
    pub(crate) tree: Box<dyn Tree>,
}
