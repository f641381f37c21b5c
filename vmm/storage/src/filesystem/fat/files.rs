//! Files of a FAT volume, by their paths.

use super::folder::{Entry, entries};
use super::volume::{Root, Volume, Width};
use crate::disk::source::Window;
use crate::error::FileError;
use crate::filesystem::tree::{Kind, MAX_NAMES, Stat, Tree};

/// Largest folder in bytes, as the format has it.
const MAX_FOLDER: u64 = 2 << 20;

/// A FAT file system.
#[derive(Debug)]
pub(crate) struct Fat(Volume);

impl Fat {
    /// Opens the file system in `part`.
    pub(crate) fn open(part: &Window) -> Result<Self, FileError> {
        Volume::open(part).map(Self)
    }

    /// Returns the entries of the folder with this entry, or of the root folder.
    fn folder(&self, folder: Option<&Entry>) -> Result<Vec<Entry>, FileError> {
        let bytes = match (folder, self.0.root) {
            (Some(entry), _) if !entry.is_folder => return Err(FileError::WrongKind("folder")),
            (Some(entry), _) => self.0.whole(entry.cluster, MAX_FOLDER)?,
            (None, Root::Fixed(start, len)) => self.0.range(start, len)?,
            (None, Root::Chain(cluster)) => self.0.whole(cluster, MAX_FOLDER)?,
        };
        let mut entries = entries(&bytes);
        if self.0.width != Width::Bits32 {
            // The upper half has another meaning there.
            for entry in &mut entries {
                entry.cluster &= 0xffff;
            }
        }
        Ok(entries)
    }

    /// Returns the entry of the file at `path`, or `None` for the root folder.
    fn find(&self, path: &str) -> Result<Option<Entry>, FileError> {
        let mut at = None;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let found = self.folder(at.as_ref())?.into_iter().find(|entry| {
                entry.name.eq_ignore_ascii_case(part) || entry.short.eq_ignore_ascii_case(part)
            });
            at = Some(found.ok_or(FileError::NotFound)?);
        }
        Ok(at)
    }
}

impl Tree for Fat {
    fn stat(&self, path: &str) -> Result<Stat, FileError> {
        Ok(match self.find(path)? {
            Some(entry) if !entry.is_folder => Stat {
                kind: Kind::File,
                size: entry.size.into(),
            },
            _ => Stat {
                kind: Kind::Folder,
                size: 0,
            },
        })
    }

    fn target(&self, _: &str) -> Result<String, FileError> {
        Err(FileError::WrongKind("symbolic link"))
    }

    fn names(&self, path: &str) -> Result<Vec<String>, FileError> {
        let folder = self.find(path)?;
        let entries = self.folder(folder.as_ref())?.into_iter();
        Ok(entries.map(|entry| entry.name).take(MAX_NAMES).collect())
    }

    fn bytes(&self, path: &str, offset: u64, len: u64) -> Result<Vec<u8>, FileError> {
        let Some(entry) = self.find(path)?.filter(|entry| !entry.is_folder) else {
            return Err(FileError::WrongKind("file"));
        };
        if offset
            .checked_add(len)
            .is_none_or(|end| end > entry.size.into())
        {
            return Err(FileError::Damaged("a file ends too early".to_owned()));
        }
        self.0.chain(entry.cluster, offset, len)
    }
}

#[cfg(test)]
mod tests;
