//! Patterns, valid and invalid.

use expect_test::expect;

use super::*;

#[test]
fn wildcards_make_a_pattern() {
    for (text, module, pattern) in [
        ("p vfs_*", None, "vfs_*"),
        ("r20 ext4:ext4_get_?", Some("ext4"), "ext4_get_?"),
        ("p [!a-c_]*.cold", None, "[!a-c_]*.cold"),
        ("p *", None, "*"),
        ("p []a]x", None, "[]a]x"),
        ("p tcp_*%return", None, "tcp_*"),
    ] {
        let target = Target::Functions {
            module: module.map(str::to_owned),
            pattern: pattern.to_owned(),
        };
        assert_eq!(parse(text).map(|it| it.target), Ok(target), "{text}");
    }
    check("p  tcp_*%return", expect!["r tcp_*"]);
    check("r ext4:*", expect!["r ext4:*"]);
}

#[test]
fn mistakes_in_patterns_are_pointed_at() {
    check(
        "p vfs_*+4",
        expect![[r#"
            p vfs_*+4
                   ^
            an offset belongs to one function: a pattern has none"#]],
    );
    check(
        "p ext4:ext4_*-1",
        expect![[r#"
            p ext4:ext4_*-1
                         ^
            an offset belongs to one function: a pattern has none"#]],
    );
    check(
        "p vfs_[ab",
        expect![[r#"
            p vfs_[ab
                  ^
            missing `]` after `[`"#]],
    );
    check(
        "p vfs_[]",
        expect![[r#"
            p vfs_[]
                  ^
            missing `]` after `[`"#]],
    );
    check(
        "p vfs_*{a,b}",
        expect![[r#"
            p vfs_*{a,b}
                   ^
            `{` cannot be part of a pattern"#]],
    );
    check(
        "p vfs_[a/]*",
        expect![[r#"
            p vfs_[a/]*
                    ^
            `/` cannot be part of a set of characters"#]],
    );
    check(
        "p vfs_[z-a]*",
        expect![[r#"
            p vfs_[z-a]*
              ^
            bad pattern: invalid range; 'z' > 'a'"#]],
    );
    check(
        "p ext*:vfs_read",
        expect![[r#"
            p ext*:vfs_read
                 ^
            `*` cannot be part of a module's name"#]],
    );
    check(
        "p:mine vfs_*",
        expect![[r#"
            p:mine vfs_*
             ^
            a name belongs to one probe: leave it out, the probes of a pattern have names of their own"#]],
    );
    check(
        "vfs_*",
        expect![[r#"
            vfs_*
            ^
            a definition starts with `p` or `r`: write `p vfs_*`"#]],
    );
    check(
        "p vfs_* 0x1000",
        expect![[r#"
            p vfs_* 0x1000
                    ^
            Invalid fetch argument; both a symbol and an address given: give one of them"#]],
    );
    let long = parse(&format!("p {}*", "a".repeat(511))).unwrap_err();
    assert_eq!(long.column, 2 + 511);
    assert_eq!(long.message, "pattern longer than 511 characters");
}
