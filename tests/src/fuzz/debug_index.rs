//! The index of a kernel's debug information.

use std::sync::{Arc, LazyLock};

use hvprobe_arch::Gva;
use hvprobe_fixtures::dwarf::{self, FUNCTION};
use hvprobe_linux::debug_info::{DebugFile, DebugInfo};
use hvprobe_spec::point::Point;

/// Points looked up with each index: a function, a function inlined into it, a file, and things that do not
/// exist.
const POINTS: [&str; 5] = [
    "vfs_test:5",
    "helper:1",
    "fs/test.c:14",
    "nothing",
    "other.c:3",
];

/// Parses any bytes as an index. If the index belongs to the file of [`dwarf`], looks up points in it.
pub fn debug_index(data: &[u8]) -> bool {
    static BYTES: LazyLock<Vec<u8>> = LazyLock::new(dwarf::file);
    let file = DebugFile::parse(&BYTES).expect("a sound file");
    let Some(index) = file.read_index(data) else {
        return false;
    };
    let again = file.read_index(&index.to_bytes());
    assert!(again.as_ref() == Some(&index));
    file.adopt(Arc::new(index));
    let info = DebugInfo::new(&file, file.build_id()).expect("the file's own build id");
    for point in POINTS {
        let point = Point::parse(point).expect("a point");
        match info.places(&point) {
            Ok(places) => {
                for place in places {
                    let _ = info.variables(&place);
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    for at in [0, FUNCTION, u64::MAX] {
        let _ = info.line_at(Gva(at));
    }
    true
}
