//! Partition tables of the PC BIOS: four entries in the first sector, and chains of logical partitions.

use std::io;

use super::slot::Slot;
use crate::disk::source::Window;

const SECTOR: u64 = 512;
/// Offset of the four entries in a sector, and the length of one.
const ENTRIES: usize = 446;
const ENTRY: usize = 16;
const SIGNATURE: [u8; 2] = [0x55, 0xaa];
/// Type of the entry that protects a GPT.
pub(super) const PROTECTIVE: u8 = 0xee;
/// Types of partitions that hold logical partitions.
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// Maximum number of logical partitions. A longer chain is cut.
const MAX_LOGICAL: u32 = 64;

/// An entry of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) kind: u8,
    first: u32,
    count: u32,
}

/// The first sector of a disk with a table.
#[derive(Debug)]
pub(super) struct Mbr {
    pub(super) entries: [Entry; 4],
    signature: u32,
}

/// Reads the table in the first sector. Returns `None` if there is none: no signature, no used entry, or entries
/// that a boot sector cannot have.
pub(super) fn read(disk: &Window) -> io::Result<Option<Mbr>> {
    if disk.len() < SECTOR {
        return Ok(None);
    }
    let sector = disk.array(0)?;
    let Some(entries) = entries(&sector) else {
        return Ok(None);
    };
    // A boot sector of a file system has code at the place of the entries.
    let valid = entries_start_with_a_flag(&sector);
    let used = entries.iter().filter(|entry| entry.kind != 0);
    let sound = used.clone().all(|entry| entry.first > 0 && entry.count > 0);
    if !valid || !sound || used.count() == 0 {
        return Ok(None);
    }
    let signature = sector.get(440..444).and_then(|bytes| bytes.first_chunk());
    Ok(Some(Mbr {
        entries,
        signature: signature.map_or(0, |bytes| u32::from_le_bytes(*bytes)),
    }))
}

/// Returns the partitions of a table, logical ones from number 5 on. Adds what is wrong with them to `notes`.
pub(super) fn slots(disk: &Window, mbr: &Mbr, notes: &mut Vec<String>) -> io::Result<Vec<Slot>> {
    let mut slots = Vec::new();
    let mut extended = Vec::new();
    for (entry, number) in mbr.entries.iter().zip(1..) {
        if EXTENDED.contains(&entry.kind) {
            extended.push(*entry);
        } else if entry.kind != 0 {
            slots.push(slot(
                mbr,
                number,
                entry.kind,
                entry.first.into(),
                entry.count,
            ));
        }
    }
    // Only the first one counts for Linux.
    if let Some(extended) = extended.first() {
        logical(disk, mbr, *extended, &mut slots, notes)?;
    }
    Ok(slots)
}

/// Follows the chain of tables in an extended partition. Each one has the next logical partition, and where the
/// next table is, from the start of the extended partition on.
fn logical(
    disk: &Window,
    mbr: &Mbr,
    extended: Entry,
    slots: &mut Vec<Slot>,
    notes: &mut Vec<String>,
) -> io::Result<()> {
    let base = u64::from(extended.first);
    let mut at = base;
    let mut number = 5;
    for _ in 0..MAX_LOGICAL {
        // Below 2^33 sectors, so this does not overflow.
        let start = at * SECTOR;
        if start + SECTOR > disk.len() {
            notes.push("the chain of logical partitions leads out of the disk".to_owned());
            return Ok(());
        }
        let Some([partition, next, ..]) = entries(&disk.array(start)?) else {
            notes.push(
                "the chain of logical partitions ends at a sector without a table".to_owned(),
            );
            return Ok(());
        };
        if partition.kind != 0 && partition.count > 0 {
            let first = at + u64::from(partition.first);
            slots.push(slot(mbr, number, partition.kind, first, partition.count));
            number += 1;
        }
        if !EXTENDED.contains(&next.kind) || next.count == 0 {
            return Ok(());
        }
        at = base + u64::from(next.first);
    }
    notes.push(format!(
        "the chain of logical partitions was cut after {MAX_LOGICAL}"
    ));
    Ok(())
}

fn slot(mbr: &Mbr, number: u32, kind: u8, first: u64, count: u32) -> Slot {
    let name = match kind {
        0x07 => "NTFS or exFAT",
        0x01 | 0x04 | 0x06 | 0x0b | 0x0c | 0x0e => "FAT",
        0x82 => "Linux swap",
        0x83 => "Linux",
        0x8e => "Linux LVM",
        0xea => "Linux boot",
        0xef => "EFI system",
        0xfd => "Linux RAID",
        _ => "",
    };
    Slot {
        number,
        // Sectors have at most 34 bits, so nothing here overflows.
        start: first * SECTOR,
        len: u64::from(count) * SECTOR,
        kind: match name {
            "" => format!("{kind:#04x}"),
            name => name.to_owned(),
        },
        label: None,
        partuuid: (mbr.signature != 0).then(|| format!("{:08x}-{number:02x}", mbr.signature)),
    }
}

/// Returns the entries in a sector, or `None` if it has no signature.
fn entries(sector: &[u8; 512]) -> Option<[Entry; 4]> {
    if sector.get(510..) != Some(&SIGNATURE) {
        return None;
    }
    let entry = |index: usize| {
        let at = ENTRIES + index * ENTRY;
        let bytes: [u8; ENTRY] = *sector.get(at..)?.first_chunk()?;
        let [_, _, _, _, kind, _, _, _, first @ ..] = bytes;
        let [a, b, c, d, e, f, g, h] = first;
        Some(Entry {
            kind,
            first: u32::from_le_bytes([a, b, c, d]),
            count: u32::from_le_bytes([e, f, g, h]),
        })
    };
    Some([entry(0)?, entry(1)?, entry(2)?, entry(3)?])
}

/// Returns whether each entry begins with a flag that entries have.
fn entries_start_with_a_flag(sector: &[u8; 512]) -> bool {
    let entries = sector.get(ENTRIES..510).unwrap_or_default();
    let mut flags = entries.chunks_exact(ENTRY).filter_map(|it| it.first());
    flags.all(|flag| matches!(flag, 0 | 0x80))
}
