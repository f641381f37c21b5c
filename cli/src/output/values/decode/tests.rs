use hvprobe_proto::v1::{self, TypeKind};
use hvprobe_proto::wire::Wire as _;
use proptest::prelude::*;

use super::*;

/// Reads a value of the type `ty`, which has the form that a server sends. If the type is invalid, the value is
/// unknown.
fn read(ty: &v1::Type, part: Option<v1::Bits>, bytes: &[u8]) -> Value<'static> {
    let (shape, part) = (
        Shape::from_wire(ty.clone()),
        part.map(Bits::from_wire).transpose(),
    );
    match (shape, part) {
        // The names in the value are those of the shape.
        (Ok(shape), Ok(part)) => Value::read(Box::leak(Box::new(shape)), part, bytes),
        _ => Value::Unknown,
    }
}

/// Returns a type without elements or members.
pub(crate) fn plain(name: &str, size: u32, kind: TypeKind) -> v1::Type {
    v1::Type {
        name: name.into(),
        size,
        kind: kind.into(),
        ..Default::default()
    }
}

pub(crate) fn array(element: v1::Type, count: u32) -> v1::Type {
    v1::Type {
        count,
        ..v1::Type {
            size: element.size.saturating_mul(count),
            element: Some(Box::new(element)),
            ..plain("", 0, TypeKind::Array)
        }
    }
}

pub(crate) fn enumeration(size: u32, signed: bool, values: &[(&str, i64)]) -> v1::Type {
    let enumerators = values.iter().map(|(name, value)| v1::Enumerator {
        name: (*name).into(),
        value: *value,
        mask: None,
    });
    v1::Type {
        signed,
        enumerators: enumerators.collect(),
        ..plain("enum e", size, TypeKind::Enum)
    }
}

pub(crate) fn structure(size: u32, members: Vec<v1::Member>) -> v1::Type {
    v1::Type {
        members,
        ..plain("struct s", size, TypeKind::Struct)
    }
}

pub(crate) fn member(name: &str, offset: u32, width: Option<u32>, ty: v1::Type) -> v1::Member {
    v1::Member {
        name: name.into(),
        offset,
        width,
        r#type: Some(ty),
    }
}

fn named<'a>(names: &[&'a str], rest: u64) -> Value<'a> {
    let names = names.to_vec();
    Value::Named { names, rest }
}

fn text_value(bytes: &[u8]) -> Value<'static> {
    Value::Text {
        bytes: bytes.to_vec(),
        truncated: false,
    }
}

#[test]
fn numbers_are_what_their_kind_says() {
    let bytes = 0xffff_ff9c_u64.to_le_bytes();
    for (kind, size, value) in [
        (TypeKind::Unsigned, 4, Value::Unsigned(0xffff_ff9c)),
        (TypeKind::Signed, 4, Value::Signed(-100)),
        (TypeKind::Signed, 8, Value::Signed(0xffff_ff9c)),
        (TypeKind::Signed, 3, Value::Signed(-100)),
        (TypeKind::Hex, 2, Value::Hex(0xff9c)),
        (TypeKind::Char, 1, Value::Char(0x9c)),
        (TypeKind::Bool, 1, Value::Bool(true)),
        (TypeKind::Pointer, 8, Value::Pointer(0xffff_ff9c)),
        (TypeKind::Symbol, 8, Value::Symbol(0xffff_ff9c)),
        (TypeKind::Unspecified, 2, Value::Bytes(vec![0x9c, 0xff])),
        (TypeKind::String, 0, text_value(&[0x9c, 0xff, 0xff, 0xff])),
    ] {
        let ty = plain("", size, kind);
        assert_eq!(read(&ty, None, &bytes), value, "{kind:?}");
    }
    let wide = plain("__int128", 16, TypeKind::Signed);
    assert_eq!(
        read(&wide, None, &[0xff; 16]),
        Value::Signed(-1),
        "of two registers"
    );
}

#[test]
fn part_of_a_number_has_a_sign_of_its_own() {
    let bytes = 0x0000_0000_0000_a5f0_u64.to_le_bytes();
    let part = |offset, width| Some(v1::Bits { offset, width });
    let int = plain("int", 4, TypeKind::Signed);
    let of = |part| read(&int, part, &bytes);
    assert_eq!(of(part(4, 4)), Value::Signed(-1));
    assert_eq!(of(part(8, 4)), Value::Signed(5));
    // These bits are beyond the type, although the register has them.
    assert_eq!(of(part(30, 4)), Value::Unknown);
    assert_eq!(of(part(0, 0)), Value::Unknown);
    assert_eq!(of(part(u32::MAX, u32::MAX)), Value::Unknown);
}

