//! Tests of prototypes, and of the places of parameters.

use hvprobe_arch::regs::Gpr;
use hvprobe_fixtures::btf::{Btf, sample};

use super::{BIT_FIELDS, BOOL, SIGNED, STRUCT, UNION, parsed};
use crate::types::{Place, PrototypeError, Returned, TypeId};

#[test]
fn prototypes_are_known_and_not_guessed() {
    let mut btf = sample();
    let int = 1;
    btf.function("twice", int, &[("a", int)]);
    btf.function("twice", int, &[("b", int)]);
    btf.function("twin", int, &[("a", int)]);
    btf.function("twin", 0, &[("a", int)]);
    btf.function("printk", int, &[("format", 8), ("", 0)]);
    btf.function("nothing", 0, &[]);
    btf.function("broken", 0, &[("", 0), ("a", int)]);
    btf.refer(12, "foreign", int);
    let types = parsed(&btf);
    let found = types.function("do_sys_openat2").unwrap();
    let names: Vec<_> = found.parameters.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["dfd", "filename", "how"]);
    assert_eq!(types.name(found.parameters[2].ty), "struct open_how *");
    assert_eq!(found.returns, Some(TypeId(int)));
    assert!(!found.variadic);
    assert!(types.function("twice").is_ok());
    let printk = types.function("printk").unwrap();
    assert!(printk.variadic && printk.parameters.len() == 1);
    let nothing = types.function("nothing").unwrap();
    assert!(nothing.parameters.is_empty() && nothing.returns.is_none());
    let error = |name: &str| types.function(name).unwrap_err();
    assert_eq!(error("twin"), PrototypeError::Ambiguous("twin".to_owned()));
    for name in ["broken", "foreign"] {
        assert_eq!(error(name), PrototypeError::Malformed(name.to_owned()));
    }
    // A type is not a function; a clone is not the function it was made from.
    for name in [
        "open_how",
        "do_sys_openat2.isra.0",
        "do_sys_openat",
        "",
        "vfs_read",
    ] {
        assert_eq!(error(name), PrototypeError::Unknown(name.to_owned()));
    }
}

