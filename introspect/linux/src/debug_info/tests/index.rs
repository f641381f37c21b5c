//! Tests of the index, and of files that are read in parts.

use std::io::Write as _;
use std::sync::Arc;

use hvprobe_fixtures::dwarf::file_of;
use tempfile::NamedTempFile;

use super::*;

/// Writes `bytes` to a temporary file.
fn written(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Returns the answers to questions of every kind.
fn answers(file: &DebugFile) -> Vec<String> {
    let info = DebugInfo::new(file, Some(BUILD_ID)).unwrap();
    let points = [
        "vfs_test",
        "vfs_test:5",
        "vfs_test@test.c:1",
        "helper:1",
        "fs/test.c:14",
        "test.c:13",
        "other.c:3",
        "nothing",
        "vfs_test@mm/test.c",
    ];
    let mut all = Vec::new();
    for point in points {
        match places(&info, point) {
            Ok(found) => all.push(format!("{point}: {found:x?} {:?}", variables(&info, point))),
            Err(why) => all.push(format!("{point}: {why}")),
        }
    }
    for at in [0, FUNCTION - 1, FUNCTION + 0x20, FUNCTION + 0x80] {
        all.push(format!("{at:#x}: {:?}", info.line_at(Gva(at)).unwrap()));
    }
    all.push(format!("{:?}", info.lines("vfs_test", None).unwrap()));
    all
}

#[test]
fn an_index_that_was_kept_answers_as_the_one_that_was_made() {
    let bytes = file();
    let written = written(&bytes);
    let made = DebugFile::parse(&bytes).unwrap();
    let expected = answers(&made);
    let index = made.index().unwrap().to_bytes();
    for file in [DebugFile::parse(&bytes), DebugFile::open(written.path())] {
        let file = file.unwrap();
        let kept = file.read_index(&index).unwrap();
        file.adopt(Arc::new(kept));
        assert_eq!(answers(&file), expected);
    }
    // Without an index, an opened file is read only in parts, with the same result.
    assert_eq!(answers(&DebugFile::open(written.path()).unwrap()), expected);
}

#[test]
fn an_index_is_of_one_file() {
    let made = DebugFile::parse(&file()).unwrap();
    let index = made.index().unwrap().to_bytes();
    let other = DebugFile::parse(&file_of(b"another build id")).unwrap();
    assert!(other.read_index(&index).is_none());
    assert!(made.read_index(&[]).is_none());
    assert!(made.read_index(&index[..index.len() - 1]).is_none());
}

#[test]
fn a_file_that_was_cut_since_is_an_error() {
    let written = written(&file());
    let opened = DebugFile::open(written.path()).unwrap();
    written.as_file().set_len(4096).unwrap();
    let error = DebugInfo::new(&opened, Some(BUILD_ID)).unwrap_err();
    assert!(matches!(error, DebugError::Read(_)), "{error}");
}

proptest! {
    #[test]
    fn damaged_indexes_are_never_a_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let bytes = file();
        let made = DebugFile::parse(&bytes).unwrap();
        let mut index = made.index().unwrap().to_bytes();
        for (at, byte) in damage {
            let at = at.index(index.len());
            index[at] = byte;
        }
        let file = DebugFile::parse(&bytes).unwrap();
        if let Some(index) = file.read_index(&index) {
            file.adopt(Arc::new(index));
            let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
            for point in ["vfs_test:1", "helper:1", "test.c:14", "nothing"] {
                let _ = info.places(&Point::parse(point).unwrap());
            }
            for at in [0, FUNCTION, u64::MAX] {
                let _ = info.line_at(Gva(at));
            }
        }
    }
}
