//! Tests the loader with valid and invalid images that are made here.

use std::io::Write;
use std::path::Path;

use expect_test::{Expect, expect};
use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_fixtures::kernel_file::{bzimage, elf, relocations};
use hvprobe_vmlinux::{Kernel, Slide};
use proptest::prelude::*;

use super::*;
use crate::memory::GuestRam;

const ENTRY: u64 = 0x100_0000;

/// Returns a small kernel that can be compressed to some extent.
fn kernel() -> Vec<u8> {
    let text: Vec<u8> = (0u32..50_000)
        .flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 12).to_le_bytes())
        .collect();
    elf(
        ENTRY,
        &[
            (ENTRY, &text, text.len() as u64),
            (ENTRY + 0x10_0000, b"data", 0x3000),
        ],
    )
}

fn gzip(kernel: &[u8]) -> Vec<u8> {
    let mut stream = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    stream.write_all(kernel).unwrap();
    stream.finish().unwrap()
}

#[test]
fn a_kernel_of_a_distribution_unpacks() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUZ") else {
        println!("skipped: HVPROBE_TEST_VMLINUZ names no kernel image");
        return;
    };
    let kernel = Kernel::open(Path::new(&path)).unwrap();
    let ram = GuestRam::new(256 << 20).unwrap();
    let entry = load(&kernel, &ram, &[b"initrd"], "console=ttyS0", Gpa(0xe_0000)).unwrap();
    assert!(entry.kernel_end > entry.rip);
}

fn word(ram: &GuestRam, at: u64) -> u32 {
    let mut word = [0; 4];
    ram.read(Gpa(at), &mut word).unwrap();
    u32::from_le_bytes(word)
}

#[test]
fn a_kernel_that_begins_below_16_mib_is_loaded_where_it_is_linked() {
    const LOW: u64 = 0x20_0000;
    let kernel = Kernel::parse(elf(LOW, &[(LOW, b"text", 0x1000)])).unwrap();
    let ram = GuestRam::new(64 << 20).unwrap();
    let entry = load(&kernel, &ram, &[], "", Gpa(0xe_0000)).unwrap();
    assert_eq!((entry.rip, entry.kernel_end), (Gpa(LOW), Gpa(LOW + 0x1000)));
    let mut text = [0; 4];
    ram.read(Gpa(LOW), &mut text).unwrap();
    assert_eq!(&text, b"text");
}

