//! Tests of look-ups by name, address and pattern.

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

fn table() -> Symbols {
    let text = |name, addr| (name, addr, None, SymbolKind::Text);
    let raw = [
        ("current_task", 0x1fb80, None, SymbolKind::Absolute),
        text("_stext", 0xffff_ffff_8100_0000),
        text("startup_64", 0xffff_ffff_8100_0000),
        text("twin", 0xffff_ffff_8100_0100),
        text("vfs_read", 0xffff_ffff_8100_0200),
        text("vfs_readv", 0xffff_ffff_8100_0280),
        text("twin", 0xffff_ffff_8100_0300),
        text("__x64_sys_read", 0xffff_ffff_8100_0400),
        text("foo.isra.0", 0xffff_ffff_8100_0480),
        text("alias_a", 0xffff_ffff_8100_0500),
        text("alias_b", 0xffff_ffff_8100_0500),
        text("sized", 0xffff_ffff_8100_0600),
        text("last", 0xffff_ffff_8100_0f00),
        ("vfs_read", 0xffff_ffff_8200_0000, Some(8), SymbolKind::Data),
        ("state", 0xffff_ffff_8200_0008, None, SymbolKind::Data),
        ("state", 0xffff_ffff_8200_0010, None, SymbolKind::Data),
    ];
    let raw = raw.map(|(name, addr, size, kind)| RawSymbol {
        name,
        addr: Gva(addr),
        size: if name == "sized" { Some(0x20) } else { size },
        kind,
    });
    // The table sorts its entries by address, so their order matters only among names of one address.
    Symbols::new(
        raw.into_iter().rev(),
        &[
            0..0x2_0000,
            0xffff_ffff_8100_0000..0xffff_ffff_8100_1000,
            0xffff_ffff_8200_0000..0xffff_ffff_8200_1000,
        ],
    )
}

fn check(name: &str, expect: Expect) {
    let found = match table().lookup(name) {
        Ok(symbol) => format!("{} {} {:?}", symbol.addr, symbol.size, symbol.kind),
        Err(error) => error.to_string(),
    };
    expect.assert_eq(&found);
}

#[test]
fn code_goes_before_data_of_the_same_name() {
    check("vfs_read", expect!["0xffffffff81000200 128 Text"]);
}

#[test]
fn no_name_is_like_one_that_is_longer_than_any_typed_by_hand() {
    let long = "a".repeat(LONGEST);
    let names = [long.clone() + "b", long.clone()];
    let near = |name: &str| nearest(name, names.iter().map(String::as_str));
    assert_eq!(near(&long), [long.clone(), long.clone() + "b"]);
    assert!(near(&(long + "c")).is_empty());
}

#[test]
fn size_is_what_the_image_says_or_up_to_the_next_address() {
    check("alias_a", expect!["0xffffffff81000500 256 Text"]);
    check("alias_b", expect!["0xffffffff81000500 256 Text"]);
    check("sized", expect!["0xffffffff81000600 32 Text"]);
    check("last", expect!["0xffffffff81000f00 256 Text"]);
    check("current_task", expect!["0x1fb80 1152 Absolute"]);
}

#[test]
fn same_name_at_several_addresses_is_ambiguous() {
    check(
        "twin",
        expect![
            "symbol `twin` is ambiguous, it is at 0xffffffff81000100, 0xffffffff81000300; give the address instead"
        ],
    );
    check(
        "state",
        expect![
            "symbol `state` is ambiguous, it is at 0xffffffff82000008, 0xffffffff82000010; give the address instead"
        ],
    );
}

#[test]
fn unknown_name_offers_near_ones() {
    check(
        "vfs_raed",
        expect!["unknown symbol `vfs_raed`; did you mean `vfs_read`, `vfs_readv`?"],
    );
    check(
        "sys_read",
        expect!["unknown symbol `sys_read`; did you mean `__x64_sys_read`, `vfs_read`?"],
    );
    check("foo", expect!["unknown symbol `foo`"]);
    check(
        "foo.isra",
        expect!["unknown symbol `foo.isra`; did you mean `foo.isra.0`?"],
    );
    check("no_such_thing", expect!["unknown symbol `no_such_thing`"]);
    check("", expect!["unknown symbol ``"]);
    let endless = "x".repeat(1 << 20);
    assert!(table().lookup(&endless).is_err());
}

