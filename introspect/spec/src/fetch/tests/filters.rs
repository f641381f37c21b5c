//! Filters, valid and invalid.

use expect_test::expect;

use super::*;

fn test(field: &str, operator: Operator, value: Value) -> Filter {
    Filter::Test(Test {
        column: crate::Column::default(),
        field: field.to_owned(),
        form: Form::Plain,
        operator,
        value_column: crate::Column::default(),
        value,
    })
}

fn number(field: &str, operator: Operator, value: u64, text: &str) -> Filter {
    let text = text.to_owned();
    test(field, operator, Value::Number { value, text })
}

#[test]
fn comparisons_are_read() {
    let text = |text: &str| Value::Text(text.to_owned());
    let name = |text: &str| Value::Name(text.to_owned());
    for (filter, wanted) in [
        ("a==1", number("a", Operator::Equal, 1, "1")),
        ("a != 0x10", number("a", Operator::NotEqual, 16, "0x10")),
        ("a<010", number("a", Operator::Less, 8, "010")),
        ("a<=-1", number("a", Operator::LessOrEqual, u64::MAX, "-1")),
        ("a > 3", number("a", Operator::Greater, 3, "3")),
        ("a>=3", number("a", Operator::GreaterOrEqual, 3, "3")),
        ("\ta & 6\t", number("a", Operator::AnyBit, 6, "6")),
        (
            "comm ~ \"a*[!b]\"",
            test("comm", Operator::Glob, text("a*[!b]")),
        ),
        (
            "comm == 'a \"b\"'",
            test("comm", Operator::Equal, text("a \"b\"")),
        ),
        ("comm!=\"\"", test("comm", Operator::NotEqual, text(""))),
        ("a==-EAGAIN", test("a", Operator::Equal, name("-EAGAIN"))),
        ("a & O_RDWR ", test("a", Operator::AnyBit, name("O_RDWR"))),
        (
            "a == O_RDWR|O_CREAT|0x40",
            test("a", Operator::Equal, name("O_RDWR|O_CREAT|0x40")),
        ),
    ] {
        assert_eq!(read_filter(filter), Ok(wanted), "{filter}");
    }
}

#[test]
fn and_binds_closer_than_or_and_not_closer_than_both() {
    let [a, b, c] = ["a", "b", "c"].map(|field| Box::new(number(field, Operator::Equal, 1, "1")));
    for (text, wanted) in [
        (
            "a==1||b==1&&c==1",
            Filter::Or(a.clone(), Box::new(Filter::And(b.clone(), c.clone()))),
        ),
        (
            "( a == 1 || b == 1 ) && c == 1",
            Filter::And(Box::new(Filter::Or(a.clone(), b.clone())), c.clone()),
        ),
        (
            "!a==1 && b==1",
            Filter::And(Box::new(Filter::Not(a.clone())), b.clone()),
        ),
        (
            "!(a==1 && !!b==1)",
            Filter::Not(Box::new(Filter::And(
                a.clone(),
                Box::new(Filter::Not(Box::new(Filter::Not(b.clone())))),
            ))),
        ),
        (
            "a==1&&(b==1&&c==1)",
            Filter::And(a.clone(), Box::new(Filter::And(b.clone(), c.clone()))),
        ),
    ] {
        assert_eq!(read_filter(text), Ok(wanted), "{text}");
    }
}

#[test]
fn columns_of_fields_and_values_are_those_of_the_definition() {
    let Some(Filter::And(_, right)) = read("p f %di if  a == 1 && b ~ 'x'").filter else {
        panic!("no filter");
    };
    let Filter::Test(test) = *right else {
        panic!("{right:?}");
    };
    assert_eq!((test.column.0, test.value_column.0), (22, 26));
}

#[test]
fn values_are_printed_as_they_were_written() {
    for filter in [
        "dfd == -100",
        "flags & 0x10 || a < 010",
        "ret == -EAGAIN",
        "flags == O_RDWR|O_CREAT || a == 1",
        "ip.function == vfs_read",
        "ip.function != foo.isra.0 && a == 1",
        "a.function == 0x10",
        "name.ustring ~ \"/etc/*\"",
        "CPU & CPUS{0,2-4}",
        "cpu == CPUS{3} || a == 1",
    ] {
        assert_eq!(read_filter(filter).unwrap().to_string(), filter);
    }
}

