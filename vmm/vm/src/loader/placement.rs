//! Chooses at random where a kernel is put, as its own decompressor would (arch/x86/boot/compressed/kaslr.c).
//!
//! Invariants: the kernel begins at [`IMAGE_START`] or above, so the addresses below that stay free, where the code of
//! probes is mapped. It ends within [`IMAGE_END`], and below the memory that the initramfs needs.

use hvprobe_vmlinux::{Immovable, Kernel, Segment, SetupHeader, Slide};

use super::boot::initrd_len;
use crate::memory::GuestRam;

/// Lowest place of a kernel, as a distance from the start of its mapping. Nearly all kernels are linked there
/// (`CONFIG_PHYSICAL_START`).
const IMAGE_START: u64 = 16 << 20;

/// End of the kernel's mapping, as a distance from its start (`KERNEL_IMAGE_SIZE` in
/// arch/x86/include/asm/page_64_types.h, of kernels with `CONFIG_RANDOMIZE_BASE`).
const IMAGE_END: u64 = 1 << 30;

/// Smallest alignment of a 64-bit kernel (`MIN_KERNEL_ALIGN` in arch/x86/include/asm/boot.h). The kernel's first page
/// tables have pages of this size.
const MIN_ALIGNMENT: u64 = 2 << 20;

/// Options of the kernel that reserve memory by its physical address, or limit it. A kernel whose command line has
/// one of them stays at its physical address.
const MEMORY_OPTIONS: [&str; 3] = ["memmap=", "mem=", "hugepages="];

/// Random numbers for a placement.
#[derive(Clone, Copy, Debug)]
pub struct RandomNumbers {
    /// For the virtual address.
    pub virt: u64,
    /// For the physical address.
    pub phys: u64,
}

/// Memory in which a kernel is placed.
#[derive(Clone, Copy, Debug)]
pub struct Room<'a> {
    /// The guest's RAM.
    pub ram: &'a GuestRam,
    /// The archives of the initramfs, which has to lie after the kernel.
    pub initrd: &'a [&'a [u8]],
    /// The kernel's command line.
    pub cmdline: &'a str,
}

