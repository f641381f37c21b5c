//! Printed scripts parse to the scripts that were printed.

use proptest::prelude::*;

use super::*;

fn value() -> impl Strategy<Value = String> {
    let number = prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<u64>().prop_map(|number| format!("{number:#x}")),
    ];
    let fetched = prop_oneof![
        Just("retval".to_owned()),
        Just("curtask".to_owned()),
        (0..6_u8).prop_map(|number| format!("arg{number}")),
        "args\\.[a-z_][a-z0-9_]{0,5}((->|\\.)[a-z_][a-z0-9]{0,3}){0,2}",
    ];
    let text = r#""([ -!#-$&-\[\]-~]|\\[ntr"\\]|ü){0,6}""#;
    prop_oneof![
        number,
        text,
        fetched.clone(),
        fetched.clone().prop_map(|of| format!("str({of})")),
        fetched.prop_map(|of| format!("ksym( {of} )")),
        "(pid|tid|comm|cpu|nsecs|elapsed|func|probe|kstack|duration)",
        "nsecs *- *@s?\\[tid\\]",
        "(NULL|true|-EAGAIN|A_[A-C]|\\(A_[A-C]( ?\\| ?(B|0x4|8)){0,2}\\))",
        "(arg2|nsecs|retval|duration|args\\.n|\\(nsecs - @s?\\[tid\\]\\)) ?/ ?(0x)?[0-9]{1,4}",
    ]
}

fn condition() -> impl Strategy<Value = String> {
    let test = (value(), "(==|!=|<|<=|>|>=|&)", value());
    let leaf = prop_oneof![
        3 => test.prop_map(|(left, sign, right)| format!("{left} {sign} {right}")),
        1 => value(),
        1 => Just("@s[tid]".to_owned()),
    ];
    leaf.prop_recursive(4, 8, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|inner| format!("({inner})")),
            inner.clone().prop_map(|inner| format!("!({inner})")),
            inner.clone().prop_map(|inner| format!("!{inner}")),
            (inner.clone(), "(&&| \\|\\| )", inner)
                .prop_map(|(left, sign, right)| format!("{left}{sign}{right}")),
        ]
    })
}

fn statement() -> impl Strategy<Value = String> {
    let keys = proptest::collection::vec(value(), 0..3);
    let keys = keys.prop_map(|keys| match keys.is_empty() {
        true => String::new(),
        false => format!("[{}]", keys.join(",")),
    });
    let gathered = prop_oneof![
        Just("count()".to_owned()),
        ("(sum|avg|min|max|hist)", value()).prop_map(|(word, of)| format!("{word}({of})")),
        value().prop_map(|of| format!("lhist({of}, 0, 100, 10)")),
    ];
    prop_oneof![
        4 => ("[a-z]{0,2}", keys, gathered)
            .prop_map(|(name, keys, gathered)| format!("@{name}{keys}={gathered}")),
        2 => ("(%%|%-?0?#?[0-9]{0,2}l?[duxXpoi]|[ -!#-$&-\\[\\]-~]|\\\\n){0,3}", value())
            .prop_map(|(format, value)| format!("printf(\"{format}\", {value})")),
        1 => "(print\\(@[a-z]?(, [1-9])?\\)|clear\\(@a\\)|delete\\(@\\)|time\\(\\)|exit\\(\\))",
        1 => "(@s\\[tid\\] = nsecs|delete\\(@s\\[tid\\]\\)|delete\\(@s, tid\\))",
    ]
}

fn script() -> impl Strategy<Value = String> {
    let point =
        "(BEGIN|END|interval:s:[1-9]|kprobe:[a-z_]{1,4}\\*?|kr:[a-z]{1,3}|k:[a-z]:[a-z]\\+4)";
    let points = proptest::collection::vec(point, 1..3);
    let statements = proptest::collection::vec(statement(), 0..3);
    let clause = (points, proptest::option::of(condition()), statements).prop_map(
        |(points, condition, statements)| {
            let condition = condition.map_or_else(String::new, |it| format!(" /{it}/"));
            format!(
                "{}{condition} {{{}}}",
                points.join(" , "),
                statements.join(" ;\n")
            )
        },
    );
    proptest::collection::vec(clause, 1..3).prop_map(|clauses| clauses.join("\n"))
}

/// Returns whether `text` can be parsed; if so, checks that its printed form parses to the same script.
fn reads(text: &str) -> bool {
    match read_script(text) {
        Ok(script) => {
            let printed = script.to_string();
            let again = read_script(&printed);
            assert_eq!(again.as_ref(), Ok(&script), "{text}\n{printed}");
            // Either both compile or neither does.
            let (one, other) = (compile(text, &script), compile(&printed, &script));
            assert_eq!(one.is_ok(), other.is_ok(), "{text}\n{printed}");
            true
        }
        Err(error) => {
            assert!(
                error.source.column <= error.text.chars().count(),
                "{error:?}"
            );
            false
        }
    }
}

proptest! {
    #[test]
    fn scripts_that_are_read_are_printed_so(text in script()) {
        reads(&text);
    }

    #[test]
    fn any_text_is_read_or_refused_within_itself(text in "[ -~\n\tü]{0,60}") {
        reads(&text);
        reads(&format!("kprobe:a {{ {text} }}"));
        reads(&format!("kprobe:a /{text}/ {{ }}"));
    }
}

#[test]
fn a_script_with_everything_is_printed_and_read() {
    let text = r#"BEGIN, i:ms:5 { time("%H\n"); print(@a, 3); clear(@a); }
        k:m:f*, kr:g /!arg0 && (args.b->c & 4 || comm != "x\"")/ {
            @[pid, str(arg1), -3] = lhist(retval, 100, 200, 50);
            printf("%-08.3s%%%#lx %c\n\t\\", comm, args.a, 65); exit()
        }"#;
    assert!(reads(text));
}
