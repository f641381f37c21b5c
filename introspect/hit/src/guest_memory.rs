//! The memory that displaced instructions and handlers access at a hit.
//!
//! Invariant: it is the memory that the kernel itself could access, whatever process runs.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Memory, MemoryFault};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{WalkError, Walker};

/// The guest's memory as the kernel sees it.
pub(super) struct GuestMemory<'a, M: ?Sized> {
    pub(super) walker: &'a Walker,
    pub(super) mem: &'a M,
    /// Whether the last access was a write.
    pub(super) wrote: bool,
}

impl<M: PhysMemory + ?Sized> GuestMemory<'_, M> {
    pub(super) fn read(&self, at: Gva, into: &mut [u8]) -> Result<(), WalkError> {
        self.walker.read(self.mem, at, into)
    }

    pub(super) fn write(&self, at: Gva, bytes: &[u8]) -> Result<(), WalkError> {
        self.walker.write(self.mem, at, bytes)
    }
}

impl<M: PhysMemory + ?Sized> Memory for GuestMemory<'_, M> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.wrote = false;
        self.walker
            .read_u64(self.mem, at)
            .map_err(|cause| MemoryFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault> {
        self.wrote = true;
        self.walker
            .write_u64(self.mem, at, value)
            .map_err(|cause| MemoryFault { at, cause })
    }
}
