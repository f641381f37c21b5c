//! A kernel's file, which is unpacked and read once for all machines that are booted from it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_vm::loader::{self, LoadError, RandomNumbers, Room};
use hvprobe_vmlinux::Kernel;
use rustix::rand::{GetRandomFlags, getrandom};
use tracing::warn;

/// An unpacked kernel, and its symbols and types, which are read when they are first needed. Machines that are
/// booted from the same value share all of it.
#[derive(Debug)]
pub struct KernelFile {
    kernel: Kernel,
    image: Mutex<Option<Arc<KernelImage>>>,
}

impl KernelFile {
    /// Reads and unpacks the file at `path`.
    ///
    /// # Errors
    /// As [`Kernel::open`].
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        Ok(Self {
            kernel: Kernel::open(path)?,
            image: Mutex::default(),
        })
    }

    /// Moves the kernel to addresses chosen at random (KASLR), if it can be moved. All machines that are booted from
    /// this value have it there, whatever their command lines; each needs RAM for it as `room` has it.
    ///
    /// # Errors
    /// When the kernel's relocations are damaged, or the host has no random numbers.
    pub fn randomize(self, room: Room<'_>) -> Result<Self, LoadError> {
        let mut kernel = self.kernel;
        match loader::place(&kernel, room, random_numbers()?) {
            Ok(slide) => kernel.relocate(slide)?,
            Err(why) => {
                warn!("no KASLR: the kernel cannot be moved from where it is linked: {why}")
            }
        }
        Ok(Self {
            kernel,
            image: Mutex::default(),
        })
    }

    /// Returns how far the kernel's virtual addresses are from those at which it was linked, in bytes, if it was
    /// moved.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.kernel.slide().map(|slide| slide.virt)
    }

    /// Returns the unpacked kernel.
    pub(crate) fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the kernel's symbols and types, which are read at the first call.
    pub(crate) fn image(&self) -> Result<Arc<KernelImage>, ImageError> {
        let mut known = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*known {
            return Ok(Arc::clone(image));
        }
        let image = Arc::new(KernelImage::parse_moved(self.kernel.elf(), self.offset())?);
        Ok(Arc::clone(known.insert(image)))
    }
}

/// Returns random numbers for the placement of a kernel.
fn random_numbers() -> Result<RandomNumbers, LoadError> {
    let mut numbers = [[0; 8]; 2];
    for number in &mut numbers {
        // The host's kernel returns so few bytes completely or not at all (getrandom(2)).
        getrandom(&mut number[..], GetRandomFlags::empty())
            .map_err(|error| LoadError::NoRandomNumbers(error.into()))?;
    }
    let [virt, phys] = numbers.map(u64::from_ne_bytes);
    Ok(RandomNumbers { virt, phys })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use hvprobe_fixtures::kernel_file::{bzimage, elf, relocations};
    use hvprobe_vm::memory::GuestRam;

    use super::*;

    const START: u64 = 16 << 20;

    #[test]
    fn each_kernel_that_can_be_moved_is_elsewhere() {
        let elf = elf(START, &[(START, &[0x90; 64], 1 << 20)]);
        let movable = [&elf[..], &relocations([&[], &[], &[]], true)].concat();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        let ram = GuestRam::new(256 << 20).unwrap();
        let room = Room {
            ram: &ram,
            initrd: &[],
            cmdline: "",
        };
        let place = || {
            let file = KernelFile::open(&path).unwrap().randomize(room).unwrap();
            (file.offset(), file.kernel().entry().unwrap().0)
        };
        fs::write(&path, bzimage(&movable)).unwrap();
        let places: Vec<_> = (0..8).map(|_| place()).collect();
        let offsets: BTreeSet<_> = places.iter().map(|(offset, _)| *offset).collect();
        let entries: BTreeSet<_> = places.iter().map(|(_, entry)| *entry).collect();
        // By chance, all are the same once in more than 10^14 runs.
        assert!(offsets.len() > 1 && entries.len() > 1, "{places:x?}");
        assert!(!offsets.contains(&None));

        fs::write(&path, bzimage(&elf)).unwrap();
        assert_eq!(place(), (None, START));
    }
}
