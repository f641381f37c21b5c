//! Definitions that are read, definitions that are refused, and the carets of their errors.

mod names;
mod patterns;
mod round_trip;

use expect_test::{Expect, expect};
use hvprobe_arch::Gva;

use super::*;

fn check(text: &str, expect: Expect) {
    let found = match parse(text) {
        Ok(definition) => format!("{definition}"),
        Err(error) => format!("{}\n{error}", error.render(text)),
    };
    expect.assert_eq(&found);
}

#[test]
fn symbols_offsets_addresses_and_names_are_read() {
    assert_eq!(
        parse("p:grp/ev_1 foo.isra.0+0x10"),
        Ok(Definition {
            kind: Kind::Probe,
            name: Some("grp/ev_1".to_owned()),
            target: Target::Symbol {
                module: None,
                name: "foo.isra.0".to_owned(),
                offset: 16,
            },
            arguments: Vec::new(),
            filter: None,
            marks: Marks::default(),
        })
    );
    assert_eq!(
        parse("p 0xffffffff81000000"),
        Ok(Definition {
            kind: Kind::Probe,
            name: None,
            target: Target::Address(Gva(0xffff_ffff_8100_0000)),
            arguments: Vec::new(),
            filter: None,
            marks: Marks::default(),
        })
    );
    check(" \t p   vfs_read \t", expect!["p vfs_read"]);
    check("p:x vfs_read+0", expect!["p:x vfs_read"]);
    check("p vfs_read+26", expect!["p vfs_read+0x1a"]);
    check("p 0XFFFFFFFFFFFFFFFF", expect!["p 0xffffffffffffffff"]);
    check("p if", expect!["p if"]);
}

#[test]
fn parts_of_the_target_are_marked_where_they_stand() {
    for (text, target, place, offset) in [
        ("p vfs_read", 2, 2, 2),
        ("p:g/e  ext4:f+0x10 %di", 7, 12, 14),
        ("r vmlinux:f+0", 2, 10, 12),
        ("p f%return", 2, 2, 2),
        ("p ext4:f*", 2, 7, 7),
        (" p 0x10", 3, 3, 3),
    ] {
        let marks = parse(text).unwrap().marks;
        let columns = (marks.target.0, marks.place.0, marks.offset.0);
        assert_eq!(columns, (target, place, offset), "{text}");
    }
}

#[test]
fn function_probes_are_probes_at_entries_and_returns() {
    for (text, expected) in [
        ("f vfs_read", "p:fprobes/vfs_read__entry vfs_read"),
        (
            "f:g/ ext4:f.isra.0%return $retval",
            "r:g/f_isra_0__exit ext4:f.isra.0 $retval",
        ),
        ("f20:x f%return", "r20:fprobes/x f"),
        ("f:g/x f count if count > 1", "p:g/x f count if count > 1"),
        ("p:g/ vfs_read", "p:g/ vfs_read"),
        ("p:g/ vfs_*", "p:g/ vfs_*"),
    ] {
        assert_eq!(parse(text).unwrap().to_string(), expected, "{text}");
    }
    let long = format!("f {}", "a".repeat(60));
    for (text, column) in [
        ("f foo$bar", 5),
        ("f:g/ ext4:foo$bar", 13),
        (&*long, 1),
        ("f vfs_read+4", 11),
        ("f vfs_*", 2),
        ("f 0xffffffff81000000", 2),
        ("f20 vfs_read", 1),
        ("f2x vfs_read%return", 2),
        ("p:/x f", 2),
        ("p:g/x/ f", 5),
    ] {
        assert_eq!(parse(text).unwrap_err().column, column, "{text}");
    }
}

#[test]
fn return_probes_and_modules_are_read_and_printed() {
    let of = |text: &str| parse(text).map(|d| d.kind);
    let any = Ok(Kind::Return { maxactive: None });
    for text in [
        "r vfs_read",
        "r vfs_read+0",
        "r 0xffffffff81000000",
        "p vfs_read%return",
        "p vfs_read+0x0%return",
        "r vfs_read%return",
        "p kvm:kvm_read_guest%return",
    ] {
        assert_eq!(of(text), any, "{text}");
    }
    for (text, number) in [("r1 a", 1), ("r20:x a", 20), ("r0x1000 a", 4096)] {
        let maxactive = Some(number);
        assert_eq!(of(text), Ok(Kind::Return { maxactive }), "{text}");
    }
    check("r0x14:g/x  vfs_read+0", expect!["r20:g/x vfs_read"]);
    check("p:x vfs_read%return", expect!["r:x vfs_read"]);
    check(
        "p 8021q:vlan_dev_open+4",
        expect!["p 8021q:vlan_dev_open+0x4"],
    );
    assert_eq!(
        parse("p ext4:ext4_sync_file").map(|d| d.target),
        Ok(Target::Symbol {
            module: Some("ext4".to_owned()),
            name: "ext4_sync_file".to_owned(),
            offset: 0,
        })
    );
}

