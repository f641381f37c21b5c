use std::fs;
use std::process::Command;
use std::time::Instant;

use super::*;
use crate::disk::Memory;
use crate::filesystem::resolve::read;
use crate::tests::made::{ROOT, ext4};

/// Blocks of 1024 bytes near the end of the test's file systems, which are free.
const FREE: usize = 4000;

/// A tree of extents with five levels of inner nodes. All entries of a node lead to the same node of the next
/// level, and the leaf is empty: there are 200 million ways to it.
#[test]
fn a_tree_of_extents_that_takes_too_long_is_an_error() {
    let Some(image) = ext4(ROOT, &[("/endless", &[1; 4096]), ("/sound", b"text")]) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    fs::write(&path, image).unwrap();
    let run = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).arg(&path).output();
        // They are in the package of `mke2fs`, which is there.
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    run("tune2fs", &["-O", "^metadata_csum"]);
    let root = [0x0004_f30a, 0x0005_0004];
    let entries = (0..4).flat_map(|_| [0, FREE + 4, 0]);
    let words = root.into_iter().chain([0]).chain(entries);
    for (index, word) in words.enumerate() {
        let request = format!("set_inode_field /endless block[{index}] {word:#x}");
        run("debugfs", &["-w", "-R", &request]);
    }
    let mut image = fs::read(&path).unwrap();
    for depth in 0..5 {
        let node = &mut image[(FREE + depth) * 1024..][..1024];
        let entries = if depth == 0 { 0 } else { 84_u8 };
        node[..8].copy_from_slice(&[0x0a, 0xf3, entries, 0, 84, 0, depth.try_into().unwrap(), 0]);
        for entry in node[12..].chunks_exact_mut(12).take(entries.into()) {
            let child = u32::try_from(FREE + depth - 1).unwrap();
            entry[4..8].copy_from_slice(&child.to_le_bytes());
        }
    }
    let part = Window::whole(Memory::new(image));
    let tree = Ext4::within(&part, Duration::from_millis(500)).unwrap();
    let start = Instant::now();
    let error = read(&tree, "/endless", 4096).unwrap_err();
    assert!(matches!(error, FileError::TooSlow(_)), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
    // Later requests get no answers of earlier ones.
    assert!(matches!(tree.stat("/"), Err(FileError::TooSlow(_))));
    let tree = Ext4::open(&part).unwrap();
    assert_eq!(read(&tree, "/sound", 100).unwrap(), b"text");
}