#[test]
fn enumerations_are_printed_by_name() {
    let counting = enumeration(
        4,
        false,
        &[("A", 0), ("B", 1), ("C", 2), ("D", 3), ("E", 3)],
    );
    let of = |ty: &v1::Type, value: u64| read(ty, None, &value.to_le_bytes());
    assert_eq!(of(&counting, 3), named(&["D"], 0));
    assert_eq!(of(&counting, 1 << 32), named(&["A"], 0));
    assert_eq!(of(&counting, 6), Value::Unsigned(6));

    let signed = enumeration(4, true, &[("LESS", -1), ("MORE", 1)]);
    assert_eq!(of(&signed, 0xffff_ffff), named(&["LESS"], 0));
    assert_eq!(of(&signed, 0xffff_fffe), Value::Signed(-2));

    let flags = enumeration(
        4,
        false,
        &[("NONE", 0), ("R", 1), ("W", 2), ("RW", 3), ("X", 4)],
    );
    assert_eq!(of(&flags, 0), named(&["NONE"], 0));
    assert_eq!(of(&flags, 3), named(&["RW"], 0));
    assert_eq!(of(&flags, 5), named(&["R", "X"], 0));
    assert_eq!(of(&flags, 0x8000_0002), named(&["W"], 0x8000_0000));
    assert_eq!(of(&flags, 0x10), Value::Unsigned(0x10));

    let wide = enumeration(8, false, &[("TOP", i64::MIN), ("ALL", -1)]);
    assert_eq!(of(&wide, 1 << 63), named(&["TOP"], 0));
    assert_eq!(of(&wide, u64::MAX), named(&["ALL"], 0));
    let narrow = enumeration(1, true, &[("LOW", 1), ("HIGH", 2)]);
    assert_eq!(of(&narrow, 0x81), named(&["LOW"], 0x80));
}

#[test]
fn arrays_and_structures_are_taken_apart() {
    let shorts = array(plain("short", 2, TypeKind::Signed), 3);
    assert_eq!(
        read(&shorts, None, &[1, 0, 0xff, 0xff, 3, 0, 9]),
        Value::Array(vec![Value::Signed(1), Value::Signed(-1), Value::Signed(3)])
    );
    let name = array(plain("char", 1, TypeKind::Char), 4);
    assert_eq!(read(&name, None, b"ab\0c"), text_value(b"ab"));
    assert_eq!(read(&name, None, b"abcde"), text_value(b"abcd"));

    let int = || plain("int", 4, TypeKind::Signed);
    let unsigned = || plain("unsigned int", 4, TypeKind::Unsigned);
    let inner = structure(2, vec![member("y", 8, None, plain("", 1, TypeKind::Hex))]);
    let outer = structure(
        8,
        vec![
            member("x", 0, None, plain("", 2, TypeKind::Unsigned)),
            member("in", 16, None, inner),
            member("low", 32, Some(3), int()),
            member("high", 35, Some(5), unsigned()),
        ],
    );
    assert_eq!(
        read(&outer, None, &[1, 1, 0, 7, 0b1010_1101, 0, 0, 0]),
        Value::Struct(vec![
            ("x", Value::Unsigned(0x101)),
            ("in", Value::Struct(vec![("y", Value::Hex(7))])),
            ("low", Value::Signed(-3)),
            ("high", Value::Unsigned(0b10101)),
        ])
    );
}

#[test]
fn types_that_contradict_the_bytes_are_unknown() {
    let int = || plain("int", 4, TypeKind::Signed);
    for ty in [
        int(),
        plain("", 0, TypeKind::Unsigned),
        plain("", 17, TypeKind::Unsigned),
        plain("", u32::MAX, TypeKind::Unspecified),
        plain("", 3, TypeKind::Char),
        plain("", 4, TypeKind::Array),
        array(int(), u32::MAX),
        array(int(), 1),
        array(plain("", 0, TypeKind::Struct), u32::MAX),
        v1::Type {
            size: 3,
            ..array(int(), 1)
        },
    ] {
        let bytes = [b'x'; 3];
        assert_eq!(read(&ty, None, &bytes), Value::Unknown, "{ty:?}");
    }
    for (offset, width) in [(1, None), (32, None), (u32::MAX, None), (30, Some(3))] {
        let ty = structure(4, vec![member("m", offset, width, int())]);
        assert_eq!(
            read(&ty, None, &[0; 4]),
            Value::Struct(vec![("m", Value::Unknown)])
        );
    }
    let untyped = v1::Member {
        r#type: None,
        ..member("m", 0, None, int())
    };
    assert_eq!(
        read(&structure(0, vec![untyped]), None, &[]),
        Value::Struct(vec![("m", Value::Unknown)])
    );
    let newer = v1::Type { kind: 99, ..int() };
    assert_eq!(
        read(&newer, None, &[1, 2, 3, 4]),
        Value::Bytes(vec![1, 2, 3, 4])
    );
}

