//! Tests on made-up types.

mod functions;
mod print;
mod real;
mod shape;

use std::sync::Arc;

use hvprobe_fixtures::btf::{Btf, sample};
use hvprobe_fixtures::kernel;
use proptest::prelude::*;

use self::shape::rendered;
use super::{Kind, Limits, TypeId, Types};

const SIGNED: u32 = 1;
const BOOL: u32 = 4;
const STRUCT: u32 = 4 << 24;
const UNION: u32 = 5 << 24;
/// Flag of a structure whose members' offsets include the widths of bit fields.
const BIT_FIELDS: u32 = 1 << 31;

fn parsed(btf: &Btf) -> Types {
    Types::parse(&btf.bytes()).unwrap()
}

/// Returns the only type called `name`.
fn one(types: &Types, name: &str) -> TypeId {
    let found = types.find(name);
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    found[0]
}

#[test]
fn members_are_found_in_anonymous_ones() {
    let types = parsed(&sample());
    let file = one(&types, "struct file");
    let place = |name: &str| {
        let found = types.member(file, name)?;
        Some((found.bit_offset, found.width, types.name(found.ty)))
    };
    let some = |at, width, name: &str| Some((at, width, name.to_owned()));
    assert_eq!(place("fd"), some(0, None, "int"));
    assert_eq!(place("busy"), some(32, Some(3), "unsigned int"));
    assert_eq!(place("on"), some(35, Some(1), "_Bool"));
    assert_eq!(place("high"), some(96, None, "unsigned int"));
    assert_eq!(place("whole"), some(64, None, "__u64"));
    for name in ["deep", "", "busy:3"] {
        assert_eq!(place(name), None, "{name}");
    }
    assert!(types.member(one(&types, "pair_t"), "low").is_some());
    assert_eq!(types.member(TypeId(1), "low"), None);
    assert_eq!(types.member(TypeId::VOID, "low"), None);
    let questions = [("file", "high"), ("file", "busy"), ("file", "matrix[2]")];
    let found = types.members(&questions);
    let found: Vec<_> = found
        .iter()
        .map(|it| it.map(|it| (it.offset, it.size)))
        .collect();
    assert_eq!(found, [Some((12, 4)), None, Some((96, 16))]);
    let number = |name: &str| {
        let place = types.number("file", name)?;
        Some((place.offset, place.bytes, place.of(&[0xff; 9])))
    };
    assert_eq!(number("busy"), Some((4, 1, 7)));
    assert_eq!(number("on"), Some((4, 1, 1)));
    assert_eq!(number("high"), Some((12, 4, u32::MAX.into())));
    assert_eq!(number("whole"), Some((8, 8, u64::MAX)));
    for name in ["matrix", "deep"] {
        assert_eq!(number(name), None, "{name}");
    }
}

#[test]
fn bit_fields_of_both_encodings_are_the_same() {
    let mut btf = Btf::default();
    let whole = btf.int("unsigned int", 4, 0);
    // In the old encoding, each bit field has an integer type of its own: here of three bits, from the second bit
    // on.
    let odd = btf.odd_int("unsigned int", 4, 1 << 16 | 3);
    let odd = btf.refer(8, "u32", odd);
    let name = btf.refer(8, "u32", whole);
    btf.structure("old", 4, &[("a", odd, 4), ("b", whole, 32)]);
    let flag = STRUCT | BIT_FIELDS;
    btf.composite(
        flag,
        "new",
        4,
        &[("a", name, 3 << 24 | 5), ("b", whole, 32)],
    );
    let types = parsed(&btf);
    for of in ["struct old", "struct new"] {
        let id = one(&types, of);
        let a = types.member(id, "a").unwrap();
        assert_eq!((a.bit_offset, a.width), (5, Some(3)), "{of}");
        let b = types.member(id, "b").unwrap();
        assert_eq!((b.bit_offset, b.width), (32, None), "{of}");
        assert!(types.declaration(id).contains("u32 a:3;\n"));
        assert_eq!(types.members(&[(&of[7..], "a")]), [None]);
    }
}

