use std::process::Command;

use hvprobe_fixtures::disk::{ESP, LINUX, fat, gpt};
use proptest::prelude::*;

use super::super::*;
use super::made::{ROOT, ext4, shown};

/// A count in a block of a hash tree that is larger than the block makes `ext4-view` 1.0 panic.
#[test]
fn a_panic_of_the_reader_of_ext4_is_an_error() {
    let names: Vec<String> = (0..300)
        .map(|n| format!("/loader/entries/a-rather-long-name-{n:030}.conf"))
        .collect();
    let files: Vec<(&str, &[u8])> = names
        .iter()
        .map(|it| (it.as_str(), &b"linux /a"[..]))
        .collect();
    let Some(image) = ext4(ROOT, &files) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, image).unwrap();
    // Makes hash trees of the folders.
    let Ok(status) = Command::new("e2fsck").args(["-fyD"]).arg(&path).output() else {
        println!("skipped: needs e2fsck");
        return;
    };
    assert!(
        status.status.code().is_some_and(|code| code < 4),
        "{status:?}"
    );
    let mut image = std::fs::read(&path).unwrap();
    let is_root = |block: &&mut [u8]| {
        block[4..9] == [12, 0, 1, 2, b'.'] && block[0x1d] == 8 && block[0x22] > 0
    };
    let root = image.chunks_mut(1024).find(is_root).expect("a hash tree");
    root[0x22..0x24].fill(0xff);
    let shown = shown(image);
    let note = "/loader/entries on the whole disk was not read: the file system is damaged: its reader failed";
    assert!(shown.contains(note), "{shown}");
    assert!(shown.contains("found nothing to boot"), "{shown}");
}

#[test]
fn sizes_that_an_ext4_image_claims_allocate_nothing() {
    let Some(sound) = ext4(ROOT, &[("/etc/fstab", b"")]) else {
        return;
    };
    for (at, bytes) in [
        (0x404, &[0xff; 4][..]),
        (0x550, &[0xff; 4]),
        (0x418, &[0xff; 4]),
        (0x418, &[30, 0, 0, 0]),
        (0x420, &[0; 4]),
        (0x420, &[1, 0, 0, 0]),
        (0x428, &[0; 4]),
        (0x458, &[0xff; 2]),
        (0x4fe, &[0xff; 2]),
    ] {
        let mut image = sound.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        let found = Image::of_bytes(image).inspect().unwrap();
        let problem = found.partitions[0].problem.as_deref().unwrap_or_default();
        assert!(
            problem.starts_with("the file system is damaged: "),
            "{at:#x}: {problem}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn no_image_makes_an_inspection_panic(
        holes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..60),
        superblock in prop::collection::vec((0_usize..0x400, any::<u8>()), 0..2),
        config in "[ -~\n]{0,80}",
    ) {
        let grub = format!("set default=0\nmenuentry a {{ linux /boot/vmlinuz-1 }}\n{config}");
        let volume = fat(&[
            ("/loader/entries/a.conf", config.as_bytes()),
            ("/loader/entries/b.conf", b"linux /linux\noptions x"),
            ("/linux", b"kernel"),
        ]);
        let files: [(&str, &[u8]); 3] = [
            ("/etc/fstab", b""),
            ("/boot/grub/grub.cfg", grub.as_bytes()),
            ("/boot/vmlinuz-1", b"kernel"),
        ];
        let Some(mut root) = ext4(ROOT, &files) else {
            return Ok(());
        };
        for (at, byte) in superblock {
            root[0x400 + at] = byte;
        }
        let mut disk = gpt(&[(ESP, "", &volume), (LINUX, "", &root)]);
        for (at, byte) in holes {
            // Not in the partition table, whose checksums would refuse all of them.
            let at = at.index(disk.len() - 34 * 512 * 2) + 34 * 512;
            disk[at] = byte;
        }
        let image = Image::of_bytes(disk);
        let found = image.inspect().unwrap();
        for entry in &found.entries {
            if let Ok(boot) = &entry.boot {
                let _ = image.read(boot);
            }
        }
        let _ = found.chosen();
    }
}