/// Returns the number of values in `value`, including itself.
fn count(value: &Value<'_>) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum::<usize>(),
        Value::Struct(all) => all.iter().map(|(_, each)| count(each)).sum(),
        _ => 0,
    }
}

#[test]
fn values_of_values_come_to_an_end() {
    // A type of one byte with 8^6 members.
    let mut ty = plain("", 1, TypeKind::Hex);
    for _ in 0..6 {
        let members = vec![member("m", 0, None, ty); 8];
        ty = structure(1, members);
    }
    let value = read(&ty, None, &[0]);
    assert!(count(&value) <= 2 * MOST, "{}", count(&value));
    let bits = vec![member("b", 0, Some(1), plain("", 1, TypeKind::Hex)); 10_000];
    assert!(count(&read(&structure(1, bits), None, &[0])) <= 2 * MOST);
    let long = array(plain("", 1, TypeKind::Hex), 10_000);
    let value = read(&long, None, &[0; 10_000]);
    assert_eq!(count(&value), MOST + 1);
}

#[test]
fn symbols_are_found_wherever_they_are() {
    let symbol = || plain("void *", 8, TypeKind::Symbol);
    let ty = structure(
        24,
        vec![
            member("f", 0, None, symbol()),
            member("g", 64, None, array(symbol(), 2)),
        ],
    );
    let bytes: Vec<u8> = [1_u64, 2, 3]
        .iter()
        .flat_map(|at| at.to_le_bytes())
        .collect();
    let mut found = Vec::new();
    read(&ty, None, &bytes).symbols(&mut |at| found.push(at));
    assert_eq!(found, [1, 2, 3]);
}

/// Generates types as a malicious server could send them.
fn any_type() -> impl Strategy<Value = v1::Type> {
    let small = prop_oneof![0_u32..20, any::<u32>()];
    let leaf = (0..14_i32, small.clone(), any::<bool>(), -3..9_i64);
    let leaf = leaf.prop_map(|(kind, size, signed, value)| v1::Type {
        kind,
        ..enumeration(size, signed, &[("A", value), ("B", 1)])
    });
    leaf.prop_recursive(6, 64, 8, move |inner| {
        let bits = proptest::option::of(small.clone());
        let members = (small.clone(), bits, proptest::option::of(inner.clone()));
        let members = members.prop_map(|(offset, width, r#type)| v1::Member {
            r#type,
            ..member("m", offset, width, v1::Type::default())
        });
        let members = proptest::collection::vec(members, 0..4);
        let element = proptest::option::of(inner.prop_map(Box::new));
        let parts = (0..14_i32, small.clone(), small.clone(), element, members);
        parts.prop_map(|(kind, size, count, element, members)| v1::Type {
            kind,
            size,
            count,
            element,
            members,
            ..Default::default()
        })
    })
}

proptest! {
    #[test]
    fn no_type_takes_more_than_there_is(
        ty in any_type(),
        part in proptest::option::of((any::<u32>(), any::<u32>())),
        bytes in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let part = part.map(|(offset, width)| v1::Bits { offset, width });
        let value = read(&ty, part, &bytes);
        prop_assert!(count(&value) <= 2 * MOST);
        value.symbols(&mut |_| {});
        let names = crate::output::values::names::Names::default();
        let text = crate::output::values::value_text::result(&value, &names);
        prop_assert!(!text.chars().any(char::is_control), "{text}");
    }
}

#[test]
fn numbers_made_of_flags_have_the_names_of_all_their_bits() {
    let mut flags = enumeration(4, false, &[]);
    for (name, mask, value) in [
        ("RDONLY", 3, 0),
        ("RDWR", 3, 2),
        ("SYNC", 0x30, 0x30),
        ("DSYNC", 0x10, 0x10),
        ("CLOEXEC", 0x80, 0x80),
    ] {
        flags.enumerators.push(v1::Enumerator {
            name: name.into(),
            value,
            mask: Some(mask),
        });
    }
    for (number, names, rest) in [
        (0_u32, &["RDONLY"][..], 0),
        (0x82, &["RDWR", "CLOEXEC"], 0),
        (0x30, &["RDONLY", "SYNC"], 0),
        (0x10, &["RDONLY", "DSYNC"], 0),
        (0x103, &[], 0x103),
        (0x183, &["CLOEXEC"], 0x103),
    ] {
        let expected = match names {
            [] => Value::Unsigned(rest.into()),
            names => named(names, rest),
        };
        assert_eq!(
            read(&flags, None, &number.to_le_bytes()),
            expected,
            "{number:#x}"
        );
    }
}
