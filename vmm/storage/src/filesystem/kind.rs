//! Which file system, or other content, a partition has, by its signatures.

use std::io;

use crate::disk::source::Window;

/// Content of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, and ext2 and ext3, which are read alike.
    Ext4,
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// XFS.
    Xfs,
    /// Btrfs.
    Btrfs,
    /// A physical volume of LVM2.
    Lvm,
    /// A volume encrypted with LUKS.
    Luks,
    /// Swap space.
    Swap,
    /// F2FS.
    F2fs,
    /// SquashFS.
    Squashfs,
    /// EROFS.
    Erofs,
    /// ISO 9660, the file system of CDs.
    Iso9660,
    /// NTFS.
    Ntfs,
    /// exFAT.
    Exfat,
    /// A member of a Linux software RAID.
    Raid,
    /// ZFS.
    Zfs,
    /// bcachefs.
    Bcachefs,
    /// Nothing that is known here.
    Unknown,
}

/// Signatures: an offset, the bytes that are there, and what they mean. The first one that fits counts.
const SIGNATURES: [(u64, &[u8], FileSystem); 21] = [
    (0, b"LUKS\xba\xbe", FileSystem::Luks),
    (0, b"XFSB", FileSystem::Xfs),
    (0, b"hsqs", FileSystem::Squashfs),
    (3, b"NTFS    ", FileSystem::Ntfs),
    (3, b"EXFAT   ", FileSystem::Exfat),
    // The first four sectors may have the label of a physical volume.
    (0x018, b"LVM2 001", FileSystem::Lvm),
    (0x218, b"LVM2 001", FileSystem::Lvm),
    (0x418, b"LVM2 001", FileSystem::Lvm),
    (0x618, b"LVM2 001", FileSystem::Lvm),
    (0x400, &[0x10, 0x20, 0xf5, 0xf2], FileSystem::F2fs),
    (0x400, &[0xe2, 0xe1, 0xf5, 0xe0], FileSystem::Erofs),
    (0x438, &[0x53, 0xef], FileSystem::Ext4),
    (0x0ff6, b"SWAPSPACE2", FileSystem::Swap),
    (0x1000, &[0xfc, 0x4e, 0x2b, 0xa9], FileSystem::Raid),
    (
        0x1018,
        &[
            0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba,
            0x6d, 0x81,
        ],
        FileSystem::Bcachefs,
    ),
    (0x8001, b"CD001", FileSystem::Iso9660),
    (0x1_0040, b"_BHRfS_M", FileSystem::Btrfs),
    (
        0x2_0000,
        &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0],
        FileSystem::Zfs,
    ),
    (0x36, b"FAT12   ", FileSystem::Fat),
    (0x36, b"FAT16   ", FileSystem::Fat),
    (0x52, b"FAT32   ", FileSystem::Fat),
];

impl FileSystem {
    /// Returns the name of the file system, in lower case where its own name is a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Fat => "FAT",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::Lvm => "LVM",
            Self::Luks => "LUKS",
            Self::Swap => "swap",
            Self::F2fs => "f2fs",
            Self::Squashfs => "squashfs",
            Self::Erofs => "erofs",
            Self::Iso9660 => "iso9660",
            Self::Ntfs => "NTFS",
            Self::Exfat => "exFAT",
            Self::Raid => "RAID",
            Self::Zfs => "zfs",
            Self::Bcachefs => "bcachefs",
            Self::Unknown => "unknown",
        }
    }

    /// Returns whether a system could be in it, though not one that is read here.
    pub(crate) fn may_have_a_system(self) -> bool {
        !matches!(self, Self::Ext4 | Self::Fat | Self::Swap | Self::Unknown)
    }
}

/// What the signatures of a partition say.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) kind: FileSystem,
    pub(crate) label: Option<String>,
    /// UUID as `blkid` prints it.
    pub(crate) uuid: Option<String>,
}

/// Identifies the content of `part`.
pub(crate) fn identify(part: &Window) -> io::Result<Identity> {
    let mut kind = FileSystem::Unknown;
    for (offset, bytes, meaning) in SIGNATURES {
        if holds(part, offset, bytes)? {
            kind = meaning;
            break;
        }
    }
    if kind == FileSystem::Fat && !holds(part, 510, &[0x55, 0xaa])? {
        kind = FileSystem::Unknown;
    }
    let (label, uuid) = match kind {
        FileSystem::Ext4 => (text::<16>(part, 0x478)?, uuid(part, 0x468)?),
        FileSystem::Xfs => (text::<12>(part, 0x6c)?, uuid(part, 0x20)?),
        FileSystem::Btrfs => (text::<256>(part, 0x1_012b)?, uuid(part, 0x1_0020)?),
        FileSystem::Swap => (text::<16>(part, 0x41c)?, uuid(part, 0x40c)?),
        FileSystem::F2fs => (None, uuid(part, 0x46c)?),
        FileSystem::Luks => (None, text::<40>(part, 0xa8)?),
        FileSystem::Fat if holds(part, 0x52, b"FAT32   ")? => fat(part, 0x43)?,
        FileSystem::Fat => fat(part, 0x27)?,
        _ => (None, None),
    };
    Ok(Identity { kind, label, uuid })
}

fn holds(part: &Window, offset: u64, expected: &[u8]) -> io::Result<bool> {
    match part.bytes(offset, expected.len()) {
        Ok(bytes) => Ok(bytes == expected),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads text of at most `N` bytes, up to the first zero.
fn text<const N: usize>(part: &Window, offset: u64) -> io::Result<Option<String>> {
    let bytes: [u8; N] = part.array(offset)?;
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).trim_end().to_owned();
    Ok((!text.is_empty()).then_some(text))
}

fn uuid(part: &Window, offset: u64) -> io::Result<Option<String>> {
    let bytes: [u8; 16] = part.array(offset)?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let group = |range| digits.get(range).unwrap_or_default();
    let groups = [
        group(0..8),
        group(8..12),
        group(12..16),
        group(16..20),
        group(20..32),
    ];
    Ok((bytes != [0; 16]).then(|| groups.join("-")))
}

/// Reads the number of a FAT volume, which is at `offset`, and the label after it.
fn fat(part: &Window, offset: u64) -> io::Result<(Option<String>, Option<String>)> {
    let [a, b, c, d] = part.array(offset)?;
    let label = text::<11>(part, offset + 4)?.filter(|label| label != "NO NAME");
    Ok((label, Some(format!("{d:02X}{c:02X}-{b:02X}{a:02X}"))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Memory;

    #[test]
    fn each_signature_names_its_file_system() {
        for (offset, bytes, expected) in SIGNATURES {
            let mut part = vec![0; 0x2_1000];
            let at = usize::try_from(offset).unwrap();
            part[510..512].copy_from_slice(&[0x55, 0xaa]);
            part[at..at + bytes.len()].copy_from_slice(bytes);
            let found = identify(&Window::whole(Memory::new(part))).unwrap();
            assert_eq!(found.kind, expected);
        }
    }

    #[test]
    fn nothing_is_found_in_short_or_empty_partitions() {
        for len in [0, 1, 512, 4096, 0x2_1000] {
            let found = identify(&Window::whole(Memory::new(vec![0; len]))).unwrap();
            let nothing = Identity {
                kind: FileSystem::Unknown,
                label: None,
                uuid: None,
            };
            assert_eq!(found, nothing);
        }
    }
}
