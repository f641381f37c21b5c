use expect_test::{Expect, expect};
use hvprobe_fixtures::disk::{ESP, LINUX, SECTOR, boot_sector, gpt, gpt_of_entries, mbr};
use proptest::prelude::*;

use super::*;
use crate::disk::Memory;

/// Checks a disk's table, with one line per partition and note.
fn check(disk: Vec<u8>, expected: Expect) {
    expected.assert_eq(&shown(disk));
}

fn shown(disk: Vec<u8>) -> String {
    let table = match read(&Window::whole(Memory::new(disk))) {
        Ok(table) => table,
        Err(error) => return format!("{error}\n"),
    };
    let mut text = format!("{:?}\n", table.kind);
    for slot in table.slots {
        let (start, len) = (slot.start / 512, slot.len / 512);
        let (label, uuid) = (
            slot.label.unwrap_or_default(),
            slot.partuuid.unwrap_or_default(),
        );
        let (number, kind) = (slot.number, slot.kind);
        text.push_str(&format!(
            "{number}: {start}+{len} {kind} {label:?} {uuid}\n"
        ));
    }
    for note in table.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn two() -> Vec<u8> {
    gpt(&[(ESP, "EFI", &[1; 1024]), (LINUX, "root é", &[2; 5000])])
}

#[test]
fn partitions_of_a_gpt_are_listed() {
    let list = expect![[r#"
        Gpt
        1: 34+2 EFI system "EFI" 01010101-0101-0101-0101-010101010101
        2: 36+10 Linux "root é" 02020202-0202-0202-0202-020202020202
    "#]];
    check(two(), list);
    // An unknown type is its GUID, and unused entries are left out.
    let mut kind = [0; 16];
    kind[0] = 1;
    check(
        gpt(&[([0; 16], "", &[]), (kind, "", &[0])]),
        expect![[r#"
            Gpt
            2: 34+1 00000001-0000-0000-0000-000000000000 "" 02020202-0202-0202-0202-020202020202
        "#]],
    );
}

#[test]
fn the_backup_is_read_if_the_primary_gpt_is_damaged() {
    for at in [SECTOR + 24, SECTOR + 72, 2 * SECTOR + 40, SECTOR] {
        let mut disk = two();
        disk[at] ^= 1;
        let text = shown(disk);
        assert!(text.starts_with("Gpt\n1: 34+2"), "{text}");
        assert!(text.contains("note: the primary GPT is damaged"), "{text}");
    }
    let mut disk = two();
    disk[2 * SECTOR] ^= 1;
    let last = disk.len() - SECTOR;
    disk[last + 40] ^= 1;
    check(
        disk.clone(),
        expect![[r#"
            the partition table of the disk image is damaged: of the primary GPT, the checksum of its entries is wrong; of the backup, the checksum of its header is wrong
        "#]],
    );
    disk.truncate(SECTOR);
    check(
        disk,
        expect![[r#"
            the partition table of the disk image is damaged: its first sector announces a GPT, and there is none; is the image cut short?
        "#]],
    );
}

#[test]
fn partitions_outside_of_the_image_are_noted() {
    let mut disk = two();
    disk.truncate(40 * SECTOR);
    let text = shown(disk);
    assert!(
        text.contains("note: partition 2 ends after the end of the image"),
        "{text}"
    );
    let mut entry = vec![1; 128];
    entry[32..48].fill(0xff);
    assert_eq!(shown(gpt_of_entries(&entry, &[])), "Gpt\n");
}

#[test]
fn partitions_of_the_bios_are_listed() {
    check(
        mbr(&[(0x83, &[1; 512]), (0x0c, &[2; 1024]), (0x99, &[0; 512])]),
        expect![[r#"
            Mbr
            1: 1+1 Linux "" 12345678-01
            2: 2+2 FAT "" 12345678-02
            3: 4+1 0x99 "" 12345678-03
        "#]],
    );
    let mut disk = boot_sector(&[(0x83, 1, 1), (0x0f, 2, 20)], 7);
    disk.resize(30 * SECTOR, 0);
    let first = boot_sector(&[(0x83, 1, 3), (0x05, 5, 5)], 0);
    let second = boot_sector(&[(0x82, 1, 2)], 0);
    disk[2 * SECTOR..3 * SECTOR].copy_from_slice(&first);
    disk[7 * SECTOR..8 * SECTOR].copy_from_slice(&second);
    check(
        disk.clone(),
        expect![[r#"
            Mbr
            1: 1+1 Linux "" 00000007-01
            5: 3+3 Linux "" 00000007-05
            6: 8+2 Linux swap "" 00000007-06
        "#]],
    );
    // A chain that leads back to its start, to nowhere, and out of the disk.
    let circle = boot_sector(&[(0x83, 1, 3), (0x05, 5, 5)], 0);
    disk[7 * SECTOR..8 * SECTOR].copy_from_slice(&circle);
    let text = shown(disk.clone());
    assert!(
        text.contains("\n68: ") && !text.contains("\n69: "),
        "{text}"
    );
    assert!(text.ends_with("note: the chain of logical partitions was cut after 64\n"));
    disk[7 * SECTOR..8 * SECTOR].fill(0);
    assert!(shown(disk.clone()).ends_with("ends at a sector without a table\n"));
    let out = boot_sector(&[(0x83, 1, 3), (0x05, u32::MAX, u32::MAX)], 0);
    disk[2 * SECTOR..3 * SECTOR].copy_from_slice(&out);
    assert!(shown(disk).ends_with("leads out of the disk\n"));
}

#[test]
fn disks_without_a_table_have_none() {
    for disk in [
        vec![],
        vec![0; 100],
        vec![0; 512],
        vec![0; 1 << 20],
        vec![0xff; 4096],
    ] {
        check(
            disk,
            expect![[r#"
            None
        "#]],
        );
    }
}

proptest! {
    #[test]
    fn no_disk_makes_the_reader_panic(
        holes in prop::collection::vec((0_usize..30_000, any::<u8>()), 0..20),
        entries in prop::collection::vec(any::<u8>(), 0..600),
        which in 0_usize..3,
    ) {
        let mut disk = match which {
            0 => two(),
            1 => gpt_of_entries(&entries, &entries),
            _ => mbr(&[(0x05, &entries), (0x83, &entries)]),
        };
        for (at, byte) in holes {
            if let Some(hole) = disk.get_mut(at) {
                *hole = byte;
            }
        }
        if let Ok(table) = read(&Window::whole(Memory::new(disk))) {
            prop_assert!(table.slots.len() <= 1024);
        }
    }
}
