//! The layout of a FAT volume, and chains of its clusters (Microsoft, "FAT: General Overview of On-Disk Format").

use crate::disk::source::Window;
use crate::error::FileError;

/// Width of an entry in the file allocation table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Bits12,
    Bits16,
    Bits32,
}

/// Where the root folder is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Root {
    /// Offset and length in bytes.
    Fixed(u64, u64),
    /// First cluster.
    Chain(u32),
}

/// A FAT volume.
#[derive(Debug)]
pub(super) struct Volume {
    part: Window,
    pub(super) width: Width,
    pub(super) root: Root,
    /// Offset and length of the file allocation table in use.
    table: (u64, u64),
    /// Offset of the first cluster, which has number 2.
    data: u64,
    /// Size of a cluster in bytes.
    cluster: u64,
    /// Number of clusters.
    clusters: u64,
}

impl Volume {
    /// Reads the boot sector of `part`.
    pub(super) fn open(part: &Window) -> Result<Self, FileError> {
        let sector: [u8; 512] = part.array(0)?;
        let byte = |at: usize| u64::from(sector.get(at).copied().unwrap_or(0));
        let half = |at: usize| byte(at) | byte(at + 1) << 8;
        let word = |at: usize| half(at) | half(at + 2) << 16;

        let size = half(11);
        if !matches!(size, 512 | 1024 | 2048 | 4096) {
            return Err(damaged("the size of its sectors is wrong"));
        }
        let per_cluster = byte(13);
        if !per_cluster.is_power_of_two() {
            return Err(damaged("the size of its clusters is wrong"));
        }
        let (reserved, tables, root_entries) = (half(14), byte(16), half(17));
        let (short, long) = (half(22), word(36));
        let table_sectors = if short == 0 { long } else { short };
        let total = match half(19) {
            0 => word(32),
            total => total,
        };
        if reserved == 0 || tables == 0 || table_sectors == 0 {
            return Err(damaged("it has no file allocation table"));
        }
        // All of these have at most 32 bits, so nothing overflows.
        let root_start = reserved + tables * table_sectors;
        let root_len = (root_entries * 32).div_ceil(size);
        let data = root_start + root_len;
        let clusters = total.saturating_sub(data) / per_cluster;
        if clusters == 0 {
            return Err(damaged("it has no clusters"));
        }
        if total * size > part.len() {
            return Err(damaged(
                "it is larger than its partition; is the image cut short?",
            ));
        }
        let width = match (short, clusters) {
            (0, _) => Width::Bits32,
            (_, 0..4085) => Width::Bits12,
            _ => Width::Bits16,
        };
        let (flags, root_cluster) = (half(40), word(44));
        let active = match width {
            Width::Bits32 if flags & 0x80 != 0 => (flags & 0xf).min(tables - 1),
            _ => 0,
        };
        Ok(Self {
            part: part.clone(),
            width,
            root: match width {
                Width::Bits32 => Root::Chain(u32::try_from(root_cluster).unwrap_or(0)),
                _ => Root::Fixed(root_start * size, root_entries * 32),
            },
            table: (
                (reserved + active * table_sectors) * size,
                table_sectors * size,
            ),
            data: data * size,
            cluster: per_cluster * size,
            clusters,
        })
    }

    /// Returns the bytes of a range of the volume, for the root folder of FAT12 and FAT16.
    pub(super) fn range(&self, offset: u64, len: u64) -> Result<Vec<u8>, FileError> {
        let len = usize::try_from(len).map_err(|_| FileError::TooDeep)?;
        Ok(self.part.bytes(offset, len)?)
    }

    /// Returns the `len` bytes from `offset` on of the chain that begins at cluster `first`. Fails if the chain is
    /// shorter.
    pub(super) fn chain(&self, first: u32, offset: u64, len: u64) -> Result<Vec<u8>, FileError> {
        let short = || damaged("a chain of clusters is shorter than its file");
        let size = usize::try_from(len).map_err(|_| FileError::TooDeep)?;
        let mut bytes = vec![0; size];
        let mut rest = bytes.as_mut_slice();
        let mut at = Some(first);
        let mut skipped = offset;
        while !rest.is_empty() {
            let cluster = at.ok_or_else(short)?;
            let start = self.start(cluster)?;
            if skipped >= self.cluster {
                skipped -= self.cluster;
            } else {
                let here = usize::try_from(self.cluster - skipped).unwrap_or(usize::MAX);
                let (now, later) = rest.split_at_mut(here.min(rest.len()));
                self.part.read_at(start + skipped, now)?;
                rest = later;
                skipped = 0;
            }
            if !rest.is_empty() {
                at = self.next(cluster)?;
            }
        }
        Ok(bytes)
    }

    /// Returns the bytes of the chain that begins at cluster `first`, at most `limit`.
    pub(super) fn whole(&self, first: u32, limit: u64) -> Result<Vec<u8>, FileError> {
        let mut bytes = Vec::new();
        let mut at = Some(first);
        while let Some(cluster) = at {
            let size = bytes.len() as u64 + self.cluster;
            if size > limit {
                return Err(FileError::TooLarge { size, limit });
            }
            bytes.extend(self.range(self.start(cluster)?, self.cluster)?);
            at = self.next(cluster)?;
        }
        Ok(bytes)
    }

    /// Returns the offset of a cluster.
    fn start(&self, cluster: u32) -> Result<u64, FileError> {
        let index = u64::from(cluster).checked_sub(2);
        let index = index.filter(|index| *index < self.clusters);
        let index =
            index.ok_or_else(|| damaged("a chain leads to a cluster that does not exist"))?;
        Ok(self.data + index * self.cluster)
    }

    /// Returns the cluster after `cluster`, or `None` at the end of the chain.
    fn next(&self, cluster: u32) -> Result<Option<u32>, FileError> {
        let number = u64::from(cluster);
        let (offset, len) = match self.width {
            Width::Bits12 => (number + number / 2, 2),
            Width::Bits16 => (number * 2, 2),
            Width::Bits32 => (number * 4, 4),
        };
        let (table, size) = self.table;
        if offset + len > size {
            return Err(damaged("its file allocation table is too short"));
        }
        let half = |at| self.part.array(table + at).map(u16::from_le_bytes);
        let (next, end) = match self.width {
            Width::Bits12 if cluster.is_multiple_of(2) => (u32::from(half(offset)? & 0xfff), 0xff8),
            Width::Bits12 => (u32::from(half(offset)? >> 4), 0xff8),
            Width::Bits16 => (u32::from(half(offset)?), 0xfff8),
            Width::Bits32 => {
                let next = u32::from_le_bytes(self.part.array(table + offset)?);
                (next & 0x0fff_ffff, 0x0fff_fff8)
            }
        };
        Ok((next < end).then_some(next))
    }
}

fn damaged(what: &str) -> FileError {
    FileError::Damaged(what.to_owned())
}
