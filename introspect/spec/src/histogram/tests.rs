use std::num::NonZeroU64;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::print::{HITCOUNT, KEY_FORMS, VALUE_FORMS};
use super::*;
use crate::column::Column;

/// Checks the printed form of the histogram, or the error with its caret.
fn check(text: &str, expect: Expect) {
    let found = match read_histogram(text) {
        Ok(histogram) => histogram.to_string(),
        Err(error) => format!("{}\n{error}", error.render(text)),
    };
    expect.assert_eq(&found);
}

#[test]
fn triggers_of_the_kernel_are_read_and_printed_as_it_does() {
    check(
        "hist:keys=call_site.sym,pid.execname:vals=bytes_req,hitcount,n.hex:sort=hitcount.descending,pid:size=256",
        expect![
            "hist:keys=call_site.sym,pid.execname:vals=hitcount,bytes_req,n.hex:sort=hitcount.descending,pid:size=256"
        ],
    );
    check(
        "keys=len.log2",
        expect!["hist:keys=len.log2:vals=hitcount:sort=hitcount:size=2048"],
    );
    check(
        "keys=len.bits",
        expect!["hist:keys=len.bits:vals=hitcount:sort=hitcount:size=2048"],
    );
    check(
        " key=a.buckets=0x10,b.sym-offset,c.usecs,d.hex:val=e.avg,f.min,g.max:sort=f.ascending if (a > 1 || b == 2)\t",
        expect![
            "hist:keys=a.buckets=16,b.sym-offset,c.usecs,d.hex:vals=hitcount,e.avg,f.min,g.max:sort=f:size=2048 if a > 1 || b == 2"
        ],
    );
}

#[test]
fn fields_are_divided_before_anything_else_is_made_of_them() {
    check(
        "keys=duration/1000.bits,len/0x10:vals=len/1024.avg:sort=duration",
        expect![
            "hist:keys=duration/1000.bits,len/16:vals=hitcount,len/1024.avg:sort=duration:size=2048"
        ],
    );
}