#[test]
fn a_loaded_kernel_finds_itself_its_command_line_and_its_initramfs() {
    let kernel = Kernel::parse(bzimage(&gzip(&kernel()))).unwrap();
    let ram = GuestRam::new(64 << 20).unwrap();
    let parts: [&[u8]; 2] = [b"first", b"second part"];
    let entry = load(&kernel, &ram, &parts, "quiet", Gpa(0xe_0000)).unwrap();
    expect![[r#"
        Entry {
            rip: Gpa(0x1000000),
            boot_params: Gpa(0x7000),
            kernel_end: Gpa(0x1103000),
            initrd: Some(
                (
                    Gpa(0x3fff000),
                    20,
                ),
            ),
        }
    "#]]
    .assert_debug_eq(&entry);

    let mut bytes = [0; 4];
    ram.read(Gpa(ENTRY + 0x10_0000), &mut bytes).unwrap();
    assert_eq!(&bytes, b"data");
    let params = entry.boot_params.0;
    assert_eq!(word(&ram, params + 0x202), u32::from_le_bytes(*b"HdrS"));
    let mut line = [0; 6];
    ram.read(Gpa(word(&ram, params + 0x228).into()), &mut line)
        .unwrap();
    assert_eq!(&line, b"quiet\0");
    let mut initrd = [0; 20];
    ram.read(Gpa(word(&ram, params + 0x218).into()), &mut initrd)
        .unwrap();
    assert_eq!(&initrd, b"first\0\0\0second part\0");
    assert_eq!(word(&ram, params + 0x21c), 20);
}

/// Checks the memory map in the boot parameters of a machine of `mib` MiB.
fn check_map(mib: u64, expected: Expect) {
    let kernel = Kernel::parse(kernel()).unwrap();
    // The machine may have more memory than the host, because almost none of it is touched.
    let ram = GuestRam::with_limits(mib << 20, 0, u64::MAX, 46).unwrap();
    let entry = load(&kernel, &ram, &[], "", Gpa(0xe_0000)).unwrap();
    let params = entry.boot_params.wrapping_add(0);
    let mut count = [0];
    ram.read(params.wrapping_add(0x1e8), &mut count).unwrap();
    let mut map = String::new();
    for index in 0..u64::from(count[0]) {
        let at = params.wrapping_add(0x2d0 + index * 20);
        let start = ram.read_u64(at).unwrap();
        let len = ram.read_u64(at.wrapping_add(8)).unwrap();
        let kind = word(&ram, at.0 + 16);
        map.push_str(&format!("{start:#011x}-{:#011x} {kind}\n", start + len));
    }
    expected.assert_eq(&map);
}

#[test]
fn the_memory_map_shows_ram_and_nothing_else() {
    check_map(
        32,
        expect![[r#"
        0x000000000-0x00009fc00 1
        0x00009fc00-0x0000e0000 2
        0x0000e0000-0x000100000 3
        0x000100000-0x002000000 1
    "#]],
    );
    check_map(
        3 << 10,
        expect![[r#"
        0x000000000-0x00009fc00 1
        0x00009fc00-0x0000e0000 2
        0x0000e0000-0x000100000 3
        0x000100000-0x0c0000000 1
    "#]],
    );
    check_map(
        4 << 10,
        expect![[r#"
        0x000000000-0x00009fc00 1
        0x00009fc00-0x0000e0000 2
        0x0000e0000-0x000100000 3
        0x000100000-0x0c0000000 1
        0x100000000-0x140000000 1
    "#]],
    );
}

fn check_load(mib: u64, kernel: Vec<u8>, initrd: &[&[u8]], cmdline: &str, expected: Expect) {
    let kernel = Kernel::parse(kernel).unwrap();
    let ram = GuestRam::new(mib << 20).unwrap();
    let error = load(&kernel, &ram, initrd, cmdline, Gpa(0xe_0000)).unwrap_err();
    expected.assert_eq(&error.to_string());
}

#[test]
fn what_does_not_fit_is_refused_with_the_sizes() {
    let big = vec![0; 20 << 20];
    check_load(
        32,
        kernel(),
        &[&big],
        "",
        expect![
            "the initrd of 20480 KiB is too large for 32 MiB of memory: 15348 KiB are free beside the kernel"
        ],
    );
    check_load(
        32,
        kernel(),
        &[&big[..8 << 20], &big[..8 << 20]],
        "",
        expect![
            "the initrd of 16384 KiB is too large for 32 MiB of memory: 15348 KiB are free beside the kernel"
        ],
    );
    check_load(
        16,
        kernel(),
        &[],
        "",
        expect![
            "the kernel needs memory up to 0x1103000, but the machine's 16 MiB end at 0x1000000; give it more memory"
        ],
    );
    let low = elf(0x8000, &[(0x8000, b"text", 4)]);
    check_load(
        16,
        low,
        &[],
        "",
        expect!["the kernel image is damaged: it wants to be loaded at 0x8000, below 1 MiB"],
    );
    check_load(
        32,
        kernel(),
        &[],
        &"x".repeat(2048),
        expect!["the kernel command line has 2048 bytes; at most 2047 fit"],
    );
    check_load(
        32,
        kernel(),
        &[],
        "a\0b",
        expect!["the kernel command line contains a zero byte"],
    );
}

proptest! {
    #[test]
    fn no_image_makes_the_loader_panic(
        payload in prop::collection::vec(any::<u8>(), 0..2000),
        holes in prop::collection::vec((0usize..4000, any::<u8>()), 0..8),
        format in 0usize..4,
    ) {
        let ram = GuestRam::new(32 << 20).unwrap();
        let small = elf(ENTRY, &[(ENTRY, &payload, 0x1000)]);
        let mut image = match format {
            0 => bzimage(&gzip(&small)),
            1 => bzimage(&small),
            2 => bzimage(&payload),
            _ => small,
        };
        for (at, byte) in holes {
            if let Some(hole) = image.get_mut(at) {
                *hole = byte;
            }
        }
        if let Ok(kernel) = Kernel::parse(image) {
            let _ = load(&kernel, &ram, &[&payload], "", Gpa(0xe_0000));
        }
    }
}

#[test]
fn only_a_kernel_that_was_placed_at_random_is_told_to_randomize_its_memory() {
    const LOADFLAGS: u64 = 0x211;
    let payload = [&kernel()[..], &relocations([&[], &[], &[]], false)].concat();
    let mut image = bzimage(&payload);
    // A header with the flag set already.
    image[0x211] |= 1 << 1;
    let mut kernel = Kernel::parse(image).unwrap();
    let flag = |kernel: &Kernel| {
        let ram = GuestRam::with_hidden(64 << 20, 4096).unwrap();
        let entry = load(kernel, &ram, &[], "", Gpa(0xe_0000)).unwrap();
        let mut flags = [0];
        let at = entry.boot_params.wrapping_add(LOADFLAGS);
        ram.read(at, &mut flags).unwrap();
        flags[0] >> 1 & 1
    };
    assert_eq!(flag(&kernel), 0);
    let slide = Slide {
        virt: 2 << 20,
        phys: 4 << 20,
    };
    kernel.relocate(slide).unwrap();
    assert_eq!(flag(&kernel), 1);
}
