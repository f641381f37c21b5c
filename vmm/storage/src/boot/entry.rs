//! Boot entries as they are shown and used.

use std::fmt;

/// Where a boot entry comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file of the Boot Loader Specification.
    Bls {
        /// Path of the file.
        path: String,
    },
    /// An entry of GRUB's menu.
    Grub {
        /// Path of `grub.cfg`.
        path: String,
        /// Position in the menu, from 0, in each submenu: `1>2`.
        position: String,
    },
    /// A unified kernel image.
    Uki {
        /// Path of the image.
        path: String,
    },
    /// No entry: a kernel that lies in `/boot`.
    Fallback,
}

impl Origin {
    /// Returns the name of the kind of entry.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Bls { .. } => "BLS",
            Self::Grub { .. } => "GRUB",
            Self::Uki { .. } => "UKI",
            Self::Fallback => "fallback",
        }
    }

    /// Returns the path of the file with the entry, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::Bls { path } | Self::Grub { path, .. } | Self::Uki { path } => Some(path),
            Self::Fallback => None,
        }
    }
}

/// A boot entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of the partition with the entry; `None` for a disk without partitions.
    pub partition: Option<u32>,
    /// Where the entry comes from.
    pub origin: Origin,
    /// Title, for people. It comes from the image: make it harmless before it is shown.
    pub title: String,
    /// Version of the kernel, if the entry states it.
    pub version: Option<String>,
    /// What it boots, or why it cannot be used.
    pub boot: Result<Boot, String>,
}

/// What a boot entry boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The kernel.
    pub kernel: Piece,
    /// Initial ramdisks, in the order in which they are joined.
    pub initrds: Vec<Piece>,
    /// Command line of the kernel.
    pub options: String,
}

/// A file, or a section of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the partition; `None` for a disk without partitions.
    pub partition: Option<u32>,
    /// Path in its file system.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    pub(crate) section: Option<Section>,
}

/// A section of a unified kernel image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) offset: u64,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        match &self.section {
            Some(section) => write!(f, "({})", section.name),
            None => Ok(()),
        }
    }
}

/// Returns how messages name a partition.
pub(crate) fn place(partition: Option<u32>) -> String {
    match partition {
        Some(number) => format!("partition {number}"),
        None => "the whole disk".to_owned(),
    }
}
