//! Tests of the reader of kernel files, with valid and invalid images that are made here.

use std::io::Write;
use std::path::Path;

use expect_test::{Expect, expect};
use hvprobe_fixtures::kernel_file::{Load, bzimage, elf};
use lzma_rust2::{XzOptions, XzWriter};
use proptest::prelude::*;

use super::*;

const ENTRY: u64 = 0x100_0000;

/// Returns a small kernel that compresses, but not to nothing.
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

/// Returns `stream` with the size word that the kernel's build appends to streams that do not end in one.
fn with_size(mut stream: Vec<u8>, kernel: &[u8]) -> Vec<u8> {
    stream.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
    stream
}

fn gzip(kernel: &[u8]) -> Vec<u8> {
    let mut stream = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    stream.write_all(kernel).unwrap();
    stream.finish().unwrap()
}

fn lz4(kernel: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x02, 0x21, 0x4c, 0x18];
    for block in kernel.chunks(8 << 20) {
        let block = lz4_flex::block::compress(block);
        stream.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
        stream.extend(block);
    }
    with_size(stream, kernel)
}

fn zstd(kernel: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    with_size(ruzstd::encoding::compress_to_vec(kernel, level), kernel)
}

fn xz(kernel: &[u8]) -> Vec<u8> {
    // As the kernel's build does it (scripts/xz_wrap.sh): CRC32, and the x86 branch filter.
    let mut options = XzOptions::with_preset(1);
    options.set_check_sum_type(lzma_rust2::CheckType::Crc32);
    options.prepend_pre_filter(lzma_rust2::FilterType::BcjX86, 0);
    let mut stream = XzWriter::new(Vec::new(), options).unwrap();
    stream.write_all(kernel).unwrap();
    with_size(stream.finish().unwrap(), kernel)
}

#[test]
fn every_supported_compression_unpacks_to_the_kernel() {
    let kernel = kernel();
    for payload in [
        gzip(&kernel),
        lz4(&kernel),
        zstd(&kernel),
        xz(&kernel),
        kernel.clone(),
    ] {
        let magic = payload[..4].to_vec();
        let unpacked = Kernel::parse(bzimage(&payload)).unwrap();
        assert!(unpacked.elf() == kernel, "payload beginning {magic:02x?}");
    }
    assert!(Kernel::parse(kernel.clone()).unwrap().elf() == kernel);
}

#[test]
fn an_lz4_kernel_of_several_blocks_unpacks() {
    let text: Vec<u8> = (0u32..5_000_000)
        .flat_map(|n| (n / 7).to_le_bytes())
        .collect();
    let kernel = elf(ENTRY, &[(ENTRY, &text, text.len() as u64)]);
    assert!(Kernel::parse(bzimage(&lz4(&kernel))).unwrap().elf() == kernel);
}

fn check(image: Vec<u8>, expected: Expect) {
    let error = Kernel::parse(image).unwrap_err();
    let source = std::error::Error::source(&error).map(|source| format!("\n  {source}"));
    expected.assert_eq(&format!("{error}{}", source.unwrap_or_default()));
}

#[test]
fn images_that_cannot_be_booted_are_refused_with_the_reason() {
    let kernel = kernel();
    check(vec![], expect!["the kernel image is empty"]);
    check(
        b"hello".to_vec(),
        expect![
            "not a kernel image: no known signature; expected an x86-64 vmlinux (ELF) or bzImage"
        ],
    );
    check(
        gzip(&kernel),
        expect!["not a kernel image: a gzip file; expected an x86-64 vmlinux (ELF) or bzImage"],
    );
    check(
        b"MZ not linux".to_vec(),
        expect![
            "not a kernel image: a PE executable without a Linux boot header; expected an x86-64 vmlinux (ELF) or bzImage"
        ],
    );
    check(
        kernel[..10].to_vec(),
        expect!["the kernel image is damaged: it ends inside the ELF header"],
    );
    check(
        kernel[..100].to_vec(),
        expect!["the kernel image is damaged: its program headers lie outside the file"],
    );
    check(
        kernel[..5000].to_vec(),
        expect!["the kernel image is damaged: segment 0 lies outside the file"],
    );
    let mut arm64 = vec![0; 64];
    arm64[0x38..0x3c].copy_from_slice(b"ARM\x64");
    check(
        arm64,
        expect!["the kernel image is for arm64, not for x86-64"],
    );
    let mut aarch64 = kernel.clone();
    aarch64[18] = 183;
    check(
        aarch64,
        expect!["the kernel image is for arm64, not for x86-64"],
    );
    let mut library = kernel.clone();
    library[16] = 3;
    check(
        library,
        expect![
            "not a kernel image: an ELF file that is not an executable at fixed addresses; expected an x86-64 vmlinux (ELF) or bzImage"
        ],
    );
}

