//! Tests with a synthetic kernel.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use expect_test::{Expect, expect};
use hvprobe_fixtures::dwarf;
use hvprobe_linux::debug_info::DebugFile;
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::definition;
use hvprobe_vmlinux::Kernel;

use super::*;
use crate::SourceLines;

/// Content of the source file that the functions belong to.
const SOURCE: &str = "/* 1 */\n\nint helper()\n{ ret = 1;\n\n\n\n\n\nint vfs_test()\n\tret = a + b;\n12\n13\n\
    \tif (ret)\n\tret = 2;\n";

/// Renders the definitions of a probe and what was left out, one per line; or the column and the reason of a
/// refusal.
fn rendered(sources: &Sources, text: &str, source: &Path) -> String {
    let made = match PerfProbe::parse(text).map(|probe| sources.definitions(&probe, Some(source))) {
        Ok(Ok(made)) => made,
        Err(error) | Ok(Err(SourcesError::Definition(error))) => {
            return format!("{}\n  {error}\n", error.render(text));
        }
        Ok(Err(error)) => panic!("{text}: {error}"),
    };
    let mut lines = format!("{text}\n");
    for line in &made.lines {
        // Every definition has to parse.
        definition::parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        lines.push_str(&format!("  {line}\n"));
    }
    for line in &made.left_out {
        lines.push_str(&format!("  without {line}\n"));
    }
    lines
}

fn check(texts: &[&str], expected: &Expect) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vmlinux");
    fs::write(&path, dwarf::file()).unwrap();
    fs::create_dir(folder.path().join("fs")).unwrap();
    fs::write(folder.path().join("fs/test.c"), SOURCE).unwrap();
    let sources = Sources::open(&Kernel::open(&path).unwrap(), &path, None).unwrap();
    let all: String = texts
        .iter()
        .map(|text| rendered(&sources, text, folder.path()))
        .collect();
    expected.assert_eq(&all);
}

