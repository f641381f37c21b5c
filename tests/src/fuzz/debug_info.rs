//! The debug information of a kernel.

use hvprobe_linux::debug_info::{DebugFile, DebugInfo, Location};
use hvprobe_spec::perf_probe::Step;
use hvprobe_spec::point::Point;

/// Points looked up in each file: those in the corpus' file, and some that it lacks.
const POINTS: [&str; 8] = [
    "vfs_test",
    "vfs_test:1",
    "vfs_test:5",
    "vfs_test+0x30",
    "vfs_test%return",
    "helper:1",
    "fs/test.c:14",
    "other.c:3",
];
/// Maximum number of places, for each point, whose variables are looked up.
const PLACES: usize = 8;

/// Returns the paths that are selected from each variable.
fn paths() -> [Vec<Step>; 4] {
    let to = |name: &str| Step::Pointed(name.to_owned());
    let of = |name: &str| Step::Member(name.to_owned());
    [
        Vec::new(),
        vec![to("next"), to("kind")],
        vec![to("name"), Step::Element(3)],
        vec![of("alias"), Step::Element(u64::MAX)],
    ]
}

/// Parses any bytes as a file with debug information. Takes the build id from the file itself.
pub fn debug_info(data: &[u8]) -> bool {
    let Ok(file) = DebugFile::parse(data) else {
        return false;
    };
    let info = match DebugInfo::new(&file, file.build_id()) {
        Ok(info) => info,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    assert!(DebugInfo::new(&file, Some(b"another")).is_err());
    let mut found = false;
    for name in ["vfs_test", "helper"] {
        for function in info.lines(name, None).unwrap_or_default() {
            let mut lines = function.lines.iter();
            assert!(lines.all(|line| !line.places.is_empty()));
            found = true;
        }
    }
    for point in POINTS {
        let point = Point::parse(point).expect("a point");
        let places = match info.places(&point) {
            Ok(places) => places,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        for place in places.iter().take(PLACES) {
            let _ = info.line_at(place.at);
            for variable in info.variables(place).unwrap_or_default() {
                assert!(!variable.declaration.is_empty());
                for path in paths() {
                    let _ = info.select(&variable, &path);
                }
                if let Location::Fetch(fetch) = variable.location {
                    assert!(!fetch.to_string().is_empty());
                }
            }
        }
    }
    found
}
