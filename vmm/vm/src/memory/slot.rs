//! A host mapping that backs guest memory, and the errors of setting memory up.
//!
//! Invariant: a mapping lives as long as its [`Slot`]. [`GuestRam`](super::GuestRam) drops no slot before KVM
//! has removed it.

use std::sync::atomic::AtomicU64;
use std::{io, ptr};

use hvprobe_arch::Gpa;
use vm_memory::MmapRegion;

/// Smallest RAM size of a machine, in bytes.
pub const MIN_RAM: u64 = 16 << 20;

pub(super) const HUGE_PAGE: u64 = 2 << 20;

/// Error of setting up a machine's memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is below [`MIN_RAM`].
    #[error("{mib} MiB of memory is too little: a machine needs at least {} MiB", MIN_RAM >> 20)]
    TooSmall {
        /// The size asked for, in MiB.
        mib: u64,
    },
    /// The size is more than the host has, or more than its processor can address.
    #[error("{mib} MiB of memory is too much: {limit}")]
    TooLarge {
        /// The size asked for, in MiB.
        mib: u64,
        /// Description of the limit that the size exceeds.
        limit: String,
    },
    /// The host refused the mapping.
    #[error("the host refused to map {mib} MiB of memory for the guest")]
    Map {
        /// The size of the mapping, in MiB.
        mib: u64,
        /// The error of `mmap`.
        source: io::Error,
    },
    /// KVM refused a memory slot.
    #[error("kvm refused the memory slot at {at}")]
    Slot {
        /// Start of the slot.
        at: Gpa,
        /// KVM's error.
        source: io::Error,
    },
    /// [`GuestRam::register`](super::GuestRam::register) was called twice.
    #[error("this memory already belongs to a virtual machine")]
    Registered,
}

/// A host mapping that backs guest memory. It is aligned to 2 MiB, so that the host can back it with huge pages
/// and KVM can map them as such.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) start: u64,
    pub(super) map: MmapRegion<()>,
}

impl Slot {
    pub(super) fn new(start: u64, len: u64) -> Result<Self, MemoryError> {
        let refused = |source| MemoryError::Map {
            mib: len >> 20,
            source,
        };
        let overflow = |_| refused(io::ErrorKind::OutOfMemory.into());
        let size = usize::try_from(len).map_err(overflow)?;
        let slack = usize::try_from(HUGE_PAGE).map_err(overflow)?;
        let whole = size
            .checked_add(slack)
            .ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice affects no existing memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), whole, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        let base: *mut u8 = base.cast();
        let head = base.align_offset(slack);
        let tail = slack - head;
        // SAFETY: `head < slack`, so `head + size + tail = whole` and all three pieces lie in the mapping made
        // above. Nothing else refers to it; the outer two pieces are unmapped and never used again.
        let aligned = unsafe {
            let aligned = base.add(head);
            if head > 0 {
                libc::munmap(base.cast(), head);
            }
            if tail > 0 {
                libc::munmap(aligned.add(size).cast(), tail);
            }
            // Only a hint: without huge pages the guest is slower, not wrong.
            libc::madvise(aligned.cast(), size, libc::MADV_HUGEPAGE);
            aligned
        };
        // SAFETY: `aligned` begins a private mapping of `size` bytes, which lives until `drop` below unmaps it,
        // after the last use of the region.
        let map = unsafe { MmapRegion::build_raw(aligned, size, prot, flags) }
            .map_err(|e| refused(io::Error::other(e)))?;
        Ok(Self { start, map })
    }

    pub(super) fn len(&self) -> u64 {
        self.map.size() as u64
    }

    /// Returns the offset of an access, if all of it lies in this slot.
    #[inline]
    pub(super) fn offset(&self, at: Gpa, len: usize) -> Option<usize> {
        let offset = usize::try_from(at.0.checked_sub(self.start)?).ok()?;
        (offset <= self.map.size().checked_sub(len)?).then_some(offset)
    }

    /// Returns the word at `at`, if it lies in this slot and `at` is a multiple of 8.
    #[inline]
    pub(super) fn word(&self, at: Gpa) -> Option<&AtomicU64> {
        let offset = at.0.wrapping_sub(self.start);
        // No slot is smaller than a word.
        if !offset.is_multiple_of(8) || offset > self.len() - 8 {
            return None;
        }
        let word = self
            .map
            .as_ptr()
            .wrapping_add(usize::try_from(offset).ok()?);
        // SAFETY: the eight bytes lie in the mapping, which lives as long as this value and begins at a
        // multiple of 2 MiB, so they are aligned. Other writers, such as the guest, are outside the language's
        // memory model.
        Some(unsafe { AtomicU64::from_ptr(word.cast()) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping for this value alone, no slice of it outlives the borrow it was taken
        // with, and `GuestRam` has removed the slot from KVM before it drops its slots.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map.size()) };
    }
}
