//! Guest memory: the RAM that the guest's memory map shows, and an optional hidden region.
//!
//! Invariants: RAM fills [0, 3 GiB) and continues at 4 GiB; the last GiB below 4 GiB belongs to the interrupt
//! controllers. The hidden region lies above all RAM, at 4 GiB or higher, on a 1 GiB boundary, and appears in no
//! memory map that the guest gets. A host mapping is unmapped only after KVM has removed its slot. So a vCPU that
//! outlives this value finds no memory, never memory that belongs to something else.
//!
//! Reads and writes take no lock and allocate nothing; they are on the hit path.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use kvm_bindings::{KVMIO, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::VolatileMemory;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::slot::{HUGE_PAGE, MIN_RAM, MemoryError, Slot};
use super::touched::touched;

/// End of RAM below 4 GiB. The I/O APIC and the local APICs follow it.
const HOLE_START: u64 = 3 << 30;

/// Start of RAM above 4 GiB.
pub(crate) const HOLE_END: u64 = 4 << 30;

const GIB: u64 = 1 << 30;

// Request number from the KVM API.
ioctl_iow_nr!(
    KVM_SET_USER_MEMORY_REGION,
    KVMIO,
    0x46,
    kvm_userspace_memory_region
);

/// Memory of one machine.
#[derive(Debug)]
pub struct GuestRam {
    /// Slots in ascending order: RAM, then the hidden region if there is one.
    slots: Vec<Slot>,
    /// Number of slots that are RAM.
    ram: usize,
    /// Start of the hidden region, and its size in bytes.
    hidden: (Gpa, u64),
    /// The VM with which the memory is registered.
    pub(super) vm: OnceLock<OwnedFd>,
}

