//! A disk image, open for reading.

use std::path::Path;

use crate::boot::entry::{Boot, Piece, place};
use crate::boot::{Found, Volume, collect};
use crate::disk::source::Window;
use crate::disk::{Format, Memory, Qcow2, Raw};
use crate::error::{FileError, ImageError};
use crate::filesystem::kind::{FileSystem, identify};
use crate::filesystem::open::open;
use crate::filesystem::resolve::{file, read};
use crate::filesystem::tree::Tree;
use crate::inspection::{Inspection, Partition};
use crate::partition::table::{TableKind, read as read_table};

/// Maximum number of file systems that are opened.
const MAX_VOLUMES: usize = 16;

/// A disk image, open for reading.
#[derive(Clone, Debug)]
pub struct Image {
    disk: Window,
}

/// The files of a boot entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootFiles {
    /// The kernel image.
    pub kernel: Vec<u8>,
    /// Initial ramdisks, in the order in which they are joined.
    pub initrds: Vec<Vec<u8>>,
    /// Command line of the kernel.
    pub options: String,
}

impl Image {
    /// Opens the regular file at `path`, and reads it as `format`. Its content does not matter for that.
    ///
    /// # Errors
    /// When it cannot be opened, is not in this format, or needs a file that is not opened.
    pub fn open(path: &Path, format: Format) -> Result<Self, ImageError> {
        let disk = match format {
            Format::Raw => {
                let raw = Raw::open(path).map_err(|source| ImageError::Open {
                    path: path.to_owned(),
                    source,
                })?;
                Window::whole(raw)
            }
            Format::Qcow2 => Window::whole(Qcow2::open(path)?),
        };
        Ok(Self { disk })
    }

    /// Returns the disk with these bytes, as tests and fuzzers make them.
    #[must_use]
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self {
            disk: Window::whole(Memory::new(bytes)),
        }
    }

    /// Finds the partitions, their file systems, and what in them can be booted.
    ///
    /// # Errors
    /// When the image cannot be read, or its partition table is damaged.
    pub fn inspect(&self) -> Result<Inspection, ImageError> {
        let (table, partitions, mut notes) = self.partitions()?;
        let mut inspection = Inspection {
            size: self.disk.len(),
            table,
            partitions,
            entries: Vec::new(),
            notes: Vec::new(),
            choice: Err(String::new()),
        };
        let mut volumes = Vec::new();
        for partition in &mut inspection.partitions {
            let part = self.disk.part(partition.start, partition.size);
            if volumes.len() == MAX_VOLUMES {
                notes.push(format!(
                    "only the first {MAX_VOLUMES} file systems were read"
                ));
                break;
            }
            match open(partition.file_system, &part) {
                Some(Ok(tree)) => volumes.push(Volume {
                    number: partition.number,
                    uuid: partition.uuid.clone(),
                    label: partition.label.clone(),
                    partuuid: partition.partuuid.clone(),
                    tree,
                }),
                Some(Err(error)) => partition.problem = Some(with_source(&error)),
                None => {}
            }
        }
        let found: Found = collect(&volumes);
        inspection.entries = found.entries;
        inspection.choice = found.choice;
        notes.extend(found.notes);
        inspection.notes = notes;
        Ok(inspection)
    }

    /// Reads the files of a boot entry of this image. That takes as much memory as they have bytes: at most 1 GiB
    /// for the kernel, and 3 GiB for each initial ramdisk.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn read(&self, boot: &Boot) -> Result<BootFiles, ImageError> {
        let initrds = boot.initrds.iter().map(|piece| self.piece(piece));
        Ok(BootFiles {
            kernel: self.piece(&boot.kernel)?,
            initrds: initrds.collect::<Result<_, _>>()?,
            options: boot.options.clone(),
        })
    }

    fn partitions(&self) -> Result<(TableKind, Vec<Partition>, Vec<String>), ImageError> {
        let table = read_table(&self.disk)?;
        let mut partitions = Vec::new();
        for slot in table.slots {
            partitions.push(self.identified(Partition {
                number: Some(slot.number),
                start: slot.start,
                size: slot.len,
                kind: slot.kind,
                name: slot.label,
                partuuid: slot.partuuid,
                file_system: FileSystem::Unknown,
                label: None,
                uuid: None,
                problem: None,
            })?);
        }
        if table.kind == TableKind::None {
            partitions.push(self.identified(Partition {
                number: None,
                start: 0,
                size: self.disk.len(),
                kind: String::new(),
                name: None,
                partuuid: None,
                file_system: FileSystem::Unknown,
                label: None,
                uuid: None,
                problem: None,
            })?);
        }
        Ok((table.kind, partitions, table.notes))
    }

    /// Adds what the signatures of a partition say.
    fn identified(&self, mut partition: Partition) -> Result<Partition, ImageError> {
        let part = self.disk.part(partition.start, partition.size);
        let identity = identify(&part).map_err(ImageError::Read)?;
        partition.file_system = identity.kind;
        partition.label = identity.label;
        partition.uuid = identity.uuid;
        Ok(partition)
    }

    /// Reads a file, or a section of one.
    fn piece(&self, piece: &Piece) -> Result<Vec<u8>, ImageError> {
        let bytes = || -> Result<Vec<u8>, FileError> {
            let tree = self.tree(piece.partition)?;
            match &piece.section {
                None => read(tree.as_ref(), &piece.path, piece.size),
                Some(section) => {
                    let (at, size) = file(tree.as_ref(), &piece.path)?;
                    let end = section.offset.checked_add(piece.size);
                    if end.is_none_or(|end| end > size) {
                        return Err(FileError::Damaged("a file has become shorter".to_owned()));
                    }
                    tree.bytes(&at, section.offset, piece.size)
                }
            }
        };
        bytes().map_err(|source| ImageError::File {
            place: place(piece.partition),
            path: piece.to_string(),
            source,
        })
    }

    /// Opens the file system of a partition.
    fn tree(&self, number: Option<u32>) -> Result<Box<dyn Tree>, FileError> {
        let partitions = self.partitions().map_err(|error| match error {
            ImageError::Read(source) => FileError::Io(source),
            error => FileError::Damaged(error.to_string()),
        })?;
        let found = partitions.1.into_iter().find(|it| it.number == number);
        let partition = found.ok_or(FileError::NotFound)?;
        let part = self.disk.part(partition.start, partition.size);
        open(partition.file_system, &part).unwrap_or(Err(FileError::NotFound))
    }
}

/// Formats an error with its cause.
fn with_source(error: &FileError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