#[test]
fn mistakes_in_filters_are_pointed_at() {
    check(
        "p f if",
        expect![[r#"
            p f if
                  ^
            No filter found"#]],
    );
    check(
        "p f if count >",
        expect![[r#"
            p f if count >
                          ^
            Invalid value (did you forget quotes)?"#]],
    );
    check(
        "p f if comm ~ bash",
        expect![[r#"
            p f if comm ~ bash
                        ^
            Illegal operation for field type; `~` compares a text with a pattern, in quotes"#]],
    );
    check(
        "p f if a == O_RDWR|",
        expect![[r#"
            p f if a == O_RDWR|
                               ^
            Invalid value (did you forget quotes)?"#]],
    );
    check(
        "p f if a == O_RDWR|+1",
        expect![[r#"
            p f if a == O_RDWR|+1
                               ^
            Invalid value (did you forget quotes)?"#]],
    );
    check(
        "p f if comm == 'bash",
        expect![[r#"
            p f if comm == 'bash
                                ^
            Missing matching quote"#]],
    );
    check(
        "p f if comm < 'bash'",
        expect![[r#"
            p f if comm < 'bash'
                        ^
            Illegal operation for field type; texts are compared with == != and ~"#]],
    );
    check(
        "p f if a ~ 5",
        expect![[r#"
            p f if a ~ 5
                     ^
            Illegal operation for field type; `~` compares a text with a pattern, in quotes"#]],
    );
    check(
        "p f if a = 5",
        expect![[r#"
            p f if a = 5
                     ^
            Invalid operator; write == != < <= > >= & or ~"#]],
    );
    check(
        "p f if a == 5x",
        expect![[r#"
            p f if a == 5x
                        ^
            Illegal integer value"#]],
    );
    check(
        "p f if == 5",
        expect![[r#"
            p f if == 5
                   ^
            Field not found; the name of an argument, or pid, tgid, comm or cpu, belongs here"#]],
    );
    check(
        "p f if a == 5 &&",
        expect![[r#"
            p f if a == 5 &&
                            ^
            Field not found; the name of an argument, or pid, tgid, comm or cpu, belongs here"#]],
    );
    check(
        "p f if (a == 5",
        expect![[r#"
            p f if (a == 5
                          ^
            Too many '('"#]],
    );
    check(
        "p f if a == 5)",
        expect![[r#"
            p f if a == 5)
                         ^
            Too few '('"#]],
    );
    check(
        "p f if a == 5 b == 6",
        expect![[r#"
            p f if a == 5 b == 6
                          ^
            Too many terms in predicate expression; `&&` or `||` belongs here"#]],
    );
    check(
        "p f if comm ~ 'a[b'",
        expect![[r#"
            p f if comm ~ 'a[b'
                            ^
            Invalid value (did you forget quotes)?; missing `]` after `[`"#]],
    );
    check(
        "p f %di if a == 1 if b == 1",
        expect![[r#"
            p f %di if a == 1 if b == 1
                              ^
            Too many terms in predicate expression; `&&` or `||` belongs here"#]],
    );
    check(
        "p f if a.string == 'x'",
        expect![[r#"
            p f if a.string == 'x'
                    ^
            Field not found; there are .function and .ustring"#]],
    );
    for (filter, at) in [
        ("cpu & CPUS{}", 11),
        ("cpu & CPUS{1,}", 13),
        ("cpu & CPUS{3-1}", 6),
        ("cpu & CPUS{1", 12),
        ("cpu & CPUS{x}", 11),
        ("cpu < CPUS{1}", 4),
    ] {
        assert_eq!(read_filter(filter).unwrap_err().column, at, "{filter}");
    }
    let column = |text: &str| read_filter(text).map_err(|error| error.column);
    assert_eq!(column(&format!("c == '{}'", "a".repeat(256))), Err(5));
    assert!(column(&format!("c == '{}'", "a".repeat(255))).is_ok());
    assert_eq!(column(&format!("{}a == 1", "!".repeat(33))), Err(32));
    assert_eq!(column(&format!("{}a == 1", "(".repeat(100_000))), Err(32));
    assert!(column(&vec!["a==1"; 64].join("||")).is_ok());
    assert_eq!(column(&vec!["a==1"; 100_000].join("||")), Err(64 * 6));
    assert_eq!(column("a == é"), Err(5));
}