#[test]
fn mistakes_are_refused_where_they_stand() {
    for (text, expected) in [
        (
            "keys=a/",
            expect![[r#"
            keys=a/
                   ^
            missing number to divide by"#]],
        ),
        (
            "keys=a/0",
            expect![[r#"
            keys=a/0
                   ^
            nothing can be divided by 0"#]],
        ),
        (
            "keys=a:vals=hitcount/2",
            expect![[r#"
            keys=a:vals=hitcount/2
                        ^
            hitcount is not divided"#]],
        ),
        (
            "",
            expect![[r#"

            ^
            keys=, vals=, sort= or size= belongs here"#]],
        ),
        (
            "vals=a",
            expect![[r#"
            vals=a
                  ^
            no keys: write keys=FIELD"#]],
        ),
        (
            "keys=",
            expect![[r#"
            keys=
                 ^
            the name of a field belongs here"#]],
        ),
        (
            "keys=a,",
            expect![[r#"
            keys=a,
                   ^
            the name of a field belongs here"#]],
        ),
        (
            "keys=a.log",
            expect![[r#"
            keys=a.log
                   ^
            write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs"#]],
        ),
        (
            "keys=a.symbol",
            expect![[r#"
            keys=a.symbol
                   ^
            write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs"#]],
        ),
        (
            "keys=a.buckets=0",
            expect![[r#"
            keys=a.buckets=0
                           ^
            a bucket has a width of at least 1"#]],
        ),
        (
            "keys=hitcount",
            expect![[r#"
            keys=hitcount
                 ^
            hitcount cannot be a key"#]],
        ),
        (
            "keys=a:vals=b.log2",
            expect![[r#"
            keys=a:vals=b.log2
                          ^
            write hex, avg, min or max"#]],
        ),
        (
            "keys=a:sort=b",
            expect![[r#"
            keys=a:sort=b
                        ^
            `b` is neither hitcount nor one of the keys and values"#]],
        ),
        (
            "keys=a:size=131073",
            expect![[r#"
            keys=a:size=131073
                        ^
            size 131073: 1 to 131072 entries"#]],
        ),
        (
            "keys=a:keys=b",
            expect![[r#"
            keys=a:keys=b
                   ^
            `keys` is given twice"#]],
        ),
        (
            "keys=a:pause",
            expect![[r#"
            keys=a:pause
                   ^
            pausing and clearing are asked for while it counts"#]],
        ),
        (
            "keys=a:nohitcount",
            expect![[r#"
            keys=a:nohitcount
                   ^
            `nohitcount` is not known here: each entry shows its hits; leave it out"#]],
        ),
        (
            "keys=a:onmax(b).save(c)",
            expect![[r#"
            keys=a:onmax(b).save(c)
                   ^
            `onmax` is not known here: a histogram counts, and does nothing else"#]],
        ),
        (
            "keys=id.syscall",
            expect![[r#"
            keys=id.syscall
                    ^
            `syscall` is not known here; write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs"#]],
        ),
        (
            "keys=a:vals=hitcount,b.percent",
            expect![[r#"
            keys=a:vals=hitcount,b.percent
                                   ^
            `percent` is not known here; write hex, avg, min or max"#]],
        ),
        (
            "keys=a:vals=hitcount.graph",
            expect![[r#"
            keys=a:vals=hitcount.graph
                                 ^
            `graph` is not known here; how often an entry was hit is shown as it is"#]],
        ),
        (
            "keys=len-1",
            expect![[r#"
            keys=len-1
                    ^
            `-` is not known here: of a field there is FIELD/N only"#]],
        ),
        (
            "keys=$a:a=b",
            expect![[r#"
            keys=$a:a=b
                 ^
            `$` is not known here: there are no variables"#]],
        ),
        (
            "keys=a:vals=b*2",
            expect![[r#"
            keys=a:vals=b*2
                         ^
            `*` is not known here: of a field there is FIELD/N only"#]],
        ),
        (
            "keys=a:name=x",
            expect![[r#"
                keys=a:name=x
                       ^
                `name=` is not known here: histograms are not shared; leave it out"#]],
        ),
        (
            "keys=a when b",
            expect![[r#"
            keys=a when b
                   ^
            only `if FILTER` can follow a histogram's clauses"#]],
        ),
        (
            "keys=a if b ==",
            expect![[r#"
            keys=a if b ==
                          ^
            Invalid value (did you forget quotes)?"#]],
        ),
        (
            "keys=a\n",
            expect![[r#"
            keys=a?
                  ^
            '\n': a histogram is one line of ASCII"#]],
        ),
    ] {
        check(text, expected);
    }
    let many = format!("keys={}", ["a"; KEYS_MAX + 1].join(","));
    let error = read_histogram(&many).unwrap_err();
    assert_eq!(error.column, "keys=".len() + 2 * KEYS_MAX);
    let values = |number| format!("keys=a:vals=hitcount{}", ",b".repeat(number));
    assert!(read_histogram(&values(VALUES_MAX)).is_ok());
    let error = read_histogram(&values(VALUES_MAX + 1)).unwrap_err();
    assert_eq!(error.message, "too many values: at most 8");
}

fn name() -> impl Strategy<Value = String> {
    "[a-z_][a-z0-9_]{0,5}".prop_filter("not a field", |name| name != HITCOUNT)
}

fn per() -> impl Strategy<Value = Option<NonZeroU64>> {
    proptest::option::of((1..=u64::MAX).prop_map(|number| NonZeroU64::new(number).unwrap()))
}

fn key() -> impl Strategy<Value = Key> {
    let form = prop_oneof![
        Just(KeyForm::Plain),
        proptest::sample::select(KEY_FORMS.map(|(form, _)| form).to_vec()),
        (1..=u64::MAX).prop_map(KeyForm::Buckets),
    ];
    (name(), per(), form).prop_map(|(field, per, form)| Key {
        column: Column::default(),
        field,
        per,
        form,
    })
}

fn value() -> impl Strategy<Value = super::Value> {
    let form = prop_oneof![
        Just(ValueForm::Sum),
        proptest::sample::select(VALUE_FORMS.map(|(form, _)| form).to_vec()),
    ];
    (name(), per(), form).prop_map(|(field, per, form)| super::Value {
        column: Column::default(),
        field,
        per,
        form,
    })
}

proptest! {
    #[test]
    fn what_is_printed_reads_as_what_was_printed(
        keys in proptest::collection::vec(key(), 1..=KEYS_MAX),
        values in proptest::collection::vec(value(), 0..=VALUES_MAX),
        size in 1..131_072_usize,
        descending: bool,
        filtered: bool,
    ) {
        // A field that is both a key and a value means the value.
        let by = match values.iter().position(|value| value.field == keys[0].field) {
            Some(value) => By::Value(value),
            None => By::Key(0),
        };
        let histogram = Histogram {
            keys,
            values,
            sort: vec![Order { by: By::Hits, descending }, Order { by, descending: !descending }],
            size,
            filter: filtered.then(|| crate::fetch::read_filter("pid == 1").unwrap()),
        };
        prop_assert_eq!(read_histogram(&histogram.to_string()), Ok(histogram));
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,80}") {
        let _ = read_histogram(&text);
        let _ = read_histogram(&format!("keys={text}"));
    }
}
