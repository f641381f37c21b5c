//! `hvprobe lines`, `hvprobe vars`, and `hvprobe explain` with probes in the syntax of perf, on a synthetic
//! kernel. Needs no KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::fs;
use std::process::{Command, Stdio};

use expect_test::{Expect, expect};
use hvprobe_fixtures::{dwarf, module_file};
use tempfile::TempDir;

/// Runs the program with `words` on the synthetic kernel; returns its output, its messages and its exit status.
fn said(words: &[&str]) -> (String, String, Option<i32>) {
    let folder = TempDir::new().unwrap();
    let (kernel, other) = (folder.path().join("vmlinux"), folder.path().join("other"));
    fs::write(&kernel, dwarf::file()).unwrap();
    let mut bytes = dwarf::file();
    let at = bytes.windows(dwarf::BUILD_ID.len());
    let at = at.into_iter().position(|it| it == dwarf::BUILD_ID).unwrap();
    bytes[at] = b'A';
    fs::write(&other, bytes).unwrap();
    let file = match words.contains(&"--other") {
        true => &other,
        false => &kernel,
    };
    let output = Command::new(env!("CARGO_BIN_EXE_hvprobe"))
        .args(words.iter().filter(|word| **word != "--other"))
        .arg("--kernel")
        .arg(&kernel)
        .arg("--debug-info")
        .arg(file)
        // Suppresses warnings about parts that the synthetic kernel lacks.
        .env("RUST_LOG", "error")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let folder = folder.path().display().to_string();
    let shown = |bytes| text(bytes).replace(&folder, "DIR");
    (
        shown(output.stdout),
        shown(output.stderr),
        output.status.code(),
    )
}

fn printed(words: &[&str], expected: &Expect) {
    let (out, err, status) = said(words);
    assert_eq!((err.as_str(), status), ("", Some(0)), "{words:?}");
    expected.assert_eq(&out);
}

fn refused(words: &[&str], expected: &Expect) {
    let (out, err, status) = said(words);
    assert_eq!(out, "", "{words:?}");
    assert!(matches!(status, Some(1 | 2)), "{words:?}: {status:?}");
    expected.assert_eq(&err);
}

