use expect_test::{Expect, expect};

use super::*;
use crate::definition::{Definition, parse};

mod filters;
mod mistakes;
mod round_trip;

/// Checks the printed form of the definition, or the error with its caret.
fn check(text: &str, expect: Expect) {
    let found = match parse(text) {
        Ok(definition) => definition.to_string(),
        Err(error) => format!("{}\n{error}", error.render(text)),
    };
    expect.assert_eq(&found);
}

/// Checks that `argument`, of a probe at the entry of `f`, is refused with `message`, at `column` in the argument.
#[track_caller]
fn refused(argument: &str, column: usize, message: &str) {
    refused_of("p f ", argument, column, message);
}

#[track_caller]
fn refused_of(before: &str, argument: &str, column: usize, message: &str) {
    match parse(&format!("{before}{argument}")) {
        Ok(definition) => panic!("{definition} is read"),
        Err(error) => assert_eq!(
            (error.column - before.len(), error.message.as_str()),
            (column, message),
            "{argument}"
        ),
    }
}

fn read(text: &str) -> Definition {
    parse(text).unwrap_or_else(|error| panic!("{}\n{error}", error.render(text)))
}

fn arguments(text: &str) -> Vec<FetchArg> {
    read(text).arguments
}

/// Parses an argument of a return probe.
fn one(argument: &str) -> FetchArg {
    let mut found = arguments(&format!("r f {argument}"));
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn kind(argument: &str) -> ExprKind {
    one(argument).expr.kind
}

fn register(name: &str) -> ExprKind {
    kind(&format!("%{name}"))
}

fn access(column: usize, arrow: bool, field: &str) -> Access {
    Access {
        column: crate::Column(column),
        arrow,
        field: field.to_owned(),
    }
}

#[test]
fn every_kind_of_expression_is_read() {
    use hvprobe_arch::regs::Gpr;
    for (argument, wanted) in [
        ("%di", ExprKind::Register(Register::General(Gpr::Rdi))),
        ("%r15", ExprKind::Register(Register::General(Gpr::R15))),
        ("%sp", ExprKind::Register(Register::General(Gpr::Rsp))),
        ("%ip", ExprKind::Register(Register::Ip)),
        ("%flags", ExprKind::Register(Register::Flags)),
        ("%orig_ax", ExprKind::Register(Register::OrigAx)),
        (
            "@0xffffffff82000000",
            ExprKind::Memory(0xffff_ffff_8200_0000),
        ),
        ("@010", ExprKind::Memory(8)),
        (
            "@a.b",
            ExprKind::Symbol {
                name: "a.b".to_owned(),
                offset: 0,
            },
        ),
        (
            "@a+0x10",
            ExprKind::Symbol {
                name: "a".to_owned(),
                offset: 16,
            },
        ),
        (
            "@a-8",
            ExprKind::Symbol {
                name: "a".to_owned(),
                offset: -8,
            },
        ),
        ("$stack", ExprKind::Stack),
        ("$stack2048", ExprKind::StackWord(2048)),
        ("$arg1", ExprKind::Argument(1)),
        ("$arg2048", ExprKind::Argument(2048)),
        ("$arg*", ExprKind::Arguments),
        ("$retval", ExprKind::Return { path: vec![] }),
        ("$comm", ExprKind::Comm),
        ("$COMM", ExprKind::Comm),
        ("$current", ExprKind::Current { path: vec![] }),
        ("\\5", ExprKind::Immediate(5)),
        ("\\+5", ExprKind::Immediate(5)),
        ("\\-1", ExprKind::Immediate(u64::MAX)),
        ("\\0xffffffffffffffff", ExprKind::Immediate(u64::MAX)),
        ("\\\"a\"b\"", ExprKind::Text("a\"b".to_owned())),
        ("\\\"\"", ExprKind::Text(String::new())),
        (
            "count",
            ExprKind::Variable {
                name: "count".to_owned(),
                path: vec![],
            },
        ),
        (
            "a->b.c->d",
            ExprKind::Variable {
                name: "a".to_owned(),
                path: vec![
                    access(7, true, "b"),
                    access(9, false, "c"),
                    access(12, true, "d"),
                ],
            },
        ),
        (
            "$retval->f",
            ExprKind::Return {
                path: vec![access(0, true, "f")],
            },
        ),
        (
            "$current->f.g",
            ExprKind::Current {
                path: vec![access(0, true, "f"), access(0, false, "g")],
            },
        ),
        (
            "-0x10(%bp)",
            ExprKind::Dereference {
                user: false,
                offset: -16,
                inner: Box::new(register("bp").into()),
            },
        ),
        (
            "+u8(%si)",
            ExprKind::Dereference {
                user: true,
                offset: 8,
                inner: Box::new(register("si").into()),
            },
        ),
        (
            "this_cpu_read(@x)",
            ExprKind::PerCpu {
                read: true,
                inner: Box::new(kind("@x").into()),
            },
        ),
        (
            "this_cpu_ptr(%di)",
            ExprKind::PerCpu {
                read: false,
                inner: Box::new(register("di").into()),
            },
        ),
        (
            "(s,m.n)%di->f",
            ExprKind::Cast {
                of: "s".to_owned(),
                member: Some("m.n".to_owned()),
                inner: Box::new(register("di").into()),
                path: vec![access(0, true, "f")],
            },
        ),
        (
            "(s)+8(%di)->f",
            ExprKind::Cast {
                of: "s".to_owned(),
                member: None,
                inner: Box::new(kind("+8(%di)").into()),
                path: vec![access(0, true, "f")],
            },
        ),
        (
            "(s)((t)a->b)->f",
            ExprKind::Cast {
                of: "s".to_owned(),
                member: None,
                inner: Box::new(kind("(t)a->b").into()),
                path: vec![access(0, true, "f")],
            },
        ),
    ] {
        assert_eq!(kind(argument), wanted, "{argument}");
    }
}

#[test]
fn columns_are_those_of_the_text() {
    let found = arguments("p f  x=+8(-u4(a->b.c)):u32[2] (s)(+0(%di))->g");
    let ExprKind::Dereference { inner: outer, .. } = &found[0].expr.kind else {
        panic!("{found:?}");
    };
    let ExprKind::Dereference { inner, .. } = &outer.kind else {
        panic!("{found:?}");
    };
    let ExprKind::Variable { path, .. } = &inner.kind else {
        panic!("{found:?}");
    };
    let columns = [
        found[0].column,
        found[0].expr.column,
        outer.column,
        inner.column,
        path[0].column,
        path[1].column,
        found[0].ty.as_ref().map(|ty| ty.column).unwrap_or_default(),
    ];
    assert_eq!(columns.map(|column| column.0), [5, 7, 10, 14, 17, 19, 23]);
    let ExprKind::Cast { inner, path, .. } = &found[1].expr.kind else {
        panic!("{found:?}");
    };
    let columns = [found[1].column.0, inner.column.0, path[0].column.0];
    assert_eq!(columns, [30, 34, 44]);
}

#[test]
fn every_type_is_read() {
    let integer = |shown, bits| Element::Integer { shown, bits };
    for (ty, element, count) in [
        ("u8", integer(Shown::Unsigned, 8), None),
        ("s16", integer(Shown::Signed, 16), None),
        ("x32[64]", integer(Shown::Hex, 32), Some(64)),
        ("u64[0x10]", integer(Shown::Unsigned, 64), Some(16)),
        ("char[010]", Element::Char, Some(8)),
        ("string", Element::String, None),
        ("ustring[2]", Element::UserString, Some(2)),
        ("symbol", Element::Symbol, None),
        ("symstr", Element::SymbolString, None),
        (
            "b4@2/8",
            Element::Bitfield {
                width: 4,
                offset: 2,
                container: 8,
            },
            None,
        ),
        (
            "b64@0/64[3]",
            Element::Bitfield {
                width: 64,
                offset: 0,
                container: 64,
            },
            Some(3),
        ),
        ("%pd", Element::DentryName, None),
        ("%pD", Element::FileName, None),
    ] {
        let found = one(&format!("+0(%di):{ty}")).ty.unwrap();
        assert_eq!((found.element, found.count), (element, count), "{ty}");
    }
}

#[test]
fn names_are_given_or_the_kernels() {
    let names = |text: &str| -> Vec<String> {
        arguments(text)
            .iter()
            .enumerate()
            .map(|(before, argument)| argument.shown_name(before))
            .collect()
    };
    assert_eq!(
        names("p f x=%di %si count count2:u8 $comm $arg5 a->b file:%pD c=count"),
        [
            "x", "arg2", "count", "count2", "arg5", "arg6", "arg7", "arg8", "c"
        ]
    );
}

#[test]
fn definitions_are_printed_as_they_were_written() {
    check(
        "p:g/e  vfs_read   f=+0x8(%di):x8[010]  $arg2  if  f==1&&comm~'a*'||!(pid>3)",
        expect![[
            r#"p:g/e vfs_read f=+0x8(%di):x8[010] $arg2 if f == 1 && comm ~ "a*" || !(pid > 3)"#
        ]],
    );
    check(
        "r vfs_* $retval $comm:string",
        expect!["r vfs_* $retval $comm:string"],
    );
    check("p 0x1000 %di", expect!["p 0x1000 %di"]);
    check(
        "p f if(pid==1)&&!(cpu==2)",
        expect!["p f if pid == 1 && !(cpu == 2)"],
    );
    check("p:x 0x1000 count", expect!["p:x 0x1000 count"]);
}