impl GuestRam {
    /// Reserves `bytes` of RAM, rounded up to 2 MiB. Commits nothing: the host allocates pages when the guest
    /// touches them.
    ///
    /// # Errors
    /// When the size is below [`MIN_RAM`], more than the host's memory or beyond its processor's physical
    /// addresses, or when the host refuses the mapping.
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        Self::with_hidden(bytes, 0)
    }

    /// Like [`GuestRam::new`], and adds a hidden region of `hidden` bytes, a multiple of 4096.
    ///
    /// # Errors
    /// As [`GuestRam::new`].
    pub fn with_hidden(bytes: u64, hidden: u64) -> Result<Self, MemoryError> {
        Self::with_limits(bytes, hidden, host_memory(), host_address_bits())
    }

    /// Like [`GuestRam::with_hidden`], for a host with `host_memory` bytes and physical addresses of
    /// `host_address_bits` bits.
    pub(crate) fn with_limits(
        bytes: u64,
        hidden_size: u64,
        host_memory: u64,
        host_address_bits: u32,
    ) -> Result<Self, MemoryError> {
        let mib = bytes.div_ceil(1 << 20);
        if bytes < MIN_RAM {
            return Err(MemoryError::TooSmall { mib: bytes >> 20 });
        }
        if bytes > host_memory {
            let limit = format!("this host has {} MiB", host_memory >> 20);
            return Err(MemoryError::TooLarge { mib, limit });
        }
        let addressable = || MemoryError::TooLarge {
            mib,
            limit: format!("this host's processor addresses {host_address_bits} bits"),
        };
        let bytes = bytes
            .checked_next_multiple_of(HUGE_PAGE)
            .ok_or_else(addressable)?;
        let low = bytes.min(HOLE_START);
        let high = bytes - low;
        // Leaves at least 1 GiB free before the hidden region, so that a guest that rounds its memory map up
        // does not reach it.
        let hidden = HOLE_END
            .checked_add(high)
            .and_then(|end| end.checked_add(GIB))
            .and_then(|end| end.checked_next_multiple_of(GIB))
            .ok_or_else(addressable)?;
        let end = hidden.checked_add(hidden_size).ok_or_else(addressable)?;
        if host_address_bits < u64::BITS && end > 1 << host_address_bits {
            return Err(addressable());
        }

        let mut slots = vec![Slot::new(0, low)?];
        if high > 0 {
            slots.push(Slot::new(HOLE_END, high)?);
        }
        let ram = slots.len();
        if hidden_size > 0 {
            slots.push(Slot::new(hidden, hidden_size)?);
        }
        Ok(Self {
            slots,
            ram,
            hidden: (Gpa(hidden), hidden_size),
            vm: OnceLock::new(),
        })
    }

    /// Returns the size of RAM in bytes, without the hidden region.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.regions().map(|(_, len)| len).sum()
    }

    /// Returns the address after the last byte of RAM.
    #[must_use]
    pub fn ram_end(&self) -> Gpa {
        let end = self.regions().map(|(start, len)| start.0 + len).max();
        Gpa(end.unwrap_or_default())
    }

    /// Returns the address after the last byte of RAM below 4 GiB.
    #[must_use]
    pub fn low_end(&self) -> Gpa {
        Gpa(self.ram_end().0.min(HOLE_START))
    }

    /// Returns the ranges of RAM in ascending order, as start and length in bytes, without the hidden region.
    pub fn regions(&self) -> impl Iterator<Item = (Gpa, u64)> {
        self.ram().map(|(_, slot)| (Gpa(slot.start), slot.len()))
    }

    /// Returns the start of the hidden region and its size in bytes. The size is 0 if there is none.
    #[must_use]
    pub fn hidden(&self) -> (Gpa, u64) {
        self.hidden
    }

    /// Registers this memory with `vm`, as slots 0, 1, ...
    ///
    /// # Errors
    /// When KVM refuses a slot, or the memory is registered already.
    pub fn register(&self, vm: &VmFd) -> Result<(), MemoryError> {
        // SAFETY: the descriptor is open for as long as `vm` is borrowed, and is only duplicated.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        let fd = fd
            .try_clone_to_owned()
            .map_err(|source| MemoryError::Slot { at: Gpa(0), source })?;
        self.vm.set(fd).map_err(|_| MemoryError::Registered)?;
        for (number, slot) in (0u32..).zip(&self.slots) {
            self.set_slot(number, slot, slot.len())
                .map_err(|source| MemoryError::Slot {
                    at: Gpa(slot.start),
                    source,
                })?;
        }
        Ok(())
    }

    /// Returns the RAM slots with KVM's slot numbers.
    pub(super) fn ram(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..).zip(self.slots.iter().take(self.ram))
    }

    fn set_slot(&self, number: u32, slot: &Slot, len: u64) -> io::Result<()> {
        self.change_slot(number, slot, len, 0)
    }

    pub(super) fn change_slot(
        &self,
        number: u32,
        slot: &Slot,
        len: u64,
        flags: u32,
    ) -> io::Result<()> {
        let Some(vm) = self.vm.get() else {
            return Ok(());
        };
        let region = kvm_userspace_memory_region {
            slot: number,
            flags,
            guest_phys_addr: slot.start,
            memory_size: len,
            userspace_addr: slot.map.as_ptr() as u64,
        };
        // SAFETY: the request takes exactly this structure and only reads it. The memory it names is `slot`'s
        // mapping, which is unmapped only after `drop` has removed the slot from KVM.
        done(unsafe { ioctl_with_ref(&vm.as_fd(), KVM_SET_USER_MEMORY_REGION(), &region) })
    }

    /// Returns the word at `at`, if `at` is a multiple of 8.
    #[inline]
    fn word(&self, at: Gpa) -> Option<&AtomicU64> {
        self.slots.iter().find_map(|slot| slot.word(at))
    }

    /// Reads a word that is not in the first slot or not at a multiple of 8.
    #[inline(never)]
    fn read_elsewhere(&self, at: Gpa) -> Result<u64, OutOfRange> {
        if let Some(word) = self.word(at) {
            return Ok(u64::from_le(word.load(Ordering::Relaxed)));
        }
        let mut word = [0; 8];
        self.read(at, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    #[inline]
    fn find(&self, at: Gpa, len: usize) -> Result<(&Slot, usize), OutOfRange> {
        self.slots
            .iter()
            .find_map(|slot| Some((slot, slot.offset(at, len)?)))
            .ok_or(OutOfRange { at, len })
    }
}

impl Drop for GuestRam {
    fn drop(&mut self) {
        for (number, slot) in (0u32..).zip(&self.slots) {
            if let Err(error) = self.set_slot(number, slot, 0) {
                // A machine that still runs would keep using this memory, so it must stay mapped.
                tracing::error!(%error, slot = number, "kvm keeps guest memory, so it is leaked");
                std::mem::take(&mut self.slots)
                    .into_iter()
                    .for_each(std::mem::forget);
                return;
            }
        }
    }
}

impl PhysMemory for GuestRam {
    #[inline]
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let len = into.len();
        let (slot, offset) = self.find(at, len)?;
        let bytes = slot
            .map
            .get_slice(offset, len)
            .map_err(|_| OutOfRange { at, len })?;
        bytes.copy_to(into);
        Ok(())
    }

    #[inline]
    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        let len = bytes.len();
        let (slot, offset) = self.find(at, len)?;
        let into = slot
            .map
            .get_slice(offset, len)
            .map_err(|_| OutOfRange { at, len })?;
        into.copy_from(bytes);
        Ok(())
    }

    fn ranges(&self) -> Vec<(Gpa, u64)> {
        self.regions().collect()
    }

    fn touched(&self) -> Vec<(Gpa, u64)> {
        // If the host does not report touched pages, all of RAM may be touched.
        touched(self.ram().map(|(_, slot)| slot)).unwrap_or_else(|_| self.ranges())
    }

    /// Stores the word in one access, never torn, if `at` is a multiple of 8.
    #[inline]
    fn write_u64(&self, at: Gpa, value: u64) -> Result<(), OutOfRange> {
        match self.word(at) {
            Some(word) => {
                word.store(value.to_le(), Ordering::Relaxed);
                Ok(())
            }
            None => self.write(at, &value.to_le_bytes()),
        }
    }

    #[inline]
    fn exchange_u64(&self, at: Gpa, old: u64, new: u64) -> Result<bool, OutOfRange> {
        let word = self.word(at).ok_or(OutOfRange { at, len: 8 })?;
        let exchanged = word.compare_exchange(
            old.to_le(),
            new.to_le(),
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        Ok(exchanged.is_ok())
    }

    /// Loads the word in one access, never torn, if `at` is a multiple of 8.
    #[inline]
    fn read_u64(&self, at: Gpa) -> Result<u64, OutOfRange> {
        // Most reads of a hit are in the first slot, below 3 GiB. This path takes few instructions and registers.
        match self.slots.first().and_then(|slot| slot.word(at)) {
            Some(word) => Ok(u64::from_le(word.load(Ordering::Relaxed))),
            None => self.read_elsewhere(at),
        }
    }
}