#[test]
fn lines_are_printed_with_the_places_that_take_a_probe() {
    printed(
        &["lines", "vfs_test"],
        &expect![[r#"
        vfs_test fs/test.c:10
              0  vfs_test
              1  vfs_test+0x4 vfs_test+0x38
              3  vfs_test+0x20
              4  vfs_test+0x30
              5  vfs_test+0x50
    "#]],
    );
    printed(
        &["lines", "vfs_test@fs/test.c", "--json"],
        &expect![[r#"
        {"function":"vfs_test","file":"fs/test.c","line":10,"relative":0,"places":["vfs_test"]}
        {"function":"vfs_test","file":"fs/test.c","line":11,"relative":1,"places":["vfs_test+0x4","vfs_test+0x38"]}
        {"function":"vfs_test","file":"fs/test.c","line":13,"relative":3,"places":["vfs_test+0x20"]}
        {"function":"vfs_test","file":"fs/test.c","line":14,"relative":4,"places":["vfs_test+0x30"]}
        {"function":"vfs_test","file":"fs/test.c","line":15,"relative":5,"places":["vfs_test+0x50"]}
    "#]],
    );
    printed(
        &["lines", "vfs_test:1-3"],
        &expect![[r#"
            vfs_test fs/test.c:10
                  1  vfs_test+0x4 vfs_test+0x38
                  3  vfs_test+0x20
        "#]],
    );
    printed(
        &["lines", "vfs_test@test.c:2+3"],
        &expect![[r#"
            vfs_test fs/test.c:10
                  3  vfs_test+0x20
                  4  vfs_test+0x30
        "#]],
    );
    printed(
        &["lines", "helper"],
        &expect![[r#"
        helper fs/test.c:3
              0  vfs_test+0x20
              1  vfs_test+0x20
    "#]],
    );
}

#[test]
fn variables_are_printed_as_definitions_fetch_them() {
    printed(
        &["vars", "vfs_test"],
        &expect![[r#"
        vfs_test
          struct file *file  %di
          int count  -16(%sp)
          int flags  \-7
          int gone  (optimised out)
    "#]],
    );
    printed(
        &["vars", "vfs_test:5"],
        &expect![[r#"
            vfs_test+0x50
              struct file *file  (not kept here)
              int count  +8(%sp)
              int flags  \-7
              int gone  (optimised out)
              int ret  +16(+8(%bx))
              struct file table  @table
        "#]],
    );
    printed(
        &["vars", "helper:1", "--json"],
        &expect![[r#"
        {"place":"vfs_test+0x20","inlined":"helper","name":"given","declaration":"int given","parameter":true,"fetch":"%si","unreadable":null}
    "#]],
    );
}

#[test]
fn what_there_is_not_is_refused_with_what_there_is() {
    refused(
        &["lines", "nothing"],
        &expect![[r#"
            hvprobe: no function nothing in the debug information
        "#]],
    );
    refused(
        &["lines", "vfs_test:2-2"],
        &expect![[r#"
            hvprobe: no code of line 2 of vfs_test; there is line 1, line 3
        "#]],
    );
    refused(
        &["lines", "vfs_test:3-1"],
        &expect![[r#"
            hvprobe: bad range of lines: the last line is before the first, 3
              vfs_test:3-1
                         ^
        "#]],
    );
    refused(
        &["lines", "fs/test.c:3"],
        &expect![[r#"
            hvprobe: bad range of lines: lines are listed for functions: write FUNC[@SRC][:LINE[-LINE|+COUNT]]
              fs/test.c:3
              ^
        "#]],
    );
    refused(
        &["vars", "vfs_test:2"],
        &expect![[r#"
            hvprobe: no code of line 2 of vfs_test; there is line 1, line 3
        "#]],
    );
    refused(
        &["vars", "vfs_test:x"],
        &expect![[r#"
        hvprobe: bad probe point: `x` is no digit of the line
          vfs_test:x
                   ^
    "#]],
    );
    refused(
        &["vars", "vfs_test", "--other"],
        &expect![[r#"
            hvprobe: cannot use DIR/other: the debug information is of another kernel: its build id is 416e206964206f662061206275696c64, the kernel's 616e206964206f662061206275696c64
        "#]],
    );
}

#[test]
fn probes_as_perf_has_them_are_read_where_definitions_are() {
    // No place in a synthetic kernel can be probed, but the errors show the definitions.
    let (out, err, status) = said(&["explain", "vfs_test:1 count"]);
    assert_eq!((out.as_str(), status), ("", Some(1)), "{err}");
    let definitions: Vec<_> = err
        .lines()
        .filter_map(|line| line.strip_prefix("hvprobe: ")?.split_once(": 0x"))
        .map(|(definition, _)| definition)
        .collect();
    let places = ["vfs_test_L1 vfs_test+0x4", "vfs_test_L1_1 vfs_test+0x38"];
    let wanted = places.map(|place| format!("p:probe/{place} count=+8(%sp):s32"));
    assert_eq!(definitions, wanted, "{err}");
    refused(
        &["explain", "vfs_test:5 count gone"],
        &expect![[r#"
        hvprobe: bad definition: `gone` cannot be shown: optimised out
          vfs_test:5 count gone
                           ^
    "#]],
    );
    refused(
        &["explain", "vfs_test;ret=*"],
        &expect![[r#"
            hvprobe: bad definition: a text is looked for in the sources: give --source
              vfs_test;ret=*
              ^
        "#]],
    );
    refused(
        &["explain", "vfs_test:5", "--other"],
        &expect![[r#"
        hvprobe: cannot use DIR/other: the debug information is of another kernel: its build id is 416e206964206f662061206275696c64, the kernel's 616e206964206f662061206275696c64
    "#]],
    );
    let output = Command::new(env!("CARGO_BIN_EXE_hvprobe"))
        .args(["explain", "vfs_test:5", "--kernel", "./none"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(
        err.ends_with("give --debug-info, or begin with `p` or `r`\n"),
        "{err}"
    );
}

/// Runs the program in a folder with `vmlinux` and files of modules: `test_drv.ko`, and `other-drv.ko.debug`,
/// which does not contain the module's name.
fn said_of_modules(words: &[&str]) -> (String, String, Option<i32>) {
    let folder = TempDir::new().unwrap();
    let files = [
        ("vmlinux", dwarf::file()),
        ("test_drv.ko", module_file::file(dwarf::BUILD_ID, true)),
        (
            "other-drv.ko.debug",
            module_file::file(b"another id of it", false),
        ),
    ];
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_hvprobe"))
        .args(words)
        .current_dir(folder.path())
        .env("RUST_LOG", "error")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    (out, err, output.status.code())
}

#[test]
fn modules_files_are_read_without_a_kernel() {
    let (out, err, status) = said_of_modules(&["lines", "vfs_test", "--debug-info", "test_drv.ko"]);
    assert_eq!((err.as_str(), status), ("", Some(0)));
    expect![[r#"
        vfs_test fs/test.c:10
              0  test_drv:vfs_test
              1  test_drv:vfs_test+0x4 test_drv:vfs_test+0x38
              3  test_drv:vfs_test+0x20
              4  test_drv:vfs_test+0x30
              5  test_drv:vfs_test+0x50
    "#]]
    .assert_eq(&out);
    // The module gets its name from the name of the file.
    let words = ["vars", "vfs_test:5", "--debug-info", "other-drv.ko.debug"];
    let (out, err, status) = said_of_modules(&words);
    assert_eq!((err.as_str(), status), ("", Some(0)));
    expect![[r#"
        other_drv:vfs_test+0x50
          struct file *file  (not kept here)
          int count  +8(%sp)
          int flags  \-7
          int gone  (optimised out)
          int ret  +16(+8(%bx))
          struct file table  (in the module's own memory, which a definition cannot name)
    "#]]
    .assert_eq(&out);
}

#[test]
fn probes_as_perf_has_them_go_to_the_module_that_knows_their_function() {
    let explain = |files: &[&str]| {
        let files = files.iter().flat_map(|file| ["--debug-info", file]);
        let words = ["explain", "--kernel", "vmlinux", "vfs_test:1 count"];
        said_of_modules(&words.into_iter().chain(files).collect::<Vec<_>>())
    };
    let (_, err, _) = explain(&["test_drv.ko"]);
    assert!(
        err.contains("p:probe/vfs_test_L1 test_drv:vfs_test+0x4 count=+8(%sp):s32"),
        "{err}"
    );
    let (out, err, status) = explain(&["test_drv.ko", "vmlinux"]);
    assert_eq!((out.as_str(), status), ("", Some(2)));
    expect![[r#"
        hvprobe: bad definition: it is in vmlinux and in test_drv.ko: give only one of them
          vfs_test:1 count
          ^
    "#]]
    .assert_eq(&err);
    let (_, err, status) = explain(&["test_drv.ko", "missing"]);
    assert_eq!(status, Some(1));
    assert!(
        err.starts_with("hvprobe: cannot read missing: No such file"),
        "{err}"
    );
    let (out, err, status) = explain(&["vmlinux", "vmlinux"]);
    assert_eq!((out.as_str(), status), ("", Some(2)));
    expect![[r#"
        hvprobe: --debug-info: vmlinux and vmlinux are both of a kernel
    "#]]
    .assert_eq(&err);
}
