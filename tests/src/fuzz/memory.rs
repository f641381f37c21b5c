//! Guest memory for the targets, from address 0 up to its size.

use std::cell::RefCell;

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};

/// Bytes of the memory.
pub(super) struct Flat(RefCell<Vec<u8>>);

impl Flat {
    /// Creates memory of `size` bytes that begins with `content`; the rest is zero.
    pub(super) fn new(content: &[u8], size: usize) -> Self {
        let mut bytes = content[..content.len().min(size)].to_vec();
        bytes.resize(size, 0);
        Self(RefCell::new(bytes))
    }

    /// Returns the whole content.
    pub(super) fn snapshot(&self) -> Vec<u8> {
        self.0.borrow().clone()
    }

    fn range(&self, at: Gpa, len: usize) -> Result<std::ops::Range<usize>, OutOfRange> {
        usize::try_from(at.0)
            .ok()
            .and_then(|start| Some(start..start.checked_add(len)?))
            .filter(|range| range.end <= self.0.borrow().len())
            .ok_or(OutOfRange { at, len })
    }
}

impl PhysMemory for Flat {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, into.len())?;
        into.copy_from_slice(&self.0.borrow()[range]);
        Ok(())
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, bytes.len())?;
        self.0.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }
}
