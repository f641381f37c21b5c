//! Tests on a file that is made up.

use std::time::{Duration, Instant};

use hvprobe_fixtures::dwarf::{BUILD_ID, FUNCTION, file};
use hvprobe_spec::point::Point;
use proptest::prelude::*;

use super::{DebugError, DebugFile, DebugInfo, Location};

/// Offsets in `vfs_test` that a point stands for, or why there are none.
fn places(info: &DebugInfo<'_>, point: &str) -> Result<Vec<u64>, String> {
    let places = info.places(&Point::parse(point).unwrap());
    let places = places.map_err(|error| error.to_string())?;
    Ok(places.iter().map(|it| it.at.0 - FUNCTION).collect())
}

/// The variables at a point, each with where it is.
fn variables(info: &DebugInfo<'_>, point: &str) -> Vec<String> {
    let places = info.places(&Point::parse(point).unwrap()).unwrap();
    let found = places.iter().flat_map(|it| info.variables(it).unwrap());
    let told = found.map(|it| {
        let place = match it.location {
            Location::Fetch(fetch) => fetch.to_string(),
            Location::Constant(value) => value.to_string(),
            other => format!("{other:?}"),
        };
        format!("{} = {place}", it.declaration)
    });
    told.collect()
}

#[test]
fn lines_of_a_function_are_told_with_their_places() {
    let file = DebugFile::parse(&file()).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let functions = info.lines("vfs_test", None).unwrap();
    let [function] = functions.as_slice() else {
        panic!("{functions:?}");
    };
    assert_eq!((function.file.as_str(), function.first), ("fs/test.c", 10));
    let lines = function.lines.iter().map(|line| {
        let places = line.places.iter().map(|at| at.0 - FUNCTION);
        (line.number, places.collect::<Vec<_>>())
    });
    let wanted = [
        (0, vec![0]),
        (1, vec![4, 0x38]),
        (3, vec![0x20]),
        (4, vec![0x30]),
        (5, vec![0x50]),
    ];
    assert_eq!(lines.collect::<Vec<_>>(), wanted);
}

#[test]
fn points_lead_to_all_their_places() {
    let file = DebugFile::parse(&file()).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    for (point, wanted) in [
        ("vfs_test", vec![0]),
        ("vfs_test@fs/test.c", vec![0]),
        ("vfs_test@test.c:1", vec![4, 0x38]),
        ("vfs_test+0x30", vec![0x30]),
        ("vfs_test%return", vec![0]),
        ("helper", vec![0x20]),
        ("helper:1", vec![0x20]),
        ("fs/test.c:14", vec![0x30]),
        ("test.c:13", vec![0x20]),
    ] {
        assert_eq!(places(&info, point), Ok(wanted), "{point}");
    }
    for (point, wanted) in [
        ("nothing", "no function nothing in the debug information"),
        (
            "vfs_test@mm/test.c",
            "no function vfs_test@mm/test.c in the debug information; there is vfs_test@fs/test.c",
        ),
        (
            "vfs_test:2",
            "no code of line 2 of vfs_test; there is line 1, line 3",
        ),
        ("vfs_test+0x80", "vfs_test has 128 bytes only"),
        (
            "helper%return",
            "helper is inlined wherever it is used: it has no return to follow",
        ),
        (
            "other.c:3",
            "no source file other.c in the debug information",
        ),
        (
            "vfs_test;x",
            "`;` looks for a text in the sources, which are not read: name the line instead",
        ),
    ] {
        assert_eq!(places(&info, point), Err(wanted.to_owned()), "{point}");
    }
}

#[test]
fn variables_are_where_they_are_at_that_address() {
    let file = DebugFile::parse(&file()).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let mut wanted = vec![
        "struct file *file = %di",
        "int count = -16(%sp)",
        "int flags = -7",
        r#"int gone = Nowhere("optimised out")"#,
    ];
    assert_eq!(variables(&info, "vfs_test"), wanted);
    wanted[0] = r#"struct file *file = Nowhere("not kept here")"#;
    wanted[1] = "int count = +8(%sp)";
    assert_eq!(variables(&info, "vfs_test:4"), wanted);
    wanted.push("int ret = +16(+8(%bx))");
    assert_eq!(variables(&info, "vfs_test:5"), wanted);
    assert_eq!(variables(&info, "helper:1"), ["int given = %si"]);
}

#[test]
fn files_of_other_kernels_are_refused_with_both_build_ids() {
    let file = DebugFile::parse(&file()).unwrap();
    let error = DebugInfo::new(&file, Some(&[0xab, 0xcd])).unwrap_err();
    assert!(
        error.to_string().ends_with("the kernel's abcd"),
        "its build id is told: {error}"
    );
    assert!(matches!(
        DebugInfo::new(&file, None),
        Err(DebugError::OtherKernel { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_files_are_never_a_panic_nor_much_work(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut bytes = file();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let start = Instant::now();
        let file = DebugFile::parse(&bytes);
        if let Ok(file) = file
            && let Ok(info) = DebugInfo::new(&file, file.build_id())
        {
            for name in ["vfs_test", "helper"] {
                let _ = info.lines(name, None);
            }
            for point in ["vfs_test", "vfs_test:5", "helper:1", "fs/test.c:13"] {
                let places = info.places(&Point::parse(point).unwrap());
                for place in places.iter().flatten().take(8) {
                    let _ = info.variables(place);
                }
            }
        }
        prop_assert!(start.elapsed() < Duration::from_secs(20));
    }
}