#[test]
fn damaged_bzimages_are_refused_with_the_reason() {
    let kernel = kernel();
    let good = bzimage(&lz4(&kernel));
    check(
        good[..0x230].to_vec(),
        expect!["the kernel image is damaged: it ends inside the setup header"],
    );
    check(
        good[..good.len() / 2].to_vec(),
        expect![
            "the kernel image is damaged: its payload of 200905 bytes begins at 0x810, but the file has 101496 bytes"
        ],
    );
    let mut old = good.clone();
    old[0x206..0x208].copy_from_slice(&0x0207u16.to_le_bytes());
    check(
        old,
        expect!["the bzImage has boot protocol 2.07; 2.08 or newer is needed"],
    );
    let mut short = good.clone();
    short[0x201] = 0x10;
    check(
        short,
        expect!["the kernel image is damaged: its setup header is too short"],
    );
    check(
        bzimage(b"BZh91AY"),
        expect![
            "the bzImage is compressed with bzip2, which is not supported; gzip, lz4, xz and zstd are"
        ],
    );
    check(
        bzimage(&[0x5d, 0, 0, 0, 1]),
        expect![
            "the bzImage is compressed with lzma, which is not supported; gzip, lz4, xz and zstd are"
        ],
    );
    check(
        bzimage(b"\x89LZO\0\r\n"),
        expect![
            "the bzImage is compressed with lzo, which is not supported; gzip, lz4, xz and zstd are"
        ],
    );
    check(
        bzimage(b"????????"),
        expect![
            "the bzImage is compressed with an unknown format, which is not supported; gzip, lz4, xz and zstd are"
        ],
    );
    check(
        bzimage(b""),
        expect![
            "the bzImage is compressed with an unknown format, which is not supported; gzip, lz4, xz and zstd are"
        ],
    );
    let cut = |stream: Vec<u8>| bzimage(&stream[..stream.len() / 2]);
    check(
        cut(lz4(&kernel)),
        expect![[r#"
        cannot unpack the kernel's lz4 payload
          unexpected end of file"#]],
    );
    check(
        cut(gzip(&kernel)),
        expect![[r#"
        cannot unpack the kernel's gzip payload
          incomplete deflate stream"#]],
    );
    check(
        cut(zstd(&kernel)),
        expect![[r#"
        cannot unpack the kernel's zstd payload
          Failed to parse block header: BlockContentReadError(Error { kind: UnexpectedEof, message: "failed to fill whole buffer" })"#]],
    );
    check(
        cut(xz(&kernel)),
        expect![[r#"
        cannot unpack the kernel's xz payload
          failed to fill whole buffer"#]],
    );
    check(
        bzimage(&gzip(b"no kernel")),
        expect!["the kernel image is damaged: its payload is no ELF file"],
    );
}

/// Returns an xz stream of one block with this dictionary size in its header, followed by an index that begins
/// with `records`: the number of records, then the records.
fn xz_asking(dictionary: u8, records: &[u8]) -> Vec<u8> {
    let crc = |bytes: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        [bytes, &crc.sum().to_le_bytes()].concat()
    };
    [
        &b"\xfd7zXZ\0"[..],
        &crc(&[0, 1]),
        &crc(&[2, 0, 0x21, 1, dictionary, 0, 0, 0]),
        // One uncompressed byte, the end, and its CRC32.
        &[1, 0, 0, b'x', 0, 0, 0, 0, 0x83, 0x16, 0xdc, 0x8c],
        &[0],
        records,
        &[0; 64],
    ]
    .concat()
}

#[test]
fn memory_that_an_xz_stream_asks_for_is_bounded() {
    let refused = |stream: &[u8], expected: Expect| check(bzimage(stream), expected);
    refused(
        &xz_asking(40, &[1]),
        expect![[r#"
            cannot unpack the kernel's xz payload
              a block asks for a dictionary of 4294967295 bytes; at most 134217728 are given"#]],
    );
    refused(
        &xz_asking(31, &[1]),
        expect![[r#"
            cannot unpack the kernel's xz payload
              a block asks for a dictionary of 201326592 bytes; at most 134217728 are given"#]],
    );
    refused(
        &xz_asking(0, &[0xff, 0xff, 0xff, 0xff, 0xff, 0x1f]),
        expect![[r#"
            cannot unpack the kernel's xz payload
              its index promises 1099511627775 records for 1 blocks"#]],
    );
    // The largest dictionary that Linux uses is accepted.
    refused(
        &xz_asking(30, &[1, 0]),
        expect![[r#"
            cannot unpack the kernel's xz payload
              invalid index record unpadded size"#]],
    );
}

#[test]
fn segments_that_contradict_each_other_are_refused() {
    let at = |start, size| -> Load<'static> { (start, b"text", size) };
    check(
        elf(ENTRY, &[]),
        expect!["the kernel image is damaged: it has nothing to load"],
    );
    check(
        elf(ENTRY, &[at(ENTRY, 2)]),
        expect!["the kernel image is damaged: segment 0 is larger in the file than in memory"],
    );
    check(
        elf(0, &[at(ENTRY, 8)]),
        expect!["the kernel image is damaged: its entry point is in none of its segments"],
    );
    check(
        elf(ENTRY, &[at(ENTRY, 8), at(ENTRY + 7, 8)]),
        expect!["the kernel image is damaged: segment 1 overlaps another one"],
    );
    check(
        elf(ENTRY, &[at(ENTRY, 8), at(u64::MAX - 2, 8)]),
        expect!["the kernel image is damaged: segment 1 ends beyond all addresses"],
    );
    check(
        elf(ENTRY, &vec![at(ENTRY, 4); 65]),
        expect!["the kernel image is damaged: segment 1 overlaps another one"],
    );
    let many: Vec<_> = (0..65).map(|n| at(ENTRY + n * 16, 4)).collect();
    check(
        elf(ENTRY, &many),
        expect!["the kernel image is damaged: it has more than 64 segments"],
    );
}

#[test]
fn a_missing_file_is_an_error_with_its_cause() {
    let error = Kernel::open(Path::new("/nowhere/vmlinuz")).unwrap_err();
    expect!["cannot read the kernel image /nowhere/vmlinuz"].assert_eq(&error.to_string());
    assert!(std::error::Error::source(&error).is_some());
}

proptest! {
    #[test]
    fn no_image_makes_the_reader_panic(
        payload in prop::collection::vec(any::<u8>(), 0..2000),
        holes in prop::collection::vec((0usize..4000, any::<u8>()), 0..8),
        format in 0usize..6,
    ) {
        let small = elf(ENTRY, &[(ENTRY, &payload, 0x1000)]);
        let mut image = match format {
            0 => bzimage(&lz4(&small)),
            1 => bzimage(&gzip(&small)),
            2 => bzimage(&zstd(&small)),
            3 => bzimage(&xz(&small)),
            4 => bzimage(&payload),
            _ => small,
        };
        for (at, byte) in holes {
            if let Some(hole) = image.get_mut(at) {
                *hole = byte;
            }
        }
        if let Ok(kernel) = Kernel::parse(image) {
            prop_assert!(!kernel.segments().unwrap().is_empty());
            kernel.entry().unwrap();
        }
    }
}
