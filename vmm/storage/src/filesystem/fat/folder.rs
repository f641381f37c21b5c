//! Entries of a FAT folder, with long names.

/// Length of an entry.
const ENTRY: usize = 32;
/// Maximum number of entries that a long name takes, and the characters in each.
const LONG_ENTRIES: usize = 20;
const LONG_CHARS: usize = 13;

const LONG_NAME: u8 = 0x0f;
const VOLUME: u8 = 0x08;
const FOLDER: u8 = 0x10;

/// A file or folder in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// The name in the style of DOS, such as `BOOTX64.EFI`, by which the entry can be found, too.
    pub(super) short: String,
    pub(super) is_folder: bool,
    /// First cluster; 0 for an empty file, and for the root folder.
    pub(super) cluster: u32,
    /// Size in bytes; 0 for a folder.
    pub(super) size: u32,
}

/// Part of a long name that has been read: entries precede the file's own one, the last part first.
#[derive(Default)]
struct Long {
    /// Characters, in the order of the name.
    units: Vec<u16>,
    /// Number of the entry that was read last. The next one has the number below.
    number: usize,
    checksum: u8,
}

/// Returns the entries in the bytes of a folder, without `.`, `..` and the volume's label.
pub(super) fn entries(bytes: &[u8]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut long = None;
    for entry in bytes.chunks_exact(ENTRY) {
        let Some(entry) = entry.first_chunk::<ENTRY>() else {
            break;
        };
        let (first, attributes) = (entry[0], entry[11]);
        if first == 0 {
            break;
        }
        if first == 0xe5 {
            long = None;
        } else if attributes & 0x3f == LONG_NAME {
            long = part(long.take(), entry);
        } else {
            let name = long.take().and_then(|long| complete(&long, entry));
            if attributes & VOLUME == 0 && first != b'.' {
                entries.push(short(entry, name));
            }
        }
    }
    entries
}

/// Adds an entry to the long name that was read so far. Returns `None` if it does not continue it.
fn part(long: Option<Long>, entry: &[u8; ENTRY]) -> Option<Long> {
    let number = usize::from(entry[0] & 0x3f);
    let checksum = entry[13];
    let mut long = match long {
        _ if entry[0] & 0x40 != 0 => Long {
            units: Vec::new(),
            number: number + 1,
            checksum,
        },
        long => long?,
    };
    if !(1..=LONG_ENTRIES).contains(&number)
        || long.number != number + 1
        || long.checksum != checksum
    {
        return None;
    }
    let chars = [&entry[1..11], &entry[14..26], &entry[28..32]].concat();
    let units = chars.chunks_exact(2);
    let mut units: Vec<u16> = units.map(|it| u16::from_le_bytes([it[0], it[1]])).collect();
    debug_assert_eq!(units.len(), LONG_CHARS);
    units.append(&mut long.units);
    long.units = units;
    long.number = number;
    Some(long)
}

/// Returns the long name if all of it was read, and it is that of `entry`.
fn complete(long: &Long, entry: &[u8; ENTRY]) -> Option<String> {
    let sum = |sum: u8, byte: &u8| sum.rotate_right(1).wrapping_add(*byte);
    let checksum = entry[..11].iter().fold(0, sum);
    if long.number != 1 || long.checksum != checksum {
        return None;
    }
    let units = long.units.split(|unit| *unit == 0).next()?;
    let name = String::from_utf16(units).ok()?;
    let valid = !name.is_empty() && !name.contains('/') && name != "." && name != "..";
    valid.then_some(name)
}

/// Reads an entry with the long name `name`.
fn short(entry: &[u8; ENTRY], name: Option<String>) -> Entry {
    let text = |bytes: &[u8], is_lower: bool| {
        let text: String = bytes
            .iter()
            .map(|byte| match byte {
                b'/' | 0x80.. | 0..0x20 => '_',
                byte => char::from(*byte),
            })
            .collect();
        let text = text.trim_end().to_owned();
        if is_lower {
            text.to_ascii_lowercase()
        } else {
            text
        }
    };
    let full = |base_lower, extension_lower| {
        let base = text(&entry[..8], base_lower);
        match text(&entry[8..11], extension_lower) {
            extension if extension.is_empty() => base,
            extension => format!("{base}.{extension}"),
        }
    };
    // Windows writes names in lower case without a long name, with a flag for each part.
    let lower = entry[12];
    let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
    Entry {
        name: name.unwrap_or_else(|| full(lower & 0x08 != 0, lower & 0x10 != 0)),
        short: full(false, false),
        is_folder: entry[11] & FOLDER != 0,
        cluster: u32::from(word(26)) | u32::from(word(20)) << 16,
        size: u32::from(word(28)) | u32::from(word(30)) << 16,
    }
}
