//! Access to guest physical memory.

use crate::Gpa;

/// An access to guest physical memory that is outside the machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no guest memory for {len} bytes at {at}")]
pub struct OutOfRange {
    /// Start of the access.
    pub at: Gpa,
    /// Length of the access in bytes.
    pub len: usize,
}

/// Access to guest physical memory.
///
/// Writes take `&self`, because a borrow cannot promise exclusive access: the guest's processors may change the
/// same bytes at any time.
pub trait PhysMemory {
    /// Reads the bytes at `at` into `into`. After an error, the content of `into` is unspecified.
    ///
    /// # Errors
    /// When any of the bytes lies outside guest memory.
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange>;

    /// Writes `bytes` at `at`.
    ///
    /// # Errors
    /// When any of the bytes lies outside guest memory; then none is written.
    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange>;

    /// Returns the ranges in which the guest may keep data of its own, as addresses and lengths in bytes; empty
    /// if they are not known.
    fn ranges(&self) -> Vec<(Gpa, u64)> {
        Vec::new()
    }

    /// Returns the parts of [`PhysMemory::ranges`] that may contain nonzero bytes. Leaves out pages that, as far as
    /// the host knows, were never touched.
    fn touched(&self) -> Vec<(Gpa, u64)> {
        self.ranges()
    }

    /// Stores `value` at `at`, little-endian.
    ///
    /// # Errors
    /// As [`PhysMemory::write`].
    fn write_u64(&self, at: Gpa, value: u64) -> Result<(), OutOfRange> {
        self.write(at, &value.to_le_bytes())
    }

    /// Stores `new` at `at`, which must be a multiple of 8, if the word there is `old`. Returns whether it was
    /// stored. An implementation for the memory of a running guest must compare and store in one atomic step,
    /// because the guest's processors may change the word at the same time.
    ///
    /// # Errors
    /// As [`PhysMemory::write`].
    fn exchange_u64(&self, at: Gpa, old: u64, new: u64) -> Result<bool, OutOfRange> {
        let same = self.read_u64(at)? == old;
        if same {
            self.write_u64(at, new)?;
        }
        Ok(same)
    }

    /// Reads the little-endian 64-bit word at `at`.
    ///
    /// # Errors
    /// As [`PhysMemory::read`].
    fn read_u64(&self, at: Gpa) -> Result<u64, OutOfRange> {
        let mut word = [0; 8];
        self.read(at, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }
}

/// Memory for this crate's tests.
#[cfg(test)]
pub(crate) mod flat {
    use super::{OutOfRange, PhysMemory};
    use crate::Gpa;
    use std::cell::RefCell;

    /// Guest memory from address 0 up to its size.
    pub(crate) struct FlatMemory(RefCell<Vec<u8>>);

    impl FlatMemory {
        pub(crate) fn new(size: usize) -> Self {
            Self(RefCell::new(vec![0; size]))
        }

        pub(crate) fn write_u64(&self, at: Gpa, value: u64) {
            self.write(at, &value.to_le_bytes()).unwrap();
        }

        pub(crate) fn snapshot(&self) -> Vec<u8> {
            self.0.borrow().clone()
        }
    }

    impl PhysMemory for FlatMemory {
        fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
            let len = into.len();
            let error = OutOfRange { at, len };
            let start = usize::try_from(at.0).map_err(|_| error)?;
            let end = start.checked_add(len).ok_or(error)?;
            into.copy_from_slice(self.0.borrow().get(start..end).ok_or(error)?);
            Ok(())
        }

        fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
            let len = bytes.len();
            let error = OutOfRange { at, len };
            let start = usize::try_from(at.0).map_err(|_| error)?;
            let end = start.checked_add(len).ok_or(error)?;
            self.0
                .borrow_mut()
                .get_mut(start..end)
                .ok_or(error)?
                .copy_from_slice(bytes);
            Ok(())
        }
    }
}
