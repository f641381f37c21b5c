//! Finds the partition table of a disk.

use super::mbr::PROTECTIVE;
use super::slot::Slot;
use super::{gpt, mbr};
use crate::disk::source::Window;
use crate::error::ImageError;

/// Kind of a partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// A GUID partition table.
    Gpt,
    /// The table of the PC BIOS.
    Mbr,
    /// None: the disk as a whole may have a file system.
    None,
}

impl TableKind {
    /// Returns the usual name of the table, or `None` if there is no table.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Gpt => Some("GPT"),
            Self::Mbr => Some("MBR"),
            Self::None => None,
        }
    }
}

/// The partition table of a disk.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) kind: TableKind,
    /// Partitions, in the table's order.
    pub(crate) slots: Vec<Slot>,
    /// What is wrong with the table, though it can be used.
    pub(crate) notes: Vec<String>,
}

/// Reads the partition table of `disk`.
pub(crate) fn read(disk: &Window) -> Result<Table, ImageError> {
    let mut notes = Vec::new();
    let gpt = gpt::read(disk).map_err(ImageError::Read)?;
    let mbr = mbr::read(disk).map_err(ImageError::Read)?;
    let protects = |mbr: &mbr::Mbr| mbr.entries.iter().any(|it| it.kind == PROTECTIVE);
    let protected = mbr.as_ref().is_some_and(protects);
    let (kind, slots) = match (gpt, mbr) {
        (Some(Ok(gpt)), mbr) if protected || gpt.damage.is_none() || mbr.is_none() => {
            if let Some(damage) = gpt.damage {
                notes.push(format!(
                    "the primary GPT is damaged ({damage}); the backup was read"
                ));
            }
            (TableKind::Gpt, gpt.slots)
        }
        (Some(Err(why)), None) => return Err(ImageError::Table(why)),
        (Some(Err(why)), Some(_)) if protected => return Err(ImageError::Table(why)),
        (None, Some(_)) if protected => {
            let why =
                "its first sector announces a GPT, and there is none; is the image cut short?";
            return Err(ImageError::Table(why.to_owned()));
        }
        // What is left of a GPT does not count beside a valid MBR.
        (_, Some(mbr)) => {
            let slots = mbr::slots(disk, &mbr, &mut notes).map_err(ImageError::Read)?;
            (TableKind::Mbr, slots)
        }
        (_, None) => (TableKind::None, Vec::new()),
    };
    for slot in &slots {
        let end = slot.start.checked_add(slot.len);
        if end.is_none_or(|end| end > disk.len()) {
            let number = slot.number;
            notes.push(format!(
                "partition {number} ends after the end of the image; is the image cut short?"
            ));
        }
    }
    Ok(Table { kind, slots, notes })
}

#[cfg(test)]
mod tests;