#[test]
fn vmlinux_is_the_kernel() {
    for (kernel, plain) in [
        ("p vmlinux:vfs_read+4 %di", "p vfs_read+4 %di"),
        ("r:a vmlinux:vfs_read", "r:a vfs_read"),
    ] {
        assert_eq!(parse(kernel).unwrap().target, parse(plain).unwrap().target);
    }
    let pattern = parse("p vmlinux:vfs_*").unwrap();
    assert_eq!(pattern.to_string(), "p vmlinux:vfs_*");
}

#[test]
fn numbers_and_offsets_of_return_probes_are_checked() {
    check(
        "p20 vfs_read",
        expect![[r#"
        p20 vfs_read
         ^
        the number of calls in flight belongs to return probes: write `r20`"#]],
    );
    check(
        "r0 vfs_read",
        expect![[r#"
        r0 vfs_read
         ^
        0 calls in flight: between 1 and 4096 can be followed"#]],
    );
    check(
        "r1a111 f",
        expect![[r#"
        r1a111 f
          ^
        `a` is no digit of the number of calls in flight"#]],
    );
    check(
        "r10fuzz:x f",
        expect![[r#"
        r10fuzz:x f
           ^
        `f` is no digit of the number of calls in flight"#]],
    );
    check(
        "r4097 vfs_read",
        expect![[r#"
        r4097 vfs_read
         ^
        4097 calls in flight: between 1 and 4096 can be followed"#]],
    );
    check(
        "r99999999999999999999 vfs_read",
        expect![[r#"
        r99999999999999999999 vfs_read
         ^
        the number of calls in flight does not fit 64 bits"#]],
    );
    check(
        "r010 vfs_read",
        expect![[r#"
        r010 vfs_read
         ^
        leading zero in the number of calls in flight: write decimal, or hex after 0x"#]],
    );
    check(
        "r-1 vfs_read",
        expect![[r#"
            r-1 vfs_read
            ^
            a definition starts with `p`, `r` or `f`, or with `p:NAME`, `r:NAME` or `f:NAME`"#]],
    );
    check(
        "r vfs_read+4",
        expect![[r#"
        r vfs_read+4
                  ^
        a return probe begins at the function's entry: leave out the offset"#]],
    );
    check(
        "p kvm:kvm_read+0x10%return",
        expect![[r#"
        p kvm:kvm_read+0x10%return
                      ^
        a return probe begins at the function's entry: leave out the offset"#]],
    );
    check(
        "p vfs_read%ret",
        expect![[r#"
        p vfs_read%ret
                  ^
        only `%return` can follow a symbol after `%`"#]],
    );
    check(
        "p vfs_read%return%return",
        expect![[r#"
        p vfs_read%return%return
                  ^
        only `%return` can follow a symbol after `%`"#]],
    );
    check(
        "p 0xffffffff81000000%return",
        expect![[r#"
        p 0xffffffff81000000%return
                            ^
        `%return` follows a symbol: write `r 0xADDRESS`"#]],
    );
    check(
        "r:",
        expect![[r#"
        r:
          ^
        missing name after `:`; leave out the `:` or name it"#]],
    );
    check(
        "r5",
        expect![[r#"
        r5
          ^
        missing target: a symbol or address to probe"#]],
    );
}

#[test]
fn missing_kind_is_suggested() {
    check(
        "vfs_read",
        expect![[r#"
            vfs_read
            ^
            a definition starts with `p` or `r`: write `p vfs_read`"#]],
    );
    check(
        "  vfs_read+4",
        expect![[r#"
              vfs_read+4
              ^
            a definition starts with `p` or `r`: write `p vfs_read+4`"#]],
    );
    check(
        "0xffffffff81000000",
        expect![[r#"
            0xffffffff81000000
            ^
            a definition starts with `p` or `r`: write `p 0xffffffff81000000`"#]],
    );
    check(
        "probe vfs_read",
        expect![[r#"
            probe vfs_read
            ^
            a definition starts with `p`, `r` or `f`, or with `p:NAME`, `r:NAME` or `f:NAME`"#]],
    );
    check(
        "",
        expect![[r#"

        ^
        empty definition: write `p SYMBOL`, for example `p vfs_read`"#]],
    );
    check(
        "p",
        expect![[r#"
        p
         ^
        missing target: a symbol or address to probe"#]],
    );
}

#[test]
fn what_is_missing_is_missing_at_the_end() {
    assert_eq!(parse(" \t ").unwrap_err().column, 3);
    assert_eq!(parse("p:x ").unwrap_err().column, 4);
}

#[test]
fn targets_are_checked() {
    check(
        "p vfs_read+",
        expect![[r#"
        p vfs_read+
                   ^
        missing offset after `+`"#]],
    );
    check(
        "p vfs_read-4",
        expect![[r#"
        p vfs_read-4
                  ^
        an offset counts from the symbol's start and cannot be negative"#]],
    );
    check(
        "p vfs_read+-4",
        expect![[r#"
        p vfs_read+-4
                   ^
        an offset counts from the symbol's start and cannot be negative"#]],
    );
    check(
        "p vfs_read+0x",
        expect![[r#"
        p vfs_read+0x
                     ^
        missing digits of the offset"#]],
    );
    check(
        "p vfs_read+12q",
        expect![[r#"
            p vfs_read+12q
                         ^
            `q` is no digit of the offset"#]],
    );
    check(
        "p vfs_read+010",
        expect![[r#"
        p vfs_read+010
                   ^
        leading zero in the offset: write decimal, or hex after 0x"#]],
    );
    check(
        "p vfs_read+0x10000000000000000",
        expect![[r#"
        p vfs_read+0x10000000000000000
                   ^
        the offset does not fit 64 bits"#]],
    );
    check(
        "p vfs_read+99999999999999999999",
        expect![[r#"
        p vfs_read+99999999999999999999
                   ^
        the offset does not fit 64 bits"#]],
    );
    check(
        "p vfs_read +4",
        expect![[r#"
        p vfs_read +4
                   ^
        Dereference needs a brace; an offset follows the symbol without a blank"#]],
    );
    check(
        "p vfs_read,",
        expect![[r#"
        p vfs_read,
                  ^
        `,` cannot be part of a symbol"#]],
    );
    check(
        "p 0x",
        expect![[r#"
        p 0x
            ^
        missing digits of the address"#]],
    );
    check(
        "p 0xfffg",
        expect![[r#"
            p 0xfffg
                   ^
            `g` is no digit of the address"#]],
    );
    check(
        "p 0x1000+4",
        expect![[r#"
        p 0x1000+4
                ^
        an address takes no offset: add it up"#]],
    );
    check(
        "p 4096",
        expect![[r#"
        p 4096
          ^
        a symbol starts with no digit, an address with 0x"#]],
    );
    check(
        "p +4",
        expect![[r#"
        p +4
          ^
        a symbol or an address (0x...) belongs here"#]],
    );
    check(
        "p vfs_read+0x0 0xffffffff81000000",
        expect![[r#"
        p vfs_read+0x0 0xffffffff81000000
                       ^
        Invalid fetch argument; both a symbol and an address given: give one of them"#]],
    );
    check(
        "p 0xffffffff81000000 vfs_read",
        expect![[r#"
        p 0xffffffff81000000 vfs_read
                             ^
        both an address and a symbol given: give one of them"#]],
    );
}

#[test]
fn the_rest_of_the_kernels_language_is_refused_by_name() {
    check(
        "p %di",
        expect![[r#"
        p %di
          ^
        a symbol or address to probe is missing before the fetch arguments"#]],
    );
    check(
        "t sched_switch",
        expect![[r#"
            t sched_switch
            ^
            not supported: tracepoint probes (`t`); write `p SYMBOL` or `r SYMBOL`"#]],
    );
    check(
        "-:x",
        expect![[r#"
            -:x
            ^
            not supported: removing events by definition (`-`); write `p SYMBOL` or `r SYMBOL`"#]],
    );
}

#[test]
fn carets_stay_in_place_whatever_the_text_holds() {
    check(
        "p\tvfs_read\t%arg",
        expect![[r#"
        p	vfs_read	%arg
         	        	^
        Invalid register name"#]],
    );
    check(
        "p vfs_réad",
        expect![[r#"
        p vfs_réad
               ^
        character outside ASCII 'é': a definition is one line of ASCII"#]],
    );
    check(
        "é p vfs_read",
        expect![[r#"
        é p vfs_read
        ^
        character outside ASCII 'é': a definition is one line of ASCII"#]],
    );
    check(
        "p vfs_read\0",
        expect![[r#"
        p vfs_read?
                  ^
        control character '\0': a definition is one line of ASCII"#]],
    );
    check(
        "p vfs_read\n",
        expect![[r#"
        p vfs_read?
                  ^
        line break '\n': a definition is one line of ASCII"#]],
    );
    check(
        "p \u{1b}[2Jvfs_read",
        expect![[r#"
        p ?[2Jvfs_read
          ^
        control character '\u{1b}': a definition is one line of ASCII"#]],
    );
}
