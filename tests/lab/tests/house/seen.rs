//! Tests of what counts as a dependency (arrow) between files: each way to name an item of another file, in a crate
//! of a few files.

use std::fs;

use tempfile::TempDir;

use super::names::Tree;

/// Checks the arrows between `files`, the first of which is the root. Each of `expected` has the form `from -> to:
/// name`.
fn check(files: &[(&str, &str)], expected: &[&str]) {
    let folder = written(files);
    let needs = Tree::read(folder.path(), &folder.path().join(files[0].0)).needs();
    let mut arrows = Vec::new();
    for (from, others) in needs {
        for (to, names) in others {
            arrows.extend(names.iter().map(|name| format!("{from} -> {to}: {name}")));
        }
    }
    assert_eq!(arrows, expected);
}

/// Writes `files` into a new folder.
fn written(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in files {
        let at = folder.path().join(file);
        fs::create_dir_all(at.parent().expect("a folder")).expect("a folder");
        fs::write(at, text).expect("a file");
    }
    folder
}

const GUEST: (&str, &str) = ("guest.rs", "pub fn boot() {} pub struct Guest;");

#[test]
fn functions_of_an_imported_module() {
    for (import, call) in [
        ("use crate::guest;", "guest::boot()"),
        ("use super::guest;", "guest::boot()"),
        ("use crate::guest as it;", "it::boot()"),
        ("use crate::guest::{self};", "guest::boot()"),
        ("use crate::{guest};", "self::guest::boot()"),
        ("", "crate::guest::boot()"),
        ("", "super::guest::boot()"),
    ] {
        let text = format!("{import} fn run() {{ {call} }}");
        let root = ("main.rs", "mod args; mod guest;");
        let files = [root, ("args.rs", text.as_str()), GUEST];
        check(&files, &["args.rs -> guest.rs: boot"]);
    }
}

#[test]
fn functions_of_a_module_that_a_function_imports() {
    let text = "fn run() { use crate::guest; guest::boot() }";
    let files = [
        ("main.rs", "mod args; mod guest;"),
        ("args.rs", text),
        GUEST,
    ];
    check(&files, &["args.rs -> guest.rs: boot"]);
}

#[test]
fn paths_that_go_up_several_modules() {
    let files = [
        ("lib.rs", "mod a; mod guest;"),
        ("a.rs", "mod b; pub const A: u8 = 1;"),
        ("a/b/mod.rs", "mod c;"),
        (
            "a/b/c.rs",
            "use super::super::super::guest::boot; fn f() { super::super::A; boot() }",
        ),
        GUEST,
    ];
    check(
        &files,
        &["a/b/c.rs -> a.rs: A", "a/b/c.rs -> guest.rs: boot"],
    );
}

#[test]
fn doors_that_hold_code() {
    for door in ["a/mod.rs", "a.rs"] {
        let files = [
            ("lib.rs", "mod a;"),
            (
                door,
                "mod b; mod c; use b::make; pub struct A; fn f() { make(); c::C }",
            ),
            ("a/b.rs", "use super::A; pub fn make() -> A { A }"),
            ("a/c.rs", "pub struct C;"),
        ];
        let arrows = [
            format!("a/b.rs -> {door}: A"),
            format!("{door} -> a/b.rs: make"),
            format!("{door} -> a/c.rs: C"),
        ];
        let mut arrows = arrows.each_ref().map(String::as_str);
        arrows.sort_unstable();
        check(&files, &arrows);
    }
}

#[test]
fn doors_that_hand_names_on_are_followed() {
    let files = [
        ("lib.rs", "mod a; mod d;"),
        (
            "a/mod.rs",
            "mod b; pub use b::*; pub use self::b::B as Other;",
        ),
        ("a/b.rs", "pub struct B; pub const C: u8 = 1;"),
        ("d.rs", "use crate::a::{C, Other};"),
    ];
    check(&files, &["d.rs -> a/b.rs: B", "d.rs -> a/b.rs: C"]);
}

