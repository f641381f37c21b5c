//! Tests of shapes.

use expect_test::{Expect, expect};
use hvprobe_fixtures::btf::{Btf, sample};
use hvprobe_spec::shape::{Shape, ShapeKind};

use super::{one, parsed};
use crate::types::{Limits, TypeId};

/// Writes a shape in lines. The line of a member has its offset, width, name, type, size and kind.
pub(super) fn rendered(shape: &Shape) -> String {
    let mut text = format!("{} ({}) ", shape.name, shape.size);
    match &shape.kind {
        ShapeKind::Struct { union, members } => {
            text += if *union { "union" } else { "struct" };
            for it in members {
                let width = it
                    .width
                    .map(|width| format!(":{width}"))
                    .unwrap_or_default();
                let inner = rendered(&it.shape).replace('\n', "\n  ");
                text += &format!("\n  {}{width} {}: {inner}", it.offset, it.name);
            }
        }
        ShapeKind::Array { element, count } => text += &format!("{count} of {}", rendered(element)),
        ShapeKind::Enum { signed, values } => {
            text += if *signed { "signed" } else { "unsigned" };
            for it in values {
                text += &format!(" {}={}", it.name, it.value);
            }
        }
        other => text += &format!("{other:?}"),
    }
    text
}

#[test]
fn shape_says_all_that_is_needed_to_print_a_value() {
    let types = parsed(&sample());
    let file = one(&types, "struct file");
    let shape = types.shape(file, Limits::default()).unwrap();
    expect![[r#"
        struct file (256) struct
          0 fd: int (4) Signed
          32:3 busy: unsigned int (4) Unsigned
          35:1 on: _Bool (1) Bool
          64 whole: __u64 (8) Unsigned
          64 low: unsigned int (4) Unsigned
          96 high: unsigned int (4) Unsigned
          128 open: int (*)(struct inode *, const char *) (8) Pointer
          192 show: void (*[2])(void) (16) 2 of void (*)(void) (8) Pointer
          320 comm: char[16] (16) 16 of char (1) Char
          448 named: struct {...} (4) struct
            0 deep: int (4) Signed
          480 color: enum color (4) signed RED=0 LAST=-1
          512 matrix: char[3][16] (48) 3 of char[16] (16) 16 of char (1) Char
          896 of_comm: char (*)[16] (8) Pointer
          960 rest: __u64[] (0) 0 of __u64 (8) Unsigned"#]]
    .assert_eq(&rendered(&shape));
    assert_eq!(types.shape(TypeId::VOID, Limits::default()), None);
    let forward = one(&types, "struct inode");
    assert_eq!(types.shape(forward, Limits::default()), None);
    let function = types.named("do_sys_openat2").next().unwrap();
    assert_eq!(types.shape(function, Limits::default()), None);
}

#[test]
fn shape_is_cut_at_its_limits() {
    let mut btf = sample();
    let mut inner = 1;
    for _ in 0..10 {
        inner = btf.structure("", 4, &[("in", inner, 0)]);
        inner = btf.refer(8, "in_t", inner);
    }
    btf.refer(8, "deep_t", inner);
    let types = parsed(&btf);
    let limits = |depth, members, values| Limits {
        depth,
        members,
        values,
    };
    let check = |name: &str, limits: Limits, expected: Expect| {
        let shape = types.shape(one(&types, name), limits).unwrap();
        expected.assert_eq(&rendered(&shape));
    };
    check(
        "deep_t",
        limits(2, 512, 0),
        expect![[r#"
        deep_t (4) struct
          0 in: in_t (4) struct
            0 in: in_t (4) Bytes"#]],
    );
    check(
        "struct open_how",
        limits(0, 512, 0),
        expect!["struct open_how (24) Bytes"],
    );
    check(
        "struct open_how",
        limits(1, 2, 0),
        expect!["struct open_how (24) Bytes"],
    );
    check(
        "enum color",
        limits(1, 2, 1),
        expect!["enum color (4) Signed"],
    );
    check(
        "deep_t",
        limits(9, 3, 0),
        expect![[r#"
        deep_t (4) struct
          0 in: in_t (4) struct
            0 in: in_t (4) struct
              0 in: in_t (4) Bytes"#]],
    );
}

#[test]
fn enumerations_have_the_sign_that_they_say() {
    let values = [("LOW", -2), ("HIGH", 3)];
    // If no enumeration is marked as signed, one with a negative value counts as signed.
    let mut old = Btf::default();
    old.enumeration(false, "errors", &values);
    old.enumeration(false, "plain", &[("HIGH", 3)]);
    let mut new = Btf::default();
    new.enumeration(true, "errors", &values);
    new.enumeration(false, "flags", &values);
    new.enumeration_64(false, "wide", &[("TOP", 1 << 63)]);
    new.enumeration_64(true, "minus", &[("MINUS", u64::MAX)]);
    let rendered = |btf: &Btf, name: &str| {
        let types = parsed(btf);
        let shape = types.shape(one(&types, name), Limits::default()).unwrap();
        self::rendered(&shape)
    };
    assert_eq!(
        rendered(&old, "enum errors"),
        "enum errors (4) signed LOW=-2 HIGH=3"
    );
    assert_eq!(
        rendered(&old, "enum plain"),
        "enum plain (4) unsigned HIGH=3"
    );
    assert_eq!(
        rendered(&new, "enum errors"),
        "enum errors (4) signed LOW=-2 HIGH=3"
    );
    assert_eq!(
        rendered(&new, "enum flags"),
        "enum flags (4) unsigned LOW=4294967294 HIGH=3"
    );
    assert_eq!(
        rendered(&new, "enum minus"),
        "enum minus (8) signed MINUS=-1"
    );
    let types = parsed(&new);
    let wide = types.declaration(one(&types, "enum wide"));
    assert_eq!(wide, "enum wide {\n\tTOP = 9223372036854775808,\n};");
}
