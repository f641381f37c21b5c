//! Tests of module files.

use hvprobe_fixtures::module_file::{ABSOLUTE, CALL, NAME, Relocation, file_with};

use super::*;

fn module() -> DebugFile {
    DebugFile::parse(&file_with(BUILD_ID, true, &[])).unwrap()
}

#[test]
fn a_modules_file_gives_the_same_as_a_kernels_by_its_own_symbols() {
    let file = module();
    let own = file.module().unwrap();
    assert_eq!(own.name(), Some(NAME));
    let [function, table] = ["vfs_test", "table"].map(|name| own.symbols().lookup(name).unwrap());
    assert_eq!((function.size, table.size), (0x80, 64));
    let info = DebugInfo::new(&file, Some(BUILD_ID)).unwrap();
    for (point, wanted) in [
        ("vfs_test", vec![0]),
        ("vfs_test:1", vec![4, 0x38]),
        ("test.c:14", vec![0x30]),
        ("helper:1", vec![0x20]),
    ] {
        let places = info.places(&Point::parse(point).unwrap()).unwrap();
        let offsets = places.iter().map(|it| it.at.0 - function.addr.0);
        assert_eq!(offsets.collect::<Vec<_>>(), wanted, "{point}");
    }
    // The variables are the same as with the kernel's file, which is linked elsewhere.
    let kernel = super::file();
    let kernel = DebugFile::parse(&kernel).unwrap();
    assert!(kernel.module().is_none());
    let kernel = DebugInfo::new(&kernel, Some(BUILD_ID)).unwrap();
    for point in ["vfs_test", "vfs_test:5", "helper:1"] {
        let theirs = variables(&kernel, point).into_iter();
        let moved = |it: String| {
            let kernels = format!("{:?}", Location::Static(Gva(TABLE)));
            it.replace(&kernels, &format!("{:?}", Location::Static(table.addr)))
        };
        let theirs: Vec<_> = theirs.map(moved).collect();
        assert_eq!(variables(&info, point), theirs, "{point}");
    }
    let line = info.line_at(function.addr).unwrap().unwrap();
    assert_eq!(line.line, 10);
}

#[test]
fn relocations_that_lead_out_of_their_section_are_reported_with_where_they_are() {
    let good = Relocation {
        at: 0,
        kind: ABSOLUTE,
        symbol: 1,
        addend: 0,
    };
    for bad in [
        Relocation {
            at: 1 << 20,
            ..good
        },
        Relocation {
            at: u64::MAX,
            ..good
        },
        Relocation { kind: CALL, ..good },
        Relocation { symbol: 77, ..good },
    ] {
        let bytes = file_with(BUILD_ID, true, &[bad]);
        let error = DebugFile::parse(&bytes).unwrap_err();
        let at = format!(
            "section .debug_info has a relocation of its byte {:#x} that",
            bad.at
        );
        assert!(error.to_string().starts_with(&at), "{error}");
    }
}

#[test]
fn object_files_that_are_no_modules_are_refused() {
    let mut bytes = file_with(BUILD_ID, true, &[]);
    let name = b".gnu.linkonce.this_module";
    let at = bytes.windows(name.len()).position(|it| it == name).unwrap();
    bytes[at + 1] = b'G';
    let error = DebugFile::parse(&bytes).unwrap_err();
    assert!(matches!(error, DebugError::Unlinked), "{error}");
}

proptest! {
    #[test]
    fn damaged_files_of_modules_are_never_a_panic_nor_much_work(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        len in any::<prop::sample::Index>(),
    ) {
        let mut bytes = file_with(BUILD_ID, true, &[]);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let end = len.index(bytes.len() * 8);
        bytes.truncate(end.max(64));
        let began = Instant::now();
        if let Ok(file) = DebugFile::parse(&bytes)
            && let Ok(info) = DebugInfo::new(&file, file.build_id())
        {
            for point in ["vfs_test:1", "helper:1", "test.c:14"] {
                let _ = info.places(&Point::parse(point).unwrap());
            }
        }
        prop_assert!(began.elapsed() < Duration::from_secs(20));
    }
}