#[test]
fn probes_become_definitions_of_all_their_places() {
    check(
        &[
            "vfs_test",
            "vfs_test:1",
            "my:ev=vfs_test:1 count",
            "vfs_test@test.c:5 ret if ret > 3",
            "fs/test.c:14",
            "fs/test.c:13 given",
            "helper given",
            "vfs_test+0x20",
            "_stext %di",
            "_stext %di count",
            "vfs_test;ret=*",
            "ev=vfs_test;if(*) count",
            "test.c;ret=*",
            "test.c;{ret=1;",
            "fs/test.c;given",
            "other.c;ret=*",
            "vfs_test%return $retval",
            "vfs_test%return r=$retval:s32 %ax",
        ],
        &expect![[r#"
            vfs_test
              p:probe/vfs_test vfs_test
            vfs_test:1
              p:probe/vfs_test_L1 vfs_test+0x4
              p:probe/vfs_test_L1_1 vfs_test+0x38
            my:ev=vfs_test:1 count
              p:my/ev vfs_test+0x4 count=+8(%sp):s32
              p:my/ev_1 vfs_test+0x38 count=+8(%sp):s32
            vfs_test@test.c:5 ret if ret > 3
              p:probe/vfs_test_L5 vfs_test+0x50 ret=+16(+8(%bx)):s32 if ret > 3
            fs/test.c:14
              p:probe/vfs_test vfs_test+0x30
            fs/test.c:13 given
                         ^
              no variable `given` here; there is file, count, flags, gone
            helper given
              p:probe/helper vfs_test+0x20 given=%si:s32
            vfs_test+0x20
              p:probe/vfs_test vfs_test+0x20
            _stext %di
              p:probe/_stext _stext %di
            _stext %di count
                       ^
              no variable `count` here
            vfs_test;ret=*
              p:probe/vfs_test vfs_test+0x4
              p:probe/vfs_test_1 vfs_test+0x38
              p:probe/vfs_test_2 vfs_test+0x50
            ev=vfs_test;if(*) count
              p:probe/ev vfs_test+0x30 count=+8(%sp):s32
            test.c;ret=*
              p:probe/vfs_test vfs_test+0x4
              p:probe/vfs_test_1 vfs_test+0x38
              p:probe/vfs_test_2 vfs_test+0x50
            test.c;{ret=1;
              p:probe/helper vfs_test+0x20
            fs/test.c;given
            ^
              no line of fs/test.c that has code is `given`
            other.c;ret=*
            ^
              no source file other.c in the debug information
            vfs_test%return $retval
              r:probe/vfs_test__return vfs_test $retval
            vfs_test%return r=$retval:s32 %ax
              r:probe/vfs_test__return vfs_test r=$retval:s32 %ax
        "#]],
    );
}

#[test]
fn events_and_fields_have_the_names_that_perf_gives() {
    check(
        &[
            "vfs_test:0 count:x32",
            "vfs_test: file->mode:x8 file:u64",
            "vfs_test+ count:x8[2]",
            "vfs_test file->next:x64@user file:x64@user",
            "0xffffffff81000120 %di",
        ],
        &expect![[r#"
            vfs_test:0 count:x32
              p:probe/vfs_test vfs_test count_x32=-16(%sp):x32
            vfs_test: file->mode:x8 file:u64
              p:probe/vfs_test vfs_test mode=+0(%di):x8 file_u64=%di:u64
            vfs_test+ count:x8[2]
              p:probe/vfs_test vfs_test count=-16(%sp):x8[2]
            vfs_test file->next:x64@user file:x64@user
              p:probe/vfs_test vfs_test next=+u24(%di):x64 file_x64=%di:x64
            0xffffffff81000120 %di
              p:probe/abs_ffffffff81000120 vfs_test+0x20 %di
        "#]],
    );
}

#[test]
fn a_pattern_stands_for_functions_that_have_what_is_asked_for() {
    check(
        &[
            "vfs_te* $params",
            "vfs_*:1 count",
            "my:ev=vfs_te?t%return",
            "vfs_* nosuch",
            "nosuch*",
            "vfs_t* file->mode:string",
        ],
        &expect![[r#"
            vfs_te* $params
              p:probe/vfs_test vfs_test file=%di:x64 count=-16(%sp):s32
            vfs_*:1 count
              p:probe/vfs_test_L1 vfs_test+0x4 count=+8(%sp):s32
              p:probe/vfs_test_L1_1 vfs_test+0x38 count=+8(%sp):s32
            my:ev=vfs_te?t%return
              r:my/ev__return vfs_test
            vfs_* nosuch
                  ^
              no variable `nosuch` here; there is file, count, flags, gone
            nosuch*
            ^
              no function matches `nosuch*`
            vfs_t* file->mode:string
                   ^
              `file->mode` cannot be shown: no text is there for `string`: it is no pointer to characters
        "#]],
    );
}

#[test]
fn arguments_are_fetched_as_their_types_say() {
    check(
        &[
            "vfs_test file count flags",
            "vfs_test $params",
            "vfs_test $vars",
            "vfs_test file->mode m=file->mode:x8 file->next->next->kind",
            "vfs_test file->name c=file->name[3] n=file->name:x8[4]",
            "vfs_test file->alias t=file->alias:string u=file->alias:ustring",
            "vfs_test file->mode@user file->alias:string@user",
            "vfs_test:5 table.mode n=table.name",
            "vfs_test %di s=+8(%sp):u8 $comm",
        ],
        &expect![[r#"
            vfs_test file count flags
              p:probe/vfs_test vfs_test file=%di:x64 count=-16(%sp):s32 flags=\-7:s32
            vfs_test $params
              p:probe/vfs_test vfs_test file=%di:x64 count=-16(%sp):s32
            vfs_test $vars
              p:probe/vfs_test vfs_test file=%di:x64 count=-16(%sp):s32 flags=\-7:s32
              without int gone: optimised out
            vfs_test file->mode m=file->mode:x8 file->next->next->kind
              p:probe/vfs_test vfs_test mode=+0(%di):s32 m=+0(%di):x8 kind=+41(+24(+24(%di))):b3@4/8
            vfs_test file->name c=file->name[3] n=file->name:x8[4]
              p:probe/vfs_test vfs_test name=+8(%di):string c=+11(%di):s8 n=+8(%di):x8[4]
            vfs_test file->alias t=file->alias:string u=file->alias:ustring
              p:probe/vfs_test vfs_test alias=+32(%di):x64 t=+0(+32(%di)):string u=+0(+32(%di)):ustring
            vfs_test file->mode@user file->alias:string@user
              p:probe/vfs_test vfs_test mode=+u0(%di):s32 alias=+u0(+32(%di)):string
            vfs_test:5 table.mode n=table.name
              p:probe/vfs_test_L5 vfs_test+0x50 mode=@table:s32 n=@table+0x8:string
            vfs_test %di s=+8(%sp):u8 $comm
              p:probe/vfs_test vfs_test %di s=+8(%sp):u8 $comm
        "#]],
    );
}

#[test]
fn what_is_not_there_is_refused_where_it_stands() {
    check(
        &[
            "nothing",
            "e=vfs_test:2",
            "vfs_test cuont",
            "vfs_test gone",
            "vfs_test:5 count file->mode",
            "vfs_test file.mode",
            "vfs_test count:string",
            "vfs_test count@user %di",
            "vfs_test flags@user",
            "vfs_test:5 table",
            "vfs_test%return count",
            "helper%return",
            "vfs_test:1 ret",
            "vfs_test;12",
            "e=vfs_test;a[",
            "nothing;ret=*",
        ],
        &expect![[r#"
            nothing
            ^
              no function nothing in the debug information
            e=vfs_test:2
              ^
              no code of line 2 of vfs_test; there is line 1, line 3
            vfs_test cuont
                     ^
              no variable `cuont` here; there is file, count, flags, gone
            vfs_test gone
                     ^
              `gone` cannot be shown: optimised out
            vfs_test:5 count file->mode
                             ^
              `file` is not kept here
            vfs_test file.mode
                     ^
              `file` is a pointer: its members are behind `->`
            vfs_test count:string
                     ^
              `count` cannot be shown: no text is there for `string`: it is no pointer to characters
            vfs_test count@user %di
              p:probe/vfs_test vfs_test count=-u16(%sp):s32 %di
            vfs_test flags@user
              p:probe/vfs_test vfs_test flags=\-7:s32
            vfs_test:5 table
                       ^
              `table` cannot be shown: it has several values: name a member or an element of it
            vfs_test%return count
                            ^
              variables are those of the place where the function begins, not of its return: `$retval` is there; `r FUNC NAME` has arguments by name
            helper%return
            ^
              helper is inlined wherever it is used: it has no return to follow
            vfs_test:1 ret
                       ^
              no variable `ret` here; there is file, count, flags, gone
            vfs_test;12
            ^
              no line of vfs_test that has code is `12`
            e=vfs_test;a[
              ^
              bad pattern: unclosed character class; missing ']'
            nothing;ret=*
            ^
              no function nothing in the debug information
        "#]],
    );
}

#[test]
fn places_are_numbered_by_the_name_before_and_bounded() {
    let mut names = Names::default();
    let mut take = |first: &str, base: &str| names.take(first.to_owned(), base);
    assert_eq!(take("f_2", "f_2"), "f_2");
    assert_eq!(take("f__return", "f"), "f__return");
    for wanted in ["f", "f_1", "f_3", "f_4"] {
        assert_eq!(take("f", "f"), wanted);
    }
    assert_eq!(take("g", "g"), "g");
    assert_eq!(take("f__return", "f"), "f_5");
    let long = "l".repeat(63);
    assert_eq!(take(&long, &long), long);
    assert_eq!(take(&long, &long), "probe_9");

    let probe = PerfProbe::parse("get_current").unwrap();
    few(&probe, MOST_FUNCTIONS).unwrap();
    let Err(SourcesError::Definition(why)) = few(&probe, 1000) else {
        panic!("too many places are taken");
    };
    assert_eq!(
        why.to_string(),
        "1000 places; at most 128 are possible here: name one by the line that it was inlined into, as in \
         CALLER:LINE, or by its address, as in 0x...; of a pattern, fewer functions"
    );
}

#[test]
fn definitions_of_a_kernel_that_was_moved_have_its_symbols() {
    const OFFSET: u64 = 0x1240_0000;
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("fs")).unwrap();
    fs::write(folder.path().join("fs/test.c"), SOURCE).unwrap();
    let image = |offset: Option<u64>| {
        let elf = dwarf::kernel_at(offset.unwrap_or(0));
        Arc::new(KernelImage::parse_moved(&elf, offset).unwrap())
    };
    let file = || DebugFile::parse(&dwarf::file()).unwrap();
    let sources = |offset| Sources::of(image(offset), file()).unwrap();
    let (linked, moved) = (sources(None), sources(Some(OFFSET)));
    for text in [
        "vfs_test:1 count",
        "vfs_test+0x20",
        "fs/test.c:14",
        "test.c;ret=*",
        "vfs_test%return $retval",
        "_stext %di",
        "vfs_test given table",
    ] {
        assert_eq!(
            rendered(&moved, text, folder.path()),
            rendered(&linked, text, folder.path())
        );
    }
    // Addresses are those of the guest.
    let at = |address: u64| format!("{address:#x} %di");
    let place = rendered(&moved, &at(dwarf::FUNCTION + OFFSET + 0x20), folder.path());
    assert!(place.contains(" vfs_test+0x20 "), "{place}");
    let point = |address: u64| Point::parse(&format!("{address:#x}")).unwrap();
    assert!(moved.knows(&point(dwarf::FUNCTION + OFFSET)).unwrap());
    assert!(!moved.knows(&point(dwarf::FUNCTION)).unwrap());
    let line = |sources| SourceLines::new(sources).at("vfs_test", 4).unwrap();
    assert!(line(sources(Some(OFFSET))).is_some());
    assert_eq!(line(moved), line(linked));
}
