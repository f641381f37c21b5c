//! Disk images: partition tables, file systems, and boot entries.

use hvprobe_fixtures::disk::{fat, gpt_of_entries};
use hvprobe_storage::{FileSystem, Image, Inspection, TableKind};

/// Disks are a multiple of this, so that seeds need not have the zeros at the end.
const GRANULE: usize = 64 << 10;
/// Largest file that is put into a FAT volume.
const MAX_FILE: usize = 1 << 20;

/// Takes any bytes as a disk. It is accepted if a file system on it is read.
pub fn disk(data: &[u8]) -> bool {
    let mut disk = data.to_vec();
    disk.resize(disk.len().next_multiple_of(GRANULE), 0);
    let size = disk.len() as u64;
    let Some(found) = inspected(disk) else {
        return false;
    };
    assert_eq!(found.size, size);
    found.partitions.iter().any(|partition| {
        let known = matches!(partition.file_system, FileSystem::Ext4 | FileSystem::Fat);
        known && partition.problem.is_none()
    })
}

/// Takes any bytes as the entries of an otherwise valid GPT. It is accepted if it has partitions.
pub fn gpt(data: &[u8]) -> bool {
    let Some(found) = inspected(gpt_of_entries(data, &[0; 4096])) else {
        return false;
    };
    assert_eq!(found.table, TableKind::Gpt);
    let numbers = found.partitions.iter().map(|partition| partition.number);
    assert!(numbers.is_sorted());
    !found.partitions.is_empty()
}

/// Takes any bytes as a file of the Boot Loader Specification. It is accepted if it can be booted.
pub fn boot_entry(data: &[u8]) -> bool {
    boots(&[
        ("/loader/entries/a-6.1.conf", data),
        ("/linux", b"kernel"),
        ("/initrd", b"initrd"),
    ])
}

/// Takes any bytes as a `grub.cfg`. It is accepted if it has an entry that can be booted.
pub fn grub(data: &[u8]) -> bool {
    boots(&[
        ("/grub/grub.cfg", data),
        (
            "/grub/grubenv",
            b"# GRUB Environment Block\nnext_entry=1>0\n",
        ),
        ("/vmlinuz", b"kernel"),
        ("/initrd.img", b"initrd"),
    ])
}

/// Takes any bytes as a unified kernel image. It is accepted if it can be booted.
pub fn uki(data: &[u8]) -> bool {
    boots(&[("/EFI/Linux/a.efi", data)])
}

/// Returns whether a FAT volume with these files has an entry that can be booted.
fn boots(files: &[(&str, &[u8])]) -> bool {
    if files.iter().any(|(_, content)| content.len() > MAX_FILE) {
        return false;
    }
    let found = inspected(fat(files)).expect("a sound volume");
    assert_eq!(found.partitions[0].problem, None);
    found.chosen().is_ok()
}

/// Inspects a disk, and checks what is promised of boot entries. Returns `None` if its partition table is damaged.
fn inspected(disk: Vec<u8>) -> Option<Inspection> {
    let image = Image::of_bytes(disk);
    let found = match image.inspect() {
        Ok(found) => found,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    for entry in &found.entries {
        match &entry.boot {
            Err(why) => assert!(!why.is_empty()),
            Ok(boot) => {
                assert!(boot.kernel.size > 0);
                // A file that is damaged further on cannot be read.
                if let Ok(files) = image.read(boot) {
                    assert_eq!(files.kernel.len() as u64, boot.kernel.size);
                    assert_eq!(files.initrds.len(), boot.initrds.len());
                    assert_eq!(files.options, boot.options);
                }
            }
        }
    }
    match found.chosen() {
        Ok((entry, choice)) => assert!(entry.boot.is_ok() && !choice.why.is_empty()),
        Err(error) => assert!(error.to_string().contains("give --kernel")),
    }
    Some(found)
}
