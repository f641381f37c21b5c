//! What a disk is to its readers: bytes at offsets.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// The bytes of a disk.
pub(crate) trait Source: Debug + Send + Sync {
    /// Returns the size of the disk in bytes.
    fn len(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on. Fails if not all of them are on the disk.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// A range of a disk. No read leaves it.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    source: Arc<dyn Source>,
    start: u64,
    len: u64,
}

impl Window {
    /// Returns the whole of a disk.
    pub(crate) fn whole(source: impl Source + 'static) -> Self {
        let len = source.len();
        Self {
            source: Arc::new(source),
            start: 0,
            len,
        }
    }

    /// Returns the `len` bytes from `start` on, or those of them that are in this window.
    pub(crate) fn part(&self, start: u64, len: u64) -> Self {
        let start = start.min(self.len);
        Self {
            source: Arc::clone(&self.source),
            // Both are within the disk.
            start: self.start.saturating_add(start),
            len: len.min(self.len.saturating_sub(start)),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `buffer` with the bytes from `offset` on. Fails if not all of them are in the window.
    pub(crate) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let at = self.start.checked_add(offset);
        let at = at.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        self.source.read_at(at, buffer)
    }

    /// Returns the `len` bytes from `offset` on. The caller bounds `len`.
    pub(crate) fn bytes(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the `N` bytes from `offset` on.
    pub(crate) fn array<const N: usize>(&self, offset: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Memory;
    use super::*;

    #[test]
    fn no_read_leaves_a_window() {
        let disk = Window::whole(Memory::new((0..100).collect()));
        let part = disk.part(10, 20).part(5, 100);
        assert_eq!(part.len(), 15);
        assert_eq!(part.array(0).unwrap(), [15, 16]);
        assert_eq!(part.array(13).unwrap(), [28, 29]);
        for (offset, len) in [(14, 2), (15, 1), (u64::MAX, 1), (u64::MAX, 2), (0, 16)] {
            let error = part.bytes(offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{offset} {len}");
        }
        assert_eq!(disk.part(u64::MAX, u64::MAX).len(), 0);
        assert_eq!(disk.part(99, u64::MAX).bytes(0, 1).unwrap(), [99]);
    }
}
