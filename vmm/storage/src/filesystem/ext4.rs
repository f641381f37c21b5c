//! Files in ext4, read by the crate `ext4-view`.
//!
//! Invariant: the crate allocates nothing of a size that the image states: sizes of files, folders and links, and
//! the number of block groups, are checked before it uses them.

use ext4_view::{Ext4, Ext4Error, Ext4Read, FileType, Metadata};

use super::tree::{Kind, MAX_FOLDER, MAX_NAMES, MAX_TARGET, Stat, Tree};
use crate::disk::source::Window;
use crate::error::FileError;

/// Maximum number of block groups: 128 TiB with blocks of 4 KiB.
const MAX_GROUPS: u64 = 1 << 20;

/// An ext4 file system.
#[derive(Debug)]
pub(super) struct Volume(Ext4);

/// The bytes of the file system.
struct Blocks(Window);

impl Ext4Read for Blocks {
    fn read(
        &mut self,
        start: u64,
        bytes: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.0.read_at(start, bytes)?)
    }
}

impl Volume {
    /// Opens the file system in `part`.
    pub(super) fn open(part: &Window) -> Result<Self, FileError> {
        check(part)?;
        let opened = Ext4::load(Box::new(Blocks(part.clone())));
        opened.map(Self).map_err(failed)
    }

    fn metadata(&self, path: &str) -> Result<Metadata, FileError> {
        self.0.symlink_metadata(path).map_err(failed)
    }
}

impl Tree for Volume {
    fn stat(&self, path: &str) -> Result<Stat, FileError> {
        let metadata = self.metadata(path)?;
        let size = metadata.len();
        let (kind, limit) = match metadata.file_type() {
            FileType::Directory => (Kind::Folder, MAX_FOLDER),
            FileType::Symlink => (Kind::Link, MAX_TARGET),
            FileType::Regular => (Kind::File, u64::MAX),
            _ => (Kind::Other, u64::MAX),
        };
        // So a path never leads through a folder that is larger.
        if size > limit {
            return Err(FileError::TooLarge { size, limit });
        }
        Ok(Stat { kind, size })
    }

    fn target(&self, path: &str) -> Result<String, FileError> {
        self.stat(path)?;
        let target = self.0.read_link(path).map_err(failed)?;
        let target = target.to_str();
        let target = target.map_err(|_| FileError::Damaged("a link is not UTF-8".to_owned()))?;
        Ok(target.to_owned())
    }

    fn names(&self, path: &str) -> Result<Vec<String>, FileError> {
        self.stat(path)?;
        let mut names = Vec::new();
        for entry in self.0.read_dir(path).map_err(failed)?.take(MAX_NAMES) {
            let entry = entry.map_err(failed)?;
            match entry.file_name().as_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }

    fn bytes(&self, path: &str, offset: u64, len: u64) -> Result<Vec<u8>, FileError> {
        let mut file = self.0.open(path).map_err(failed)?;
        let size = file.metadata().len();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(FileError::Damaged("a file ends too early".to_owned()));
        }
        if offset > 0 {
            file.seek_to(offset).map_err(failed)?;
        }
        let len = usize::try_from(len).map_err(|_| FileError::TooDeep)?;
        let mut bytes = vec![0; len];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match file.read_bytes(rest).map_err(failed)? {
                0 => return Err(FileError::Damaged("a file ends too early".to_owned())),
                read => done += read,
            }
        }
        Ok(bytes)
    }
}

/// Checks the numbers of the superblock by which memory is allocated.
fn check(part: &Window) -> Result<(), FileError> {
    let superblock: [u8; 1024] = part.array(1024)?;
    let word = |offset: usize| {
        let bytes = superblock
            .get(offset..)
            .and_then(|bytes| bytes.first_chunk());
        u64::from(bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    };
    let damaged = |what: &str| Err(FileError::Damaged(what.to_owned()));
    // The high half counts only with 64-bit block numbers.
    let high = if word(0x60) & 0x80 != 0 {
        word(0x150)
    } else {
        0
    };
    let blocks = word(0x4) | high << 32;
    let size = match word(0x18) {
        log @ 0..=6 => 1024_u64 << log,
        _ => return damaged("the size of its blocks is wrong"),
    };
    if blocks
        .checked_mul(size)
        .is_none_or(|bytes| bytes > part.len())
    {
        return damaged("it is larger than its partition; is the image cut short?");
    }
    // The reader uses both halves always.
    let claimed = word(0x4) | word(0x150) << 32;
    if word(0x20) == 0 || claimed.div_ceil(word(0x20)) > MAX_GROUPS {
        return damaged("it has more groups of blocks than are read");
    }
    Ok(())
}

fn failed(error: Ext4Error) -> FileError {
    match error {
        Ext4Error::NotFound => FileError::NotFound,
        Ext4Error::NotADirectory => FileError::WrongKind("folder"),
        Ext4Error::IsADirectory | Ext4Error::IsASpecialFile => FileError::WrongKind("file"),
        Ext4Error::NotASymlink => FileError::WrongKind("symbolic link"),
        Ext4Error::Encrypted => FileError::Unsupported("it is encrypted".to_owned()),
        Ext4Error::MalformedPath | Ext4Error::PathTooLong | Ext4Error::TooManySymlinks => {
            FileError::TooDeep
        }
        Ext4Error::Io(source) => FileError::Io(std::io::Error::other(source)),
        error @ Ext4Error::Incompatible(_) => FileError::Unsupported(error.to_string()),
        error => FileError::Damaged(error.to_string()),
    }
}