/// Chooses how far `kernel` is to be moved. Leaves it at its physical address if it does not fit elsewhere, or if the
/// command line reserves memory.
///
/// # Errors
/// When the kernel cannot be moved, or fits nowhere else.
pub fn place(kernel: &Kernel, room: Room<'_>, random: RandomNumbers) -> Result<Slide, Immovable> {
    kernel.movable()?;
    let setup = kernel.setup();
    let alignment = setup.map_or(MIN_ALIGNMENT, SetupHeader::alignment);
    if !alignment.is_power_of_two() || alignment < MIN_ALIGNMENT {
        return Err(Immovable::Alignment(alignment));
    }
    let segments = kernel.segments().map_err(|_| Immovable::Unknown)?;
    let start = segments.iter().map(|it| it.start.0).min();
    let start = start.ok_or(Immovable::Unknown)?;
    let end = segments.iter().map(Segment::end).max().unwrap_or(start);
    let end = end.max(start.saturating_add(setup.map_or(0, SetupHeader::init_size)));
    // Chooses a multiple of the alignment, of at least `least`, that moves `end` no further than to `limit`.
    let slide = |least: u64, limit: u64, random: u64| {
        let least = least.checked_next_multiple_of(alignment)?;
        let slots = limit.checked_sub(end)?.checked_sub(least)? / alignment + 1;
        Some(least + random % slots * alignment)
    };
    let initrd_max = setup.map_or(u64::MAX, |setup| setup.initrd_max().saturating_add(1));
    let memory_end = room.ram.low_end().0.min(initrd_max);
    // The initramfs begins on a page boundary.
    let memory_end = memory_end.checked_sub(initrd_len(room.initrd).next_multiple_of(4096));
    let words = || room.cmdline.split_ascii_whitespace();
    let is_free = !words().any(|word| MEMORY_OPTIONS.iter().any(|it| word.starts_with(it)));
    Ok(Slide {
        virt: slide(IMAGE_START.saturating_sub(start), IMAGE_END, random.virt)
            .ok_or(Immovable::TooLarge)?,
        phys: memory_end
            .filter(|_| is_free)
            .and_then(|limit| slide(0, limit, random.phys))
            .unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use hvprobe_fixtures::kernel_file::{ALIGNMENT, INIT_SIZE, bzimage, elf, relocations};
    use proptest::prelude::*;

    use super::*;

    const START: u64 = 16 << 20;
    /// `init_size` is more than the segments need.
    const SIZE: u64 = INIT_SIZE as u64;
    const MEMORY: u64 = 64 << 20;

    /// Returns a kernel that is linked at `start`.
    fn kernel(start: u64) -> Kernel {
        let elf = elf(start, &[(start, &[0x90; 64], 1 << 20)]);
        let payload = [elf, relocations([&[], &[], &[]], false)].concat();
        Kernel::parse(bzimage(&payload)).unwrap()
    }

    fn placed_with(
        kernel: &Kernel,
        initrd: &[&[u8]],
        cmdline: &str,
        virt: u64,
        phys: u64,
    ) -> Slide {
        let ram = GuestRam::with_hidden(MEMORY, 4096).unwrap();
        let room = Room {
            ram: &ram,
            initrd,
            cmdline,
        };
        place(kernel, room, RandomNumbers { virt, phys }).unwrap()
    }

    #[test]
    fn all_places_are_reached_and_no_other() {
        let align = u64::from(ALIGNMENT);
        let kernel = kernel(START);
        let places = |limit: u64| -> BTreeSet<u64> {
            let count = (limit - START - SIZE) / align + 1;
            (0..count).map(|slot| slot * align).collect()
        };
        let reached = |of: fn(Slide) -> u64| -> BTreeSet<u64> {
            (0..1500)
                .map(|number| of(placed_with(&kernel, &[], "quiet", number, number)))
                .collect()
        };
        assert_eq!(reached(|slide| slide.virt), places(IMAGE_END));
        assert_eq!(reached(|slide| slide.phys), places(MEMORY));
    }

    #[test]
    fn the_initramfs_has_room_after_the_kernel() {
        let kernel = kernel(START);
        let initrd = vec![0; (5 << 20) + 1];
        for number in 0..100 {
            let slide = placed_with(&kernel, &[&initrd, &initrd], "", 0, number);
            assert!(START + slide.phys + SIZE + (10 << 20) < MEMORY);
        }
        // No room at all: the loader will report that.
        let large = vec![0; 60 << 20];
        assert_eq!(placed_with(&kernel, &[&large], "", 5, 5).phys, 0);
    }

    #[test]
    fn memory_that_the_command_line_reserves_is_left_alone() {
        let kernel = kernel(START);
        for (cmdline, is_moved) in [
            ("quiet memmap=1G!1G", false),
            ("mem=48M", false),
            ("hugepagesz=1G hugepages=2", false),
            ("init=/memmap= crashkernel=16M", true),
        ] {
            let slide = placed_with(&kernel, &[], cmdline, 7, 7);
            assert_eq!(
                (slide.virt != 0, slide.phys != 0),
                (true, is_moved),
                "{cmdline}"
            );
        }
    }

    #[test]
    fn the_addresses_below_16_mib_stay_free() {
        let low = 2 << 20;
        let kernel = kernel(low);
        for number in 0..20 {
            let slide = placed_with(&kernel, &[], "", number, number);
            assert!(low + slide.virt >= IMAGE_START);
        }
        assert_eq!(placed_with(&kernel, &[], "", 0, 0).virt, IMAGE_START - low);
    }

    #[test]
    fn kernels_that_fit_nowhere_else_are_not_placed() {
        let elf = elf(START, &[(START, &[0x90; 64], 1 << 20)]);
        let movable = [elf.clone(), relocations([&[], &[], &[]], true)].concat();
        let ram = GuestRam::with_hidden(MEMORY, 4096).unwrap();
        let room = Room {
            ram: &ram,
            initrd: &[],
            cmdline: "",
        };
        let random = RandomNumbers { virt: 1, phys: 1 };
        let placed = |image| place(&Kernel::parse(image).unwrap(), room, random);
        assert_eq!(placed(elf.clone()), Err(Immovable::NoRelocations));
        let slide = placed(movable.clone()).unwrap();
        assert_eq!((slide.virt, slide.phys), (2 << 20, 2 << 20));
        for alignment in [0, 1 << 20, 3 << 20, u32::MAX] {
            let mut image = bzimage(&movable);
            image[0x230..0x234].copy_from_slice(&alignment.to_le_bytes());
            assert_eq!(placed(image), Err(Immovable::Alignment(alignment.into())));
        }
        let mut image = bzimage(&movable);
        image[0x260..0x264].copy_from_slice(&(1_u32 << 30).to_le_bytes());
        assert_eq!(placed(image), Err(Immovable::TooLarge));
    }

    proptest! {
        #[test]
        fn placed_kernels_are_loaded(virt: u64, phys: u64) {
            let mut kernel = kernel(START);
            let slide = placed_with(&kernel, &[b"initrd"], "", virt, phys);
            prop_assert!(START + slide.virt + SIZE <= IMAGE_END);
            kernel.relocate(slide).unwrap();
            let ram = GuestRam::with_hidden(MEMORY, 4096).unwrap();
            let entry = crate::loader::load(&kernel, &ram, &[b"initrd"], "", Default::default()).unwrap();
            prop_assert_eq!(entry.rip.0, START + slide.phys);
        }
    }
}
