use std::io::{Cursor, Write as _};

use fatfs::{FatType, FileSystem, FormatVolumeOptions, FsOptions, format_volume};
use hvprobe_fixtures::disk::fat;
use proptest::prelude::*;

use super::*;
use crate::disk::Memory;
use crate::filesystem::resolve::{names, read};

fn opened(volume: Vec<u8>) -> Fat {
    Fat::open(&Window::whole(Memory::new(volume))).unwrap()
}

#[test]
fn files_are_found_by_long_and_short_names_in_any_case() {
    let large: Vec<u8> = (0..5000_u16).flat_map(u16::to_le_bytes).collect();
    let volume = opened(fat(&[
        ("/EFI/Linux/fedora-6.11.4-301.fc41.x86_64.efi", b"program"),
        ("/EFI/Linux/two.efi", &large),
        ("/loader/entries/a.conf", b""),
        ("/vmlinuz", b"kernel"),
    ]));
    let files = names(&volume, "/efi/LINUX").unwrap();
    assert_eq!(files, ["fedora-6.11.4-301.fc41.x86_64.efi", "two.efi"]);
    let found = read(&volume, "/EFI/Linux/Two.EFI", 1 << 20).unwrap();
    assert!(found == large);
    assert_eq!(
        volume.bytes("/EFI/Linux/two.efi", 1022, 6).unwrap(),
        large[1022..1028]
    );
    // The short name of the fixture's first file.
    assert_eq!(
        read(&volume, "/efi/linux/F0000001", 100).unwrap(),
        b"program"
    );
    assert_eq!(read(&volume, "/loader/entries/a.conf", 100).unwrap(), b"");
    for (path, expected) in [
        ("/nothing", "there is no such file"),
        ("/EFI", "it is not a file"),
        ("/vmlinuz/x", "it is not a folder"),
    ] {
        assert_eq!(read(&volume, path, 100).unwrap_err().to_string(), expected);
    }
    let error = read(&volume, "/EFI/Linux/two.efi", 9999).unwrap_err();
    assert_eq!(
        error.to_string(),
        "it has 10000 bytes, and at most 9999 are read"
    );
}

/// Volumes that another implementation has made.
#[test]
fn volumes_of_every_width_are_read() {
    for (kind, size) in [
        (FatType::Fat12, 1 << 20),
        (FatType::Fat16, 16 << 20),
        (FatType::Fat32, 40 << 20),
    ] {
        let mut disk = Cursor::new(vec![0; size]);
        let options = FormatVolumeOptions::new()
            .fat_type(kind)
            .bytes_per_cluster(512);
        format_volume(&mut disk, options).unwrap();
        let content: Vec<u8> = (0..9_000_u16).flat_map(u16::to_be_bytes).collect();
        {
            let volume = FileSystem::new(&mut disk, FsOptions::new()).unwrap();
            let root = volume.root_dir();
            let folder = root
                .create_dir("EFI")
                .unwrap()
                .create_dir("Linux with a long name")
                .unwrap();
            for number in 0..60 {
                let name = format!("file number {number}.efi");
                let mut file = folder.create_file(&name).unwrap();
                let len = content.len() / 60 * number;
                file.write_all(&content[..len]).unwrap();
                file.flush().unwrap();
            }
            folder.remove("file number 7.efi").unwrap();
        }
        let volume = opened(disk.into_inner());
        let folder = "/EFI/Linux with a long name";
        let files = names(&volume, folder).unwrap();
        assert_eq!(files.len(), 59, "{kind:?}");
        for number in [0, 1, 31, 59] {
            let found = read(
                &volume,
                &format!("{folder}/file number {number}.efi"),
                1 << 20,
            )
            .unwrap();
            assert!(
                found == content[..content.len() / 60 * number],
                "{kind:?} {number}"
            );
        }
        assert!(read(&volume, &format!("{folder}/file number 7.efi"), 1).is_err());
    }
}

#[test]
fn circles_of_clusters_end() {
    // The only folder has cluster 2, or, for its file, 3; every cluster leads to itself.
    let mut volume = fat(&[("/folder/file", &[7; 600])]);
    for number in 2..8_usize {
        let at = 512 + number + number / 2;
        let [low, high] = u16::try_from(number).unwrap().to_le_bytes();
        if number % 2 == 0 {
            volume[at] = low;
            volume[at + 1] = volume[at + 1] & 0xf0 | high;
        } else {
            volume[at] = volume[at] & 0x0f | low << 4;
            volume[at + 1] = high << 4 | low >> 4;
        }
    }
    let volume = opened(volume);
    let error = names(&volume, "/folder").unwrap_err();
    assert!(matches!(error, FileError::TooLarge { .. }), "{error}");
}

#[test]
fn boot_sectors_that_contradict_themselves_are_refused() {
    let sound = fat(&[("/a", b"b")]);
    for (at, bytes) in [
        (11, &[0, 3][..]),
        (13, &[0]),
        (13, &[3]),
        (14, &[0, 0]),
        (16, &[0]),
        (16, &[0xff]),
        (19, &[1, 0]),
        (19, &[0xff, 0xff]),
        (22, &[0xff, 0xff]),
        (22, &[0, 0]),
    ] {
        let mut volume = sound.clone();
        volume[at..at + bytes.len()].copy_from_slice(bytes);
        let error = Fat::open(&Window::whole(Memory::new(volume))).unwrap_err();
        assert!(matches!(error, FileError::Damaged(_)), "{at}: {error}");
    }
}

proptest! {
    #[test]
    fn no_volume_makes_the_reader_panic(
        holes in prop::collection::vec((0_usize..12_000, any::<u8>()), 0..20),
        header in prop::collection::vec((0_usize..64, any::<u8>()), 0..4),
    ) {
        let mut volume = fat(&[("/EFI/Linux/a long name.efi", &[1; 2000]), ("/b", b"c")]);
        for (at, byte) in header.into_iter().chain(holes) {
            if let Some(hole) = volume.get_mut(at) {
                *hole = byte;
            }
        }
        let len = volume.len();
        if let Ok(volume) = Fat::open(&Window::whole(Memory::new(volume))) {
            for name in names(&volume, "/").unwrap_or_default() {
                prop_assert!(!name.contains('/'), "{}", name);
                let _ = read(&volume, &format!("/{name}"), 1 << 20);
            }
            if let Ok(bytes) = read(&volume, "/EFI/Linux/a long name.efi", 1 << 20) {
                prop_assert!(bytes.len() <= len.max(1 << 20));
            }
        }
    }
}
