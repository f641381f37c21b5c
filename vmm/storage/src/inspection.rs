//! What is found in an image.

use crate::boot::choice::Choice;
use crate::boot::entry::{Entry, place};
use crate::error::ImageError;
use crate::filesystem::kind::FileSystem;
use crate::partition::table::TableKind;

/// A partition, or the whole of a disk without partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Number of the partition, from 1; `None` for the whole disk.
    pub number: Option<u32>,
    /// First byte.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
    /// Type that the table states, in words if it is a known one; empty for the whole disk.
    pub kind: String,
    /// Name that the table states. Like the label, it comes from the image: make it harmless before it is shown.
    pub name: Option<String>,
    /// What `PARTUUID=` calls the partition.
    pub partuuid: Option<String>,
    /// File system, or other content.
    pub file_system: FileSystem,
    /// Label of the file system.
    pub label: Option<String>,
    /// UUID of the file system.
    pub uuid: Option<String>,
    /// Why the file system was not read, though it is one that can be.
    pub problem: Option<String>,
}

/// What is found in an image.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Kind of its partition table.
    pub table: TableKind,
    /// Its partitions, or one for the whole disk.
    pub partitions: Vec<Partition>,
    /// Boot entries, those of one boot loader after those of another, in the loader's order.
    pub entries: Vec<Entry>,
    /// What is wrong, though the image can be used. The text has parts that come from the image.
    pub notes: Vec<String>,
    pub(crate) choice: Result<Choice, String>,
}

impl Inspection {
    /// Returns the entry that is booted, and why it is this one.
    ///
    /// # Errors
    /// When there is none. The message says what the partitions have instead, and what to do.
    pub fn chosen(&self) -> Result<(&Entry, &Choice), ImageError> {
        let choice = self.choice.as_ref().map_err(String::as_str);
        let found = choice.and_then(|choice| {
            let entry = self.entries.get(choice.entry);
            entry
                .map(|entry| (entry, choice))
                .ok_or("there is no such entry")
        });
        found.map_err(|why| ImageError::NothingToBoot {
            why: self.obstacles(why),
        })
    }

    /// Adds to `why` which partitions were not read, and the notes.
    fn obstacles(&self, why: &str) -> String {
        let mut all = vec![why.to_owned()];
        for partition in &self.partitions {
            let at = place(partition.number);
            let name = partition.file_system.name();
            if let Some(problem) = &partition.problem {
                all.push(format!(
                    "the {name} file system on {at} was not read: {problem}"
                ));
            } else if partition.file_system.may_have_a_system() {
                all.push(format!("{at} has {name}, which is not read on the host"));
            }
        }
        all.extend(self.notes.iter().cloned());
        all.join("; ")
    }
}