/// Converts an ioctl's return value to a result.
pub(super) fn done(ret: libc::c_int) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the size of the host's memory in bytes.
fn host_memory() -> u64 {
    // SAFETY: `sysconf` reads no memory of ours.
    let (pages, page) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    // If the amount is unknown, there is no limit.
    match (u64::try_from(pages), u64::try_from(page)) {
        (Ok(pages), Ok(page)) => pages.saturating_mul(page),
        _ => u64::MAX,
    }
}

/// Returns the width of a physical address in bits, from CPUID 0x8000_0008 EAX\[7:0\] (SDM vol. 2, CPUID).
fn host_address_bits() -> u32 {
    use std::arch::x86_64::__cpuid;
    if __cpuid(0x8000_0000).eax >= 0x8000_0008 {
        __cpuid(0x8000_0008).eax & 0xff
    } else {
        36
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    use super::*;

    const HIDDEN: u64 = 14 << 20;

    fn layout(bytes: u64) -> Result<GuestRam, MemoryError> {
        GuestRam::with_limits(bytes, HIDDEN, 1 << 36, 40)
    }

    fn check(bytes: u64, expected: Expect) {
        let text = match layout(bytes) {
            Ok(ram) => {
                let regions: Vec<_> = ram.regions().collect();
                format!(
                    "{regions:x?} end {} hidden {:x?}",
                    ram.ram_end(),
                    ram.hidden()
                )
            }
            Err(error) => error.to_string(),
        };
        expected.assert_eq(&text);
    }

    #[test]
    fn ram_leaves_the_hole_free_and_hides_the_region_above() {
        check(
            256 << 20,
            expect!["[(Gpa(0x0), 10000000)] end 0x10000000 hidden (Gpa(0x140000000), e00000)"],
        );
        check(
            3 << 30,
            expect!["[(Gpa(0x0), c0000000)] end 0xc0000000 hidden (Gpa(0x140000000), e00000)"],
        );
        check(
            (3 << 30) + 1,
            expect![
                "[(Gpa(0x0), c0000000), (Gpa(0x100000000), 200000)] end 0x100200000 hidden (Gpa(0x180000000), e00000)"
            ],
        );
        check(
            8 << 30,
            expect![
                "[(Gpa(0x0), c0000000), (Gpa(0x100000000), 140000000)] end 0x240000000 hidden (Gpa(0x280000000), e00000)"
            ],
        );
    }

    #[test]
    fn absurd_sizes_are_refused_with_the_limit() {
        check(
            0,
            expect!["0 MiB of memory is too little: a machine needs at least 16 MiB"],
        );
        check(
            MIN_RAM - 1,
            expect!["15 MiB of memory is too little: a machine needs at least 16 MiB"],
        );
        check(
            1 << 40,
            expect!["1048576 MiB of memory is too much: this host has 65536 MiB"],
        );
        check(
            u64::MAX,
            expect!["17592186044416 MiB of memory is too much: this host has 65536 MiB"],
        );
        let error = GuestRam::with_limits(u64::MAX, HIDDEN, u64::MAX, 64).map(|_| ());
        assert!(matches!(error, Err(MemoryError::TooLarge { .. })));
        let error = GuestRam::with_limits(32 << 30, HIDDEN, u64::MAX, 35).map(|_| ());
        expect!["32768 MiB of memory is too much: this host's processor addresses 35 bits"]
            .assert_eq(&error.unwrap_err().to_string());
    }

    #[test]
    fn accesses_across_an_edge_are_refused_and_write_nothing() {
        let ram = layout(MIN_RAM).unwrap();
        let edge = ram.ram_end();
        assert!(ram.write(edge.wrapping_sub(4), &[0xff; 8]).is_err());
        assert_eq!(ram.read_u64(edge.wrapping_sub(8)), Ok(0));
        assert!(ram.read_u64(edge.wrapping_sub(7)).is_err());
        assert!(ram.read_u64(Gpa(u64::MAX)).is_err());
        let (hidden, size) = ram.hidden();
        assert!(ram.write(hidden, &[1; 16]).is_ok());
        assert!(ram.read_u64(hidden.wrapping_sub(1)).is_err());
        assert!(ram.read_u64(hidden.wrapping_add(size - 8)).is_ok());
    }

    #[test]
    fn without_a_hidden_region_there_is_nothing_beside_ram() {
        let ram = GuestRam::with_limits(MIN_RAM, 0, 1 << 36, 40).unwrap();
        let (hidden, size) = ram.hidden();
        assert_eq!(size, 0);
        assert!(ram.read_u64(hidden).is_err());
        assert_eq!(ram.regions().collect::<Vec<_>>(), [(Gpa(0), MIN_RAM)]);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_back(at in 0..MIN_RAM - 64, bytes in prop::collection::vec(any::<u8>(), 8..64)) {
            let ram = layout(MIN_RAM).unwrap();
            ram.write(Gpa(at), &bytes).unwrap();
            let mut back = vec![0; bytes.len()];
            ram.read(Gpa(at), &mut back).unwrap();
            prop_assert_eq!(&back, &bytes);
            let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            prop_assert_eq!(ram.read_u64(Gpa(at)).unwrap(), word);
        }
    }
}
