//! Tests on a made-up file.

mod index;
mod modules;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expect_test::expect;
use hvprobe_arch::Gva;
use hvprobe_fixtures::dwarf::{BUILD_ID, FUNCTION, TABLE, file};
use hvprobe_spec::perf_probe::Step;
use hvprobe_spec::point::Point;
use object::{Object as _, ObjectSection as _};
use proptest::prelude::*;

use super::{DebugError, DebugFile, DebugInfo, Location};

/// Returns the places for which a point stands, as offsets in `vfs_test`, or the error.
fn places(info: &DebugInfo<'_>, point: &str) -> Result<Vec<u64>, String> {
    let places = info.places(&Point::parse(point).unwrap());
    let places = places.map_err(|error| error.to_string())?;
    Ok(places.iter().map(|it| it.at.0 - FUNCTION).collect())
}

/// Returns the variables at the places of a point, each with its location.
fn variables(info: &DebugInfo<'_>, point: &str) -> Vec<String> {
    let places = info.places(&Point::parse(point).unwrap()).unwrap();
    let found = places.iter().flat_map(|it| info.variables(it).unwrap());
    let lines = found.map(|it| {
        let place = match it.location {
            Location::Fetch(fetch) => fetch.to_string(),
            Location::Constant(value) => value.to_string(),
            other => format!("{other:?}"),
        };
        format!("{} = {place}", it.declaration)
    });
    lines.collect()
}

#[test]
fn only_files_are_read() {
    for path in ["/dev/zero", "/proc/self/fd"] {
        let error = DebugFile::open(path.as_ref()).unwrap_err();
        let DebugError::Read(cause) = error else {
            panic!("{path}: {error}");
        };
        assert_eq!(cause.to_string(), "it is not a regular file", "{path}");
    }
}

#[test]
fn questions_end_when_nobody_waits_for_their_answers() {
    let abandoned = Arc::new(AtomicBool::new(true));
    let file = DebugFile::parse(&file()).unwrap().until(&abandoned);
    assert!(matches!(file.index(), Err(DebugError::Abandoned)));
    // An index that was already being built is completed, and can be used.
    let begun = super::indexing::build(&file).unwrap();
    let again = DebugFile::parse(&self::file()).unwrap().until(&abandoned);
    again.adopt(Arc::new(begun));
    again.index().unwrap();
    // If no index was built, the next question that is not abandoned builds it.
    abandoned.store(false, Ordering::Relaxed);
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let point = Point::parse("vfs_test:1").unwrap();
    let places = info.places(&point).unwrap();
    abandoned.store(true, Ordering::Relaxed);
    let ends = [
        info.lines("vfs_test", None).map(drop),
        info.places(&point).map(drop),
        info.variables(&places[0]).map(drop),
    ];
    for end in ends {
        assert!(matches!(end, Err(DebugError::Abandoned)), "{end:?}");
    }
    abandoned.store(false, Ordering::Relaxed);
    info.lines("vfs_test", None).unwrap();
}

