use std::fs;
use std::path::Path;

use hvprobe_fixtures::disk::mbr;
use proptest::prelude::*;

use super::super::*;

const CLUSTER: usize = 1 << 16;

/// Returns a qcow2 image of 1 MiB that has `content` at its start, and a backing file with a name and a format.
fn qcow2(content: &[u8], backing: Option<(&str, &str)>) -> Vec<u8> {
    let mut image = vec![0; 5 * CLUSTER];
    let mut set = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    let word = |number: usize| u32::try_from(number).unwrap().to_be_bytes();
    let long = |number: usize| (number as u64).to_be_bytes();
    set(0, b"QFI\xfb\0\0\0\x03");
    set(20, &word(16));
    set(24, &long(1 << 20));
    set(36, &word(1));
    set(40, &long(CLUSTER));
    set(48, &long(3 * CLUSTER));
    set(56, &word(1));
    set(96, &word(4));
    set(100, &word(104));
    if let Some((name, format)) = backing {
        set(8, &long(512));
        set(16, &word(name.len()));
        set(512, name.as_bytes());
        if !format.is_empty() {
            set(104, &[0xe2, 0x79, 0x2a, 0xca]);
            set(108, &word(format.len()));
            set(112, format.as_bytes());
        }
    }
    // The table of level 1 has one entry, that of level 2 one if there is content.
    set(CLUSTER, &long((1 << 63) | (2 * CLUSTER)));
    if !content.is_empty() {
        set(2 * CLUSTER, &long((1 << 63) | (4 * CLUSTER)));
        set(4 * CLUSTER, content);
    }
    image
}

fn open(path: &Path) -> Result<Image, ImageError> {
    Image::open(path, Format::of_name(path))
}

fn error(path: &Path) -> String {
    open(path).unwrap_err().to_string()
}

#[test]
fn what_an_image_does_not_have_comes_from_its_backing_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, bytes: Vec<u8>| fs::write(at(name), bytes).unwrap();
    let mut xfs = vec![0; 1 << 17];
    xfs[..4].copy_from_slice(b"XFSB");
    fs::create_dir(at("bases")).unwrap();
    write("bases/base.raw", mbr(&[(0x83, &xfs)]));
    write("bases/middle.qcow2", qcow2(&[], Some(("base.raw", "raw"))));
    write(
        "top.qcow2",
        qcow2(&[], Some(("bases/middle.qcow2", "qcow2"))),
    );
    write(
        "own.qcow2",
        qcow2(&mbr(&[(0x82, &[0; 4096])]), Some(("bases/base.raw", "raw"))),
    );

    let found = open(&at("top.qcow2")).unwrap().inspect().unwrap();
    assert_eq!(found.size, 1 << 20);
    assert_eq!(found.partitions.len(), 1);
    assert_eq!(found.partitions[0].file_system, FileSystem::Xfs);
    let found = open(&at("own.qcow2")).unwrap().inspect().unwrap();
    assert_eq!(found.partitions[0].kind, "Linux swap");
}

#[test]
fn backing_files_outside_of_the_folder_are_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, bytes: Vec<u8>| fs::write(at(name), bytes).unwrap();
    fs::create_dir(at("images")).unwrap();
    write("secret", vec![0; 1 << 20]);
    std::os::unix::fs::symlink("../secret", at("images/link")).unwrap();
    let secret = at("secret");
    for name in [
        "../secret",
        "/etc/passwd",
        secret.to_str().unwrap(),
        "link",
        "nbd://host",
        "gone",
    ] {
        write("images/a.qcow2", qcow2(&[], Some((name, "raw"))));
        let error = error(&at("images/a.qcow2"));
        assert!(
            error.contains("it is not in the folder of the image"),
            "{name}: {error}"
        );
    }
    write("images/b", vec![0; 512]);
    for (format, expected) in [
        ("", "does not state its format"),
        ("vmdk", "neither raw nor qcow2"),
    ] {
        write("images/a.qcow2", qcow2(&[], Some(("b", format))));
        let error = error(&at("images/a.qcow2"));
        assert!(error.contains(expected), "{error}");
    }
    write("images/a.qcow2", qcow2(&[], Some(("a.qcow2", "qcow2"))));
    let error = error(&at("images/a.qcow2"));
    assert!(
        error.contains("the chain of backing files is too long"),
        "{error}"
    );
}

#[test]
fn the_stated_format_counts_and_not_the_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    let image = qcow2(&mbr(&[(0x83, &[0; 512])]), None);
    fs::write(&path, &image).unwrap();
    let found = open(&path).unwrap().inspect().unwrap();
    assert_eq!(
        (found.size, found.table),
        (image.len() as u64, TableKind::None)
    );
    let found = Image::open(&path, Format::Qcow2)
        .unwrap()
        .inspect()
        .unwrap();
    assert_eq!((found.size, found.table), (1 << 20, TableKind::Mbr));

    let raw = folder.path().join("raw.qcow2");
    fs::write(&raw, [0; 4096]).unwrap();
    assert!(error(&raw).starts_with("cannot open the disk image "));
    assert!(error(folder.path()).starts_with("cannot open the disk image "));
    assert!(error(Path::new("/dev/zero")).starts_with("cannot open the disk image "));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_qcow2_image_makes_the_reader_panic(
        header in prop::collection::vec((0_usize..128, any::<u8>()), 0..6),
        tables in prop::collection::vec((0_usize..16, any::<u8>()), 0..6),
    ) {
        let mut image = qcow2(&mbr(&[(0x83, &[0; 512])]), None);
        for (at, byte) in header {
            image[at] = byte;
        }
        for (at, byte) in tables {
            image[CLUSTER * (1 + at / 8) + at % 8] = byte;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        fs::write(&path, image).unwrap();
        if let Ok(image) = open(&path) {
            let _ = image.inspect();
        }
    }
}
