use expect_test::{Expect, expect};
use hvprobe_proto::v1::{HistogramKey, HistogramSchema, Type, TypeKind, histogram_key_value};

use super::*;

fn key(name: &str, form: HistogramForm, kind: TypeKind, size: u32) -> HistogramKey {
    HistogramKey {
        name: name.to_owned(),
        form: form.into(),
        width: 100,
        r#type: Some(Type {
            size,
            kind: kind.into(),
            ..Type::default()
        }),
    }
}

fn number(number: u64) -> HistogramKeyValue {
    HistogramKeyValue {
        what: Some(histogram_key_value::What::Number(number)),
    }
}

fn word(text: &[u8]) -> HistogramKeyValue {
    HistogramKeyValue {
        what: Some(histogram_key_value::What::Text(text.to_vec())),
    }
}

fn entry(keys: Vec<HistogramKeyValue>, hits: u64, sum: i64) -> HistogramEntry {
    HistogramEntry {
        keys,
        hits,
        values: vec![HistogramSum {
            count: hits.min(2),
            sum: sum.cast_unsigned(),
            least: 1,
            greatest: 9,
            average: 4,
            sum_high: Some(sum >> 63),
        }],
        comm: b"c\x1bt".to_vec(),
    }
}

fn field(form: HistogramForm, signed: bool) -> HistogramField {
    HistogramField {
        name: "bytes".to_owned(),
        form: form.into(),
        signed,
    }
}

fn names() -> Names {
    let mut names = Names::default();
    names.insert(0x1010, Some(("vfs_read", 0x1000)));
    names
}

fn check(
    look: Look,
    keys: Vec<HistogramKey>,
    values: HistogramField,
    entries: &[HistogramEntry],
    expected: Expect,
) {
    let schema = HistogramSchema {
        histogram: "hist:keys=...".to_owned(),
        keys,
        values: vec![values],
    };
    let schema = Schema::from(schema);
    let totals = HistogramTotals {
        hits: 5,
        entries: entries.len() as u64,
        dropped: 0,
        lost: 7,
        incomplete: false,
    };
    expected.assert_eq(&text(look, None, &schema, entries, &totals, &names()).unwrap());
}

