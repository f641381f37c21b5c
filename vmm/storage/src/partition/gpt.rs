//! GUID partition tables (UEFI specification, section 5.3).

use std::io;

use super::guid;
use super::slot::Slot;
use crate::disk::source::Window;

const MAGIC: &[u8; 8] = b"EFI PART";
/// Smallest header.
const HEADER: usize = 92;
/// Smallest entry.
const ENTRY: usize = 128;
/// Largest entry and largest number of entries that are read. Tools write 128 entries of 128 bytes.
const MAX_ENTRY: usize = 4096;
const MAX_ENTRIES: usize = 1024;

/// Sizes of a sector that disks have, in bytes.
const SECTORS: [u64; 2] = [512, 4096];

/// A table that was read.
#[derive(Debug)]
pub(super) struct Gpt {
    pub(super) slots: Vec<Slot>,
    /// What is wrong with the primary table, if the backup was read instead.
    pub(super) damage: Option<String>,
}

/// Reads the table. Returns `None` if the disk has neither of the two copies, and a description of the damage if
/// neither can be used.
pub(super) fn read(disk: &Window) -> io::Result<Option<Result<Gpt, String>>> {
    let mut damage = None;
    for sector in SECTORS {
        match copy(disk, sector, 1)? {
            None => {}
            Some(Ok(slots)) => {
                return Ok(Some(Ok(Gpt {
                    slots,
                    damage: None,
                })));
            }
            Some(Err(why)) => damage = Some((sector, why)),
        }
    }
    // The sector size of a disk without a primary table is unknown, so try both.
    let sectors = match damage {
        Some((sector, _)) => vec![sector],
        None => SECTORS.to_vec(),
    };
    let primary = damage.map(|(_, why)| why);
    let mut backup = None;
    for sector in sectors {
        let Some(last) = (disk.len() / sector)
            .checked_sub(1)
            .filter(|last| *last > 1)
        else {
            continue;
        };
        match copy(disk, sector, last)? {
            None => {}
            Some(Ok(slots)) => {
                let damage = primary.unwrap_or_else(|| "it has no signature".to_owned());
                return Ok(Some(Ok(Gpt {
                    slots,
                    damage: Some(damage),
                })));
            }
            Some(Err(why)) => backup = Some(why),
        }
    }
    Ok(match (primary, backup) {
        (None, None) => None,
        (primary, backup) => {
            let none = || "it has no signature".to_owned();
            let (primary, backup) = (primary.unwrap_or_else(none), backup.unwrap_or_else(none));
            Some(Err(format!(
                "of the primary GPT, {primary}; of the backup, {backup}"
            )))
        }
    })
}

/// Reads the copy whose header is in sector `at`. Returns `None` if there is none, and a description of the damage
/// if it cannot be used.
fn copy(disk: &Window, sector: u64, at: u64) -> io::Result<Option<Result<Vec<Slot>, String>>> {
    let (Some(start), Ok(size)) = (at.checked_mul(sector), usize::try_from(sector)) else {
        return Ok(None);
    };
    if start.checked_add(sector).is_none_or(|end| end > disk.len()) {
        return Ok(None);
    }
    let header = disk.bytes(start, size)?;
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let entries = match Entries::find(&header, sector, at) {
        Ok(entries) => entries,
        Err(why) => return Ok(Some(Err(why.to_owned()))),
    };
    let end = entries.start.checked_add(entries.bytes as u64);
    if end.is_none_or(|end| end > disk.len()) {
        return Ok(Some(Err("its entries lie outside of the disk".to_owned())));
    }
    let bytes = disk.bytes(entries.start, entries.bytes)?;
    if crc32fast::hash(&bytes) != entries.checksum {
        return Ok(Some(Err("the checksum of its entries is wrong".to_owned())));
    }
    let numbered = bytes.chunks_exact(entries.size).zip(1..);
    let slots = numbered.filter_map(|(entry, number)| slot(entry, number, sector));
    Ok(Some(Ok(slots.collect())))
}

/// Where a header says that its entries are.
struct Entries {
    start: u64,
    bytes: usize,
    size: usize,
    checksum: u32,
}

impl Entries {
    /// Checks a header, which is a whole sector, and returns where its entries are.
    fn find(header: &[u8], sector: u64, at: u64) -> Result<Self, &'static str> {
        let word = |offset| u32::from_le_bytes(field(header, offset));
        let long = |offset| u64::from_le_bytes(field(header, offset));
        let len = usize::try_from(word(12)).unwrap_or(usize::MAX);
        let used = header.get(..len).filter(|_| len >= HEADER);
        let mut used = used.ok_or("the size of its header is wrong")?.to_vec();
        if let Some(checksum) = used.get_mut(16..20) {
            checksum.fill(0);
        }
        if crc32fast::hash(&used) != word(16) {
            return Err("the checksum of its header is wrong");
        }
        if long(24) != at {
            return Err("its header is for another sector");
        }
        let size = usize::try_from(word(84)).unwrap_or(usize::MAX);
        let count = usize::try_from(word(80)).unwrap_or(usize::MAX);
        if !(ENTRY..=MAX_ENTRY).contains(&size) || !size.is_power_of_two() {
            return Err("the size of its entries is wrong");
        }
        if count > MAX_ENTRIES {
            return Err("it has more entries than are read");
        }
        let start = long(72).checked_mul(sector);
        Ok(Self {
            start: start.ok_or("its entries lie outside of the disk")?,
            bytes: count * size,
            size,
            checksum: word(88),
        })
    }
}

/// Reads an entry of at least [`ENTRY`] bytes. Returns `None` if it is unused, or has no sectors.
fn slot(entry: &[u8], number: u32, sector: u64) -> Option<Slot> {
    let kind: [u8; 16] = field(entry, 0);
    let first = u64::from_le_bytes(field(entry, 32));
    let last = u64::from_le_bytes(field(entry, 40));
    if kind == [0; 16] {
        return None;
    }
    let start = first.checked_mul(sector)?;
    let len = last
        .checked_sub(first)?
        .checked_add(1)?
        .checked_mul(sector)?;
    let name = entry.get(56..128).unwrap_or_default().chunks_exact(2);
    let name = name.map(|unit| u16::from_le_bytes(field(unit, 0)));
    let name: Vec<u16> = name.take_while(|unit| *unit != 0).collect();
    let name = String::from_utf16_lossy(&name);
    Some(Slot {
        number,
        start,
        len,
        kind: guid::type_name(&kind),
        label: (!name.is_empty()).then_some(name),
        partuuid: Some(guid::text(&field(entry, 16))),
    })
}

/// Returns the `N` bytes at `offset`, or zeros if the bytes end before.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let field = bytes.get(offset..).and_then(|bytes| bytes.first_chunk());
    field.copied().unwrap_or([0; N])
}