#[test]
fn lines_of_a_function_are_listed_with_their_places() {
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
fn addresses_are_resolved_to_their_lines() {
    let file = DebugFile::parse(&file()).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let line = |at: u64| {
        let found = info.line_at(Gva(at)).unwrap()?;
        assert_eq!(found.file, "fs/test.c");
        Some(found.line)
    };
    // First and last byte of each row, and the code inlined in the third.
    let wanted = [
        (0, 10),
        (3, 10),
        (4, 11),
        (0x1f, 11),
        (0x20, 4),
        (0x2f, 4),
        (0x30, 14),
        (0x3f, 11),
        (0x50, 15),
        (0x7f, 15),
    ];
    for (offset, number) in wanted {
        assert_eq!(line(FUNCTION + offset), Some(number), "{offset:#x}");
    }
    for nowhere in [0, FUNCTION - 1, FUNCTION + 0x80, TABLE, u64::MAX] {
        assert_eq!(line(nowhere), None, "{nowhere:#x}");
    }
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
    let table = format!("struct file table = Static(Gva({:#x}))", TABLE);
    wanted.push(&table);
    assert_eq!(variables(&info, "vfs_test:5"), wanted);
    assert_eq!(variables(&info, "helper:1"), ["int given = %si"]);
}

#[test]
fn where_frames_cannot_be_read_no_variable_is_listed() {
    let mut bytes = file();
    let elf = object::File::parse(&*bytes).unwrap();
    let frames = elf.section_by_name(".debug_frame").unwrap();
    let at = usize::try_from(frames.file_range().unwrap().0).unwrap();
    // The version of the first CIE, after its length and its id.
    bytes[at + 8] = 99;
    let file = DebugFile::parse(&bytes).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let place = &info.places(&Point::parse("vfs_test").unwrap()).unwrap()[0];
    let why = info.variables(place).unwrap_err();
    let is_damaged = matches!(
        why,
        DebugError::Damaged {
            section: ".debug_frame",
            ..
        }
    );
    assert!(is_damaged, "{why}");
}

/// Follows a path from a variable at a point; returns the result or the error.
fn selected(info: &DebugInfo<'_>, point: &str, name: &str, path: &[Step]) -> String {
    let places = info.places(&Point::parse(point).unwrap()).unwrap();
    let all = info.variables(&places[0]).unwrap();
    let variable = all.iter().find(|it| it.name == name).unwrap();
    match info.select(variable, path) {
        Ok(selected) => format!("{:?} {:?}", selected.location, selected.shown),
        Err(error) => error.to_string(),
    }
}

#[test]
fn members_are_where_they_are_in_their_structures() {
    let file = DebugFile::parse(&file()).unwrap();
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    let to = |name: &str| Step::Pointed(name.to_owned());
    let of = |name: &str| Step::Member(name.to_owned());
    let found = [
        ("vfs_test", "file", vec![]),
        ("vfs_test", "count", vec![]),
        ("vfs_test", "file", vec![to("mode")]),
        ("vfs_test", "file", vec![to("name")]),
        ("vfs_test", "file", vec![to("name"), Step::Element(3)]),
        ("vfs_test", "file", vec![to("next"), to("kind")]),
        ("vfs_test", "file", vec![to("alias")]),
        ("vfs_test", "file", vec![Step::Element(1), of("mode")]),
        ("vfs_test:5", "table", vec![of("alias")]),
        ("vfs_test", "file", vec![of("mode")]),
        ("vfs_test", "file", vec![to("mood")]),
        ("vfs_test", "file", vec![to("kind"), of("x")]),
        ("vfs_test", "count", vec![of("x")]),
        ("vfs_test", "count", vec![Step::Element(1)]),
        ("vfs_test", "file", vec![Step::Element(u64::MAX)]),
        ("vfs_test", "file", vec![Step::Element(1 << 30)]),
        ("vfs_test:5", "table", vec![of("next"), to("mode")]),
        ("vfs_test", "flags", vec![]),
        ("vfs_test:5", "file", vec![to("mode")]),
    ]
    .map(|(point, name, path)| {
        let way: String = path.iter().map(Step::to_string).collect();
        format!("{name}{way}: {}\n", selected(&info, point, name, &path))
    });
    expect![[r#"
        file: Fetch(Fetch { register: Rdi, offsets: [] }) Number(Integer { shown: Hex, bits: 64 })
        count: Fetch(Fetch { register: Rsp, offsets: [-16] }) Number(Integer { shown: Signed, bits: 32 })
        file->mode: Fetch(Fetch { register: Rdi, offsets: [0] }) Number(Integer { shown: Signed, bits: 32 })
        file->name: Fetch(Fetch { register: Rdi, offsets: [8] }) Array { element: Some(Integer { shown: Signed, bits: 8 }), count: 16, is_text: true }
        file->name[3]: Fetch(Fetch { register: Rdi, offsets: [11] }) Number(Integer { shown: Signed, bits: 8 })
        file->next->kind: Fetch(Fetch { register: Rdi, offsets: [24, 41] }) Number(Bitfield { width: 3, offset: 4, container: 8 })
        file->alias: Fetch(Fetch { register: Rdi, offsets: [32] }) Text
        file[1].mode: Fetch(Fetch { register: Rdi, offsets: [64] }) Number(Integer { shown: Signed, bits: 32 })
        table.alias: Static(Gva(0xffffffff81000820)) Text
        file.mode: `file` is a pointer: its members are behind `->`
        file->mood: `file->mood` does not exist; there is mode, kind, name
        file->kind.x: `file->kind` is some bits of a number
        count.x: `count` has no members
        count[1]: `count` is neither an array nor a pointer
        file[18446744073709551615]: `file` has elements of unknown size
        file[1073741824]: `file` is too long
        table.next->mode: `table.next` is a pointer in memory of its own, which is not followed
        flags: Constant(-7) Number(Integer { shown: Signed, bits: 32 })
        file->mode: `file` is not kept here
    "#]].assert_eq(&found.concat());
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
            let step = |name: &str| Step::Pointed(name.to_owned());
            for point in ["vfs_test", "vfs_test:5", "helper:1", "fs/test.c:13"] {
                let places = info.places(&Point::parse(point).unwrap());
                for place in places.iter().flatten().take(8) {
                    for variable in info.variables(place).into_iter().flatten() {
                        let _ = info.select(&variable, &[]);
                        let _ = info.select(&variable, &[step("next"), step("kind")]);
                        let _ = info.select(&variable, &[step("name"), Step::Element(1)]);
                    }
                }
            }
        }
        prop_assert!(start.elapsed() < Duration::from_secs(20));
    }
}