#[test]
fn names_lead_to_all_types_that_have_them() {
    let mut btf = sample();
    btf.structure("twin", 4, &[("a", 1, 0)]);
    btf.structure("twin", 8, &[("b", 1, 0)]);
    btf.composite(UNION, "twin", 4, &[("a", 1, 0)]);
    btf.refer(8, "twin", 1);
    btf.refer(7, "twin", 0);
    let types = parsed(&btf);
    let sizes = |name: &str| -> Vec<_> {
        types
            .find(name)
            .into_iter()
            .map(|id| types.size(id))
            .collect()
    };
    assert_eq!(sizes("struct twin"), [Some(4), Some(8)]);
    assert_eq!(sizes("union twin"), [Some(4)]);
    assert_eq!(sizes("twin"), [Some(4)]);
    assert_eq!(sizes("struct inode"), [None]);
    for name in ["long unsigned int", "unsigned long", "unsigned  long"] {
        assert_eq!(sizes(name), [Some(8)], "{name}");
    }
    for name in [
        "",
        "struct",
        "struct ",
        "struct twin *",
        "enum twin",
        "union inode",
        "do_sys_openat2",
    ] {
        assert_eq!(types.find(name), [], "{name}");
    }
    let how = types.function("do_sys_openat2").unwrap().parameters[2].ty;
    assert_eq!(types.pointee(how), Some(one(&types, "struct open_how")));
    assert_eq!(types.pointee(one(&types, "int")), None);
}

#[test]
fn module_goes_on_with_the_ids_and_names_of_its_kernel() {
    let kernel = sample();
    let mut module = Btf::behind(&kernel);
    let (int, how) = (1, 9);
    let pointer = module.pointer(how);
    module.function("m_open", int, &[("how", pointer)]);
    module.structure("open_how", 4, &[("own", int, 0)]);
    let base = Arc::new(parsed(&kernel));
    let types = Types::split(Arc::clone(&base), &module.bytes()).unwrap();
    let open = types.named("m_open").next().unwrap();
    assert_eq!(types.declaration(open), "int m_open(struct open_how *how);");
    assert!(types.function("do_sys_openat2").is_ok());
    assert!(base.function("m_open").is_err());
    let both = types.find("struct open_how");
    let sizes: Vec<_> = both.iter().map(|id| types.size(*id)).collect();
    assert_eq!(sizes, [Some(24), Some(4)]);
    assert_eq!(types.ids().count(), base.ids().count() + 4);
    // The types of a module cannot be used without those of its kernel.
    let lone = Types::parse(&module.bytes()).unwrap();
    assert!(lone.function("m_open").is_err());
}

#[test]
fn loops_come_to_an_end() {
    let mut btf = Btf::default();
    btf.refer(8, "turn", 1);
    btf.pointer(2);
    btf.structure("self", 4, &[("", 3, 0), ("in", 3, 0)]);
    btf.array(4, 1000);
    // Each structure holds many anonymous members of the next one.
    let members: Vec<_> = (0..500).map(|_| ("", 6 + 1, 0)).collect();
    for next in 6..26 {
        let members: Vec<_> = members
            .iter()
            .map(|(name, _, at)| (*name, next, *at))
            .collect();
        btf.structure("wide", 4, &members);
    }
    let parameters: Vec<_> = (0..500).map(|_| ("", 27)).collect();
    for next in [26, 25] {
        let parameters: Vec<_> = parameters.iter().map(|(name, _)| (*name, next)).collect();
        btf.prototype(0, &parameters);
    }
    let types = parsed(&btf);
    assert!(types.ids().count() >= 26);
    for id in types.ids() {
        poke(&types, id);
    }
}

/// Each pass through the loop of types adds more to the text than its type takes in the data.
#[test]
fn functions_that_return_themselves_come_to_an_end() {
    let mut btf = Btf::default();
    let parameters: Vec<_> = (0..500).map(|_| ("", 1)).collect();
    btf.prototype(1, &parameters);
    let types = parsed(&btf);
    for id in types.ids() {
        poke(&types, id);
    }
}

/// Calls every function that takes a type.
fn poke(types: &Types, id: TypeId) {
    assert!(types.name(id).len() < 4096);
    assert!(types.declaration(id).len() < 1 << 20);
    let _ = types.member(id, "nothing");
    let _ = types.pointee(id);
    if let Some(shape) = types.shape(id, Limits::default()) {
        assert!(rendered(&shape).len() < 1 << 22);
    }
    let name = types.own_name(id);
    let _ = types.find(name);
    if let Ok(prototype) = types.function(name) {
        assert_eq!(types.places(&prototype).len(), prototype.parameters.len());
    }
    match types.kind(id) {
        Some(Kind::Enum { values, .. }) => assert!(values.count() < 1 << 16),
        Some(Kind::Struct { members, .. }) => {
            for it in members.take(64) {
                let _ = types.member(id, it.name);
            }
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn damaged_types_are_never_a_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
        cut in any::<prop::sample::Index>(),
        is_sample in any::<bool>(),
    ) {
        let mut bytes = if is_sample { sample().bytes() } else { kernel::btf() };
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut.index(bytes.len() / 2));
        if let Ok(types) = Types::parse(&bytes) {
            for id in types.ids().take(100) {
                poke(&types, id);
            }
        }
    }
}
