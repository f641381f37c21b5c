//! The kernel file that a guest boots from.

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_vm::loader::load;
use hvprobe_vm::memory::GuestRam;
use hvprobe_vmlinux::{Kernel, Slide};

/// RAM of the machine, in bytes: enough for kernels that are linked at 16 MiB.
const RAM: u64 = 32 << 20;

/// Number of sectors of boot code in front of the payload, without the first.
const SECTORS: u8 = 1;

/// How far a kernel is moved that has relocations.
const SLIDE: Slide = Slide {
    virt: 0x1240_0000,
    phys: 2 << 20,
};

/// Parses any bytes as a kernel image. An image that parses is also loaded into a small machine, where only the
/// ranges that the loader reports may be written above 1 MiB.
pub fn bzimage(data: &[u8]) -> bool {
    match Kernel::parse(data.to_vec()) {
        Ok(mut kernel) => {
            assert!(kernel.elf().starts_with(b"\x7fELF"));
            place(&kernel);
            if kernel.relocate(SLIDE).is_ok() {
                place(&kernel);
            }
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

fn place(kernel: &Kernel) {
    const INITRD: [&[u8]; 2] = [b"first", b"second part"];
    let ram = GuestRam::with_hidden(RAM, 4096).expect("any host has so much");
    let Ok(entry) = load(kernel, &ram, &INITRD, "quiet", Gpa(0xe_0000)) else {
        return;
    };
    assert!(entry.rip < entry.kernel_end && entry.kernel_end <= ram.low_end());
    let (initrd, size) = entry.initrd.expect("there is one");
    assert!(entry.kernel_end <= initrd && initrd.0 + size <= ram.low_end().0);
    // Nothing was written between the kernel and the initramfs.
    let gap = usize::try_from(initrd.0 - entry.kernel_end.0).expect("in memory");
    let mut bytes = vec![0; gap.min(1 << 16)];
    ram.read(entry.kernel_end, &mut bytes).expect("in memory");
    assert!(bytes.iter().all(|byte| *byte == 0));
    let (hidden, _) = ram.hidden();
    let mut bytes = [0; 4096];
    ram.read(hidden, &mut bytes).expect("in memory");
    assert_eq!(bytes, [0; 4096]);
}

/// Parses any bytes as the packed kernel in an otherwise valid `bzImage`.
pub fn payload(data: &[u8]) -> bool {
    bzimage(&bzimage_around(data))
}

/// Returns a `bzImage` with `payload` (Linux, Documentation/arch/x86/boot.rst).
#[must_use]
pub fn bzimage_around(payload: &[u8]) -> Vec<u8> {
    let mut file = vec![0; (usize::from(SECTORS) + 1) * 512];
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    for (at, bytes) in [
        (0x1f1, &[SECTORS][..]),
        (0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]),
        (0x202, b"HdrS"),
        (0x206, &0x020f_u16.to_le_bytes()),
        (0x22c, &0x7fff_ffff_u32.to_le_bytes()),
        (0x238, &2047_u32.to_le_bytes()),
        (0x24c, &length.to_le_bytes()),
    ] {
        file[at..at + bytes.len()].copy_from_slice(bytes);
    }
    file.extend(payload);
    file
}