#[test]
fn parameters_are_where_the_calling_convention_has_them() {
    use Gpr::{R8, R9, Rcx, Rdi, Rdx, Rsi};
    use Place::{Register, Registers, Stack, Unknown};

    let mut btf = Btf::default();
    let int = btf.int("int", 4, SIGNED);
    let long = btf.int("long int", 8, SIGNED);
    let huge = btf.int("__int128", 16, SIGNED);
    let bool = btf.int("_Bool", 1, BOOL);
    let pointer = btf.pointer(0);
    let color = btf.enumeration(false, "color", &[("RED", 0)]);
    let name = btf.refer(8, "long_t", long);
    let float = btf.add(&[0, 16 << 24, 8]);
    let small = btf.structure("small", 8, &[("a", int, 0), ("b", int, 32)]);
    let pair = btf.structure("pair", 16, &[("a", long, 0), ("b", bool, 64)]);
    let either = btf.composite(UNION, "either", 16, &[("a", int, 0), ("b", pair, 0)]);
    let big = btf.structure("big", 24, &[("a", pair, 0), ("b", long, 128)]);
    let packed = btf.structure("packed", 9, &[("a", bool, 0), ("b", long, 8)]);
    let odd = btf.structure("odd", 3, &[("a", bool, 0), ("b", bool, 8), ("c", bool, 16)]);
    let empty = btf.structure("empty", 0, &[]);
    let padded = btf.structure("padded", 16, &[("a", long, 0)]);
    let floating = btf.structure("floating", 16, &[("a", long, 0), ("b", float, 64)]);
    let words = btf.array(long, 2);
    let words = btf.structure("words", 16, &[("a", words, 0)]);
    let bits = BIT_FIELDS | STRUCT;
    let bits = btf.composite(
        bits,
        "bits",
        16,
        &[("a", long, 60 << 24), ("b", long, 9 << 24 | 64)],
    );
    let wide = btf.structure("wide", 32, &[("a", huge, 0), ("b", long, 128)]);
    let unknown = btf.refer(7, "unknown", 0);
    let mut cases = Vec::new();
    let mut case = |returns: u32, parameters: &[u32], expected: &[Place]| {
        let name = format!("f{}", cases.len());
        let parameters: Vec<_> = parameters.iter().map(|ty| ("p", *ty)).collect();
        btf.function(&name, returns, &parameters);
        cases.push((name, expected.to_vec()));
    };
    let all = [Rdi, Rsi, Rdx, Rcx, R8, R9].map(Register);
    let seven = [int, pointer, bool, color, name, long, int];
    case(int, &seven, &[&all[..], &[Stack(1)]].concat());
    case(
        int,
        &[&seven[..], &[long]].concat(),
        &[&all[..], &[Stack(1), Stack(2)]].concat(),
    );
    // The first argument is the address for a return value in memory.
    case(big, &[int, int], &[Register(Rsi), Register(Rdx)]);
    case(pair, &[int], &[Register(Rdi)]);
    case(
        0,
        &[small, pair, either, int],
        &[
            Register(Rdi),
            Registers(Rsi, Rdx),
            Registers(Rcx, R8),
            Register(R9),
        ],
    );
    case(
        0,
        &[odd, words, bits, int],
        &[
            Register(Rdi),
            Registers(Rsi, Rdx),
            Registers(Rcx, R8),
            Register(R9),
        ],
    );
    case(
        0,
        &[big, int, packed, int],
        &[Stack(1), Register(Rdi), Stack(4), Register(Rsi)],
    );
    case(
        0,
        &[int, padded, empty, int],
        &[Register(Rdi), Register(Rsi), Unknown, Unknown],
    );
    // A parameter that does not fit into the remaining registers is on the stack as a whole. A later one may still
    // be in the last register.
    case(
        0,
        &[int, int, int, int, int, pair, int, int],
        &[&all[..5], &[Stack(1), Register(R9), Stack(3)]].concat(),
    );
    case(
        0,
        &[huge, int, huge],
        &[Registers(Rdi, Rsi), Register(Rdx), Registers(Rcx, R8)],
    );
    case(
        0,
        &[int, int, int, int, int, int, int, huge, int, wide, int],
        &[
            &all[..],
            &[Stack(1), Stack(3), Stack(5), Stack(7), Stack(11)],
        ]
        .concat(),
    );
    case(0, &[int, floating, int], &[Register(Rdi), Unknown, Unknown]);
    case(0, &[float, int], &[Unknown, Unknown]);
    case(0, &[int, unknown, int], &[Register(Rdi), Unknown, Unknown]);
    let types = parsed(&btf);
    for (name, expected) in cases {
        let prototype = types.function(&name).unwrap();
        assert_eq!(types.places(&prototype), expected, "{name}");
    }
}

#[test]
fn results_are_where_the_calling_convention_has_them() {
    let mut btf = Btf::default();
    let int = btf.int("int", 4, SIGNED);
    let long = btf.int("long int", 8, SIGNED);
    let huge = btf.int("__int128", 16, SIGNED);
    let pointer = btf.pointer(0);
    let small = btf.structure("small", 8, &[("a", int, 0), ("b", int, 32)]);
    let time = btf.structure(
        "timespec64",
        16,
        &[("tv_sec", long, 0), ("tv_nsec", long, 64)],
    );
    let name = btf.refer(8, "time_t", time);
    let packed = btf.structure("packed", 12, &[("a", int, 0), ("b", long, 32)]);
    let big = btf.structure("big", 24, &[("a", time, 0), ("b", long, 128)]);
    let empty = btf.structure("empty", 0, &[]);
    let unknown = btf.refer(7, "unknown", 0);
    let types = parsed(&btf);
    for (ty, expected) in [
        (int, Returned::Register),
        (pointer, Returned::Register),
        (small, Returned::Register),
        (huge, Returned::Registers),
        (time, Returned::Registers),
        (name, Returned::Registers),
        (packed, Returned::Memory),
        (big, Returned::Memory),
        (empty, Returned::Unknown),
        (unknown, Returned::Unknown),
    ] {
        assert_eq!(types.returned(TypeId(ty)), expected, "{ty}");
    }
}