#[test]
fn names_taken_from_a_door_around() {
    for (beside, below, name) in [
        ("use super::B;", "use super::super::B;", Some("B")),
        ("use super::{B as C};", "use crate::a::{B as C};", Some("B")),
        (
            "fn f() { super::make() }",
            "fn f() { crate::a::make() }",
            Some("make"),
        ),
        // Where they are defined.
        ("use super::b::{B, make};", "use super::super::b::B;", None),
        // Names of the door itself, of another folder, and of the crate's root.
        ("use super::A;", "use super::super::A;", None),
        ("use super::E;", "use crate::a::E;", None),
        ("use crate::E;", "use crate::E;", None),
    ] {
        let folder = written(&[
            ("lib.rs", "mod a; mod e; pub use e::E;"),
            (
                "a/mod.rs",
                "mod b; mod c; mod d; pub use b::{B, make}; pub use crate::e::E; pub struct A;",
            ),
            ("a/b.rs", "pub struct B; pub fn make() {}"),
            ("a/c.rs", beside),
            ("a/d/mod.rs", "mod f;"),
            ("a/d/f.rs", below),
            ("e.rs", "pub struct E;"),
        ]);
        let wrong = Tree::read(folder.path(), &folder.path().join("lib.rs")).through_own_doors();
        let line = |file| {
            let name = name?;
            Some(format!(
                "{file} takes {name} from a/mod.rs: take it from a/b.rs"
            ))
        };
        let expected: Vec<_> = ["a/c.rs", "a/d/f.rs"]
            .into_iter()
            .filter_map(line)
            .collect();
        assert_eq!(wrong, expected, "{beside} {below}");
    }
}

#[test]
fn names_that_are_handed_on_and_used() {
    let files = [
        ("lib.rs", "mod a; mod guest;"),
        (
            "a.rs",
            "pub use crate::guest::{Guest, boot}; fn f() { boot() }",
        ),
        GUEST,
    ];
    check(&files, &["a.rs -> guest.rs: boot"]);
}

#[test]
fn names_that_a_parent_imports_for_itself() {
    let files = [
        (
            "lib.rs",
            "mod a; mod guest; use guest::Guest; use crate::guest as it;",
        ),
        ("a.rs", "use super::Guest; fn f() { super::it::boot() }"),
        GUEST,
    ];
    check(
        &files,
        &[
            "a.rs -> guest.rs: Guest",
            "a.rs -> guest.rs: boot",
            "lib.rs -> guest.rs: Guest",
        ],
    );
}

#[test]
fn all_names_of_a_module() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::*; fn f(c: C) { D }"),
        ("b/mod.rs", "mod c; pub use c::{C, D};"),
        ("b/c.rs", "pub struct C; pub struct D;"),
    ];
    check(&files, &["a.rs -> b/c.rs: C", "a.rs -> b/c.rs: D"]);
}

#[test]
fn paths_in_macros_and_attributes() {
    let files = [
        ("main.rs", "mod args; mod guest; mod size;"),
        (
            "args.rs",
            "use crate::{guest, size};
             struct Options { #[arg(long, value_parser = size::parse)] size: u32 }
             fn f() { println!(\"{}\", guest::boot()); assert!(matches!(x, guest::Guest)) }",
        ),
        GUEST,
        ("size.rs", "pub fn parse() {}"),
    ];
    check(
        &files,
        &[
            "args.rs -> guest.rs: Guest",
            "args.rs -> guest.rs: boot",
            "args.rs -> size.rs: parse",
        ],
    );
}

#[test]
fn modules_inside_of_a_file() {
    let files = [
        ("main.rs", "mod args; mod guest;"),
        (
            "args.rs",
            "mod inner { use super::super::guest; fn f() { guest::boot(); super::own() } } fn own() {}",
        ),
        GUEST,
    ];
    check(&files, &["args.rs -> guest.rs: boot"]);
}

#[test]
fn names_from_elsewhere_and_those_of_unit_tests_are_none() {
    let files = [
        (
            "main.rs",
            "mod args; mod guest; use std::fs; fn f() { fs::read(); Vec::new() }",
        ),
        (
            "args.rs",
            "#[cfg(test)] use crate::guest;
             #[cfg(test)] fn f() { crate::guest::boot() }
             impl A { #[cfg(test)] fn f() { crate::guest::boot() } }
             #[cfg(test)] mod tests { use crate::guest::Guest; }
             struct A;",
        ),
        GUEST,
    ];
    check(&files, &[]);
}