#[test]
fn names_that_go_on_are_offered_first_and_code_of_tracepoints_last() {
    // Names in Linux 6.12, where `kmem_cache_alloc` is a macro.
    let names = [
        "__SCT__tp_func_kmem_cache_alloc",
        "__bpf_trace_kmem_cache_alloc",
        "__probestub_kmem_cache_alloc",
        "__traceiter_kmem_cache_alloc",
        "kmem_cache_alloc_bulk_noprof",
        "kmem_cache_alloc_noprof",
        "kmem_cache_alloc_noprof.cold",
        "mem_cache_alloc",
        "perf_trace_kmem_cache_alloc",
        "trace_event_raw_event_kmem_cache_alloc",
        "trace_raw_output_kmem_cache_alloc",
    ];
    let raw = (0..).zip(names).map(|(n, name)| RawSymbol {
        name,
        addr: Gva(0xffff_ffff_8100_0000 + 0x10 * n),
        size: None,
        kind: SymbolKind::Text,
    });
    let symbols = Symbols::new(raw, &[]);
    expect![[r#"
        [
            "kmem_cache_alloc_noprof",
            "kmem_cache_alloc_bulk_noprof",
            "mem_cache_alloc",
        ]
    "#]]
    .assert_debug_eq(&symbols.near("kmem_cache_alloc")[..3].to_vec());
    // The generated functions of tracepoints are still offered if nothing else matches.
    let traced = symbols.near("trace_kmem_cache_alloc");
    assert!(
        traced.iter().any(|name| name.starts_with("__bpf_")),
        "{traced:?}"
    );
}

#[test]
fn long_lists_of_addresses_are_cut_in_the_message() {
    let error = LookupError::Ambiguous {
        name: "init".to_owned(),
        at: (0..11).map(Gva).collect(),
    };
    expect!["symbol `init` is ambiguous, it is at 0x0, 0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x7 and 3 more; give the address instead"]
        .assert_eq(&error.to_string());
}

#[test]
fn address_is_found_for_names_of_any_kind_but_only_if_unique() {
    let table = table();
    assert_eq!(table.address_of("current_task"), Some(Gva(0x1fb80)));
    assert_eq!(table.address_of("vfs_read"), None);
    assert_eq!(table.address_of("twin"), None);
    assert_eq!(table.address_of("nothing"), None);
}

#[test]
fn containing_symbol_is_the_nearest_before_and_ends_with_its_size() {
    let table = table();
    let at = |at: u64| {
        table
            .containing(Gva(at))
            .map(|(symbol, offset)| (symbol.name, offset))
    };
    assert_eq!(at(0xffff_ffff_8100_0200), Some(("vfs_read", 0)));
    assert_eq!(at(0xffff_ffff_8100_027f), Some(("vfs_read", 0x7f)));
    assert_eq!(at(0xffff_ffff_8100_0280), Some(("vfs_readv", 0)));
    assert_eq!(at(0xffff_ffff_8100_061f), Some(("sized", 0x1f)));
    assert_eq!(at(0xffff_ffff_8100_0620), None);
    assert_eq!(at(0xffff_ffff_8100_1000), None);
    assert_eq!(at(0), None);
    assert_eq!(at(u64::MAX), None);
}

#[test]
fn among_names_of_one_address_the_first_in_the_image_is_meant() {
    // The table was built in reverse order.
    let (symbol, _) = table()
        .containing(Gva(0xffff_ffff_8100_0510))
        .map(|(s, o)| (s.name.to_owned(), o))
        .unwrap();
    assert_eq!(symbol, "alias_b");
}

#[test]
fn patterns_list_by_address() {
    let table = table();
    let list = |pattern: &str| -> Vec<String> {
        table
            .glob(pattern)
            .unwrap()
            .map(|symbol| symbol.name.to_owned())
            .collect()
    };
    assert_eq!(list("vfs_*"), ["vfs_read", "vfs_readv", "vfs_read"]);
    assert_eq!(list("alias_[b-z]"), ["alias_b"]);
    assert_eq!(list("foo.*"), ["foo.isra.0"]);
    assert_eq!(list("?win"), ["twin", "twin"]);
    assert_eq!(list("*").len(), table.len());
    assert!(table.glob("[").is_err());
}

#[test]
fn empty_table_answers() {
    let table = Symbols::default();
    assert!(table.is_empty());
    assert!(table.lookup("x").is_err());
    assert_eq!(table.containing(Gva(1)), None);
}

#[test]
fn a_name_that_got_an_underscore_is_offered_before_those_that_go_on() {
    // Names in Linux since 5.15, where `printk` is a macro.
    let names = ["printk_get", "printk_timed", "_printk", "vprintk"];
    let raw = (0..).zip(names).map(|(n, name)| RawSymbol {
        name,
        addr: Gva(0xffff_ffff_8100_0000 + 0x10 * n),
        size: None,
        kind: SymbolKind::Text,
    });
    assert_eq!(Symbols::new(raw, &[]).near("printk")[0], "_printk");
}

#[test]
fn parts_of_a_function_are_those_that_the_compilers_name_so() {
    let names = [
        "read",
        "read.cold",
        "read.cold.7",
        "read.cold.12",
        "read.__part.1",
        "read.part.0",
        "read.part.0.cold",
        "read.cold.x",
        "read.cold.",
        "read.__part.",
        "reader.cold",
        "thread.cold.1",
        "read.cold",
    ];
    let raw = (0..).step_by(0x10).zip(names).map(|(at, name)| RawSymbol {
        name,
        addr: Gva(0xffff_ffff_8100_0000 + at),
        size: None,
        kind: SymbolKind::Text,
    });
    let table = Symbols::new(raw, &[]);
    let parts = |of: &str| {
        let mut names: Vec<_> = table.parts(of).map(|part| part.name.to_owned()).collect();
        names.sort_unstable();
        names.join(" ")
    };
    let expected = "read.__part.1 read.cold read.cold read.cold.12 read.cold.7";
    assert_eq!(parts("read"), expected);
    assert_eq!(parts("read.part.0"), "read.part.0.cold");
    assert_eq!(parts("reader"), "reader.cold");
    assert_eq!(parts("rea"), "");
    assert_eq!(parts("zzz"), "");
}

proptest! {
    #[test]
    fn every_symbol_is_found_by_name_and_address(
        raw in proptest::collection::vec(("[a-c_.]{0,3}", any::<u64>(), any::<Option<u64>>()), 0..60),
        ranges in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..4),
        probe in any::<u64>(),
    ) {
        let ranges: Vec<_> = ranges.into_iter().map(|(a, b)| a..b).collect();
        let table = Symbols::new(
            raw.iter().map(|(name, addr, size)| RawSymbol {
                name,
                addr: Gva(*addr),
                size: *size,
                kind: SymbolKind::Text,
            }),
            &ranges,
        );
        let _ = table.containing(Gva(probe));
        for (name, addr, _) in raw.iter().filter(|(name, ..)| !name.is_empty()) {
            prop_assert!(table.iter().any(|s| s.name == name && s.addr.0 == *addr));
            match table.lookup(name) {
                Ok(symbol) => prop_assert_eq!(symbol.addr.0, *addr),
                Err(LookupError::Ambiguous { at, .. }) => prop_assert!(at.contains(&Gva(*addr))),
                Err(error) => prop_assert!(false, "{}", error),
            }
            let (found, offset) = table.containing(Gva(*addr)).unwrap();
            prop_assert_eq!((found.addr.0, offset), (*addr, 0));
        }
    }
}