#[test]
fn entries_look_as_those_of_the_kernel() {
    check(
        Look::Entries,
        vec![
            key("pid", HistogramForm::Execname, TypeKind::Signed, 4),
            key("ip", HistogramForm::Symbol, TypeKind::Pointer, 8),
            key("len", HistogramForm::Unspecified, TypeKind::Signed, 4),
        ],
        field(HistogramForm::Unspecified, true),
        &[
            entry(vec![number(12), number(0x1010), number(0xffff_fffe)], 3, -5),
            entry(
                vec![number(7), HistogramKeyValue::default(), word(b"a\x1b")],
                2,
                4096,
            ),
        ],
        expect![[r#"
            # event histogram
            #
            # trigger info: hist:keys=...
            #

            { pid: c\033t          [        12], ip: [1010] vfs_read                                     , len:         -2 } hitcount:          3  bytes:         -5 (unread: 1)
            { pid: c\033t          [         7], ip:    (fault), len: a\033                                              } hitcount:          2  bytes:       4096

            Totals:
                Hits: 5
                Entries: 2
                Dropped: 0
                Lost by the machine, of any probe: 7
        "#]],
    );
    check(
        Look::Entries,
        vec![
            key("a", HistogramForm::Hex, TypeKind::Unsigned, 8),
            key("b", HistogramForm::Log2, TypeKind::Unsigned, 8),
            key("c", HistogramForm::Buckets, TypeKind::Unsigned, 8),
            key("d", HistogramForm::Usecs, TypeKind::Unsigned, 8),
        ],
        field(HistogramForm::Hex, false),
        &[entry(
            vec![number(255), number(5), number(200), number(9)],
            1,
            255,
        )],
        expect![[r#"
            # event histogram
            #
            # trigger info: hist:keys=...
            #

            { a: ff, b: ~ 2^5 , c: ~ 200-299, d:          9 } hitcount:          1  bytes:         ff

            Totals:
                Hits: 5
                Entries: 1
                Dropped: 0
                Lost by the machine, of any probe: 7
        "#]],
    );
}

#[test]
fn bars_stand_together_by_the_keys_before_the_last_one() {
    let of = |comm: &[u8], power, hits| entry(vec![word(comm), number(power)], hits, 0);
    check(
        Look::Bars,
        vec![
            key("comm", HistogramForm::Unspecified, TypeKind::String, 16),
            key("len", HistogramForm::Log2, TypeKind::Unsigned, 8),
        ],
        field(HistogramForm::Unspecified, false),
        &[
            of(b"cat", 64, 1),
            of(b"dd", 0, 3),
            of(b"cat", 3, 4),
            of(b"cat", 1, 2),
        ],
        expect![[r#"
            # hist:keys=...

            comm: cat
            [2, 2]                                               2 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
            [5, 8]                                               4 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [9223372036854775809, 18446744073709551615]          1 |@@@@@@@@@@@@@                                       |
            comm: dd
            [0, 1]          3 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

            Totals:
                Hits: 5
                Entries: 4
                Dropped: 0
                Lost by the machine, of any probe: 7
        "#]],
    );
}

#[test]
fn ranges_of_bits_begin_at_powers_of_two() {
    let of = |bits, hits| entry(vec![number(bits)], hits, 0);
    check(
        Look::Bars,
        vec![key("n", HistogramForm::Bits, TypeKind::Signed, 8)],
        field(HistogramForm::Unspecified, false),
        &[of(11, 4), of(u64::MAX, 1), of(0, 2), of(64, 1), of(1, 2)],
        expect![[r#"
            # hist:keys=...

            < 0                                                  1 |@@@@@@@@@@@@@                                       |
            [0, 0]                                               2 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
            [1, 1]                                               2 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
            [1024, 2047]                                         4 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [9223372036854775808, 18446744073709551615]          1 |@@@@@@@@@@@@@                                       |

            Totals:
                Hits: 5
                Entries: 5
                Dropped: 0
                Lost by the machine, of any probe: 7
        "#]],
    );
}

#[test]
fn json_has_an_object_for_each_entry_and_one_for_all() {
    check(
        Look::Json,
        vec![
            key("ip", HistogramForm::SymbolOffset, TypeKind::Pointer, 8),
            key("path", HistogramForm::Unspecified, TypeKind::String, 16),
            key("len", HistogramForm::Log2, TypeKind::Unsigned, 8),
        ],
        field(HistogramForm::Average, true),
        &[entry(
            vec![number(0x1010), word(b"/etc"), HistogramKeyValue::default()],
            3,
            5,
        )],
        expect![[r#"
            {"type":"entry","event":null,"histogram":"hist:keys=...","keys":{"ip":"vfs_read+0x10","path":"/etc","len":null},"comm":"c?t","hits":3,"values":{"bytes.avg":4}}
            {"type":"totals","event":null,"histogram":"hist:keys=...","hits":5,"entries":1,"dropped":0,"lost":7}
        "#]],
    );
}

/// Checks a histogram by task and stack.
fn by_stack(look: Look, expected: Expect) {
    let stack = HistogramKeyValue {
        what: Some(histogram_key_value::What::StackTrace(
            hvprobe_proto::v1::StackTrace {
                addresses: vec![0x1010, 0x2000],
            },
        )),
    };
    check(
        look,
        vec![
            key("comm", HistogramForm::Unspecified, TypeKind::String, 16),
            HistogramKey {
                name: "stacktrace".to_owned(),
                form: HistogramForm::Stacktrace.into(),
                ..Default::default()
            },
        ],
        field(HistogramForm::Unspecified, true),
        &[entry(vec![word(b"a b"), stack], 3, 5)],
        expected,
    );
}

#[test]
fn stacks_are_keys_with_an_address_a_line() {
    by_stack(
        Look::Entries,
        expect![[r#"
        # event histogram
        #
        # trigger info: hist:keys=...
        #

        { comm: a b                                               , stacktrace: 
                 vfs_read+0x10
                 0x2000
         } hitcount:          3  bytes:          5 (unread: 1)

        Totals:
            Hits: 5
            Entries: 1
            Dropped: 0
            Lost by the machine, of any probe: 7
    "#]],
    );
    by_stack(
        Look::Bars,
        expect![[r#"
        # hist:keys=...

        @[a b, 
            vfs_read+0x10
            0x2000
        ]: 3

        Totals:
            Hits: 5
            Entries: 1
            Dropped: 0
            Lost by the machine, of any probe: 7
    "#]],
    );
    by_stack(
        Look::Json,
        expect![[r#"
        {"type":"entry","event":null,"histogram":"hist:keys=...","keys":{"comm":"a b","stacktrace":[{"addr":"0x1010","symbol":"vfs_read","offset":16},{"addr":"0x2000","symbol":null,"offset":null}]},"comm":"c?t","hits":3,"values":{"bytes":5}}
        {"type":"totals","event":null,"histogram":"hist:keys=...","hits":5,"entries":1,"dropped":0,"lost":7}
    "#]],
    );
}

#[test]
fn folded_stacks_are_a_line_each_and_nothing_else() {
    by_stack(Look::Folded, expect!["a_b;0x2000;vfs_read 3\n"]);
}
