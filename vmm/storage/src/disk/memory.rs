//! A disk in memory, for tests and fuzzing.

use std::io;

use super::source::Source;

/// A disk in memory.
#[derive(Debug)]
pub(crate) struct Memory(Vec<u8>);

impl Memory {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl Source for Memory {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.0.get(start..)?.get(..buffer.len()));
        let bytes = bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}
