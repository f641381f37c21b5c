//! Valid and invalid texts, and the columns of errors.

use std::time::Duration;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::{Gpr, RegisterSet};

use super::*;
use crate::parse_error::ParseError;
use crate::{Actions, Change, Comparison, Condition, Decision, Hold, Item, Then};

fn check<T: std::fmt::Debug>(
    read: impl Fn(&str) -> Result<T, ParseError>,
    text: &str,
    expected: Expect,
) {
    let error = read(text).expect_err(text);
    expected.assert_eq(&format!("{}\n{error}", error.render(text)));
}

fn memory(base: Gpr, offset: i64, len: u16) -> Capture {
    Capture::Item(Item::Memory { base, offset, len })
}

#[test]
fn captures_are_registers_memory_and_stack_words() {
    assert_eq!(capture("%di"), Ok(Capture::Register(Gpr::Rdi)));
    assert_eq!(capture(" %rdi "), Ok(Capture::Register(Gpr::Rdi)));
    assert_eq!(capture("%r8"), Ok(Capture::Register(Gpr::R8)));
    assert_eq!(capture("+0(%sp)"), Ok(memory(Gpr::Rsp, 0, 8)));
    assert_eq!(capture("-0x10(%bp):248"), Ok(memory(Gpr::Rbp, -16, 248)));
    assert_eq!(
        capture("-0x8000000000000000(%ax):1"),
        Ok(memory(Gpr::Rax, i64::MIN, 1))
    );
    assert_eq!(capture("$stack3"), Ok(Capture::Item(Item::Stack(3))));
}

#[test]
fn bad_captures_are_shown_where_they_are_bad() {
    check(
        capture,
        "",
        expect![[r#"

        ^
        capture a register (%di), memory (+16(%di):32) or the stack ($stack0)"#]],
    );
    check(
        capture,
        "di",
        expect![[r#"
        di
        ^
        capture a register (%di), memory (+16(%di):32) or the stack ($stack0)"#]],
    );
    check(
        capture,
        "%edi",
        expect![[r#"
        %edi
        ^
        no general register is called %edi: %ax %bx %cx %dx %si %di %bp %sp %r8 … %r15 are"#]],
    );
    check(
        capture,
        "%8",
        expect![[r#"
        %8
        ^
        no general register is called %8: %ax %bx %cx %dx %si %di %bp %sp %r8 … %r15 are"#]],
    );
    check(
        capture,
        "%rip",
        expect![[r#"
        %rip
        ^
        no general register is called %rip: %ax %bx %cx %dx %si %di %bp %sp %r8 … %r15 are"#]],
    );
    check(
        capture,
        "+16",
        expect![[r#"
        +16
           ^
        the register that holds the address is missing, as in +0(%di)"#]],
    );
    check(
        capture,
        "+16(di)",
        expect![[r#"
        +16(di)
            ^
        a register belongs here, as in %di"#]],
    );
    check(
        capture,
        "+16(%di",
        expect![[r#"
        +16(%di
               ^
        missing `)`"#]],
    );
    check(
        capture,
        "+(%di)",
        expect![[r#"
        +(%di)
         ^
        missing offset: a number belongs here"#]],
    );
    check(
        capture,
        "+16(%di):",
        expect![[r#"
        +16(%di):
                 ^
        missing length: a number belongs here"#]],
    );
    check(
        capture,
        "+16(%di):string",
        expect![[r#"
        +16(%di):string
                 ^
        `s` is no digit of the length"#]],
    );
    check(
        capture,
        "+16(%di):249",
        expect![[r#"
        +16(%di):249
                 ^
        length of 249: at most 248"#]],
    );
    check(
        capture,
        "+16(%di):0",
        expect![[r#"
        +16(%di):0
                 ^
        nothing can be read in 0 bytes"#]],
    );
    check(
        capture,
        "+0x8000000000000000(%di)",
        expect![[r#"
        +0x8000000000000000(%di)
        ^
        the offset does not fit 64 bits with its sign"#]],
    );
    check(
        capture,
        "$stack",
        expect![[r#"
        $stack
              ^
        missing stack word: a number belongs here"#]],
    );
    check(
        capture,
        "$stack65536",
        expect![[r#"
        $stack65536
              ^
        stack word of 65536: at most 65535"#]],
    );
    check(
        capture,
        "%di,%si",
        expect![[r#"
        %di,%si
           ^
        `,%si` is too much here"#]],
    );
    check(
        capture,
        "%dí",
        expect![[r#"
        %dí
          ^
        'í' cannot be here: write printable ASCII"#]],
    );
}

#[test]
fn values_are_numbers_or_negative_errors() {
    for (text, read) in [
        ("0", 0),
        ("0x10", 16),
        ("-1", u64::MAX),
        ("-0x8000000000000000", 1 << 63),
        ("18446744073709551615", u64::MAX),
        ("-ENOMEM", 12_u64.wrapping_neg()),
    ] {
        assert_eq!(value(text), Ok(read), "{text}");
    }
    check(
        value,
        "ENOMEM",
        expect![[r#"
        ENOMEM
        ^
        the kernel's functions return errors negative: write -ENOMEM"#]],
    );
    check(
        value,
        "-ENOTHING",
        expect![[r#"
        -ENOTHING
         ^
        no error is called ENOTHING"#]],
    );
    check(
        value,
        "-0x8000000000000001",
        expect![[r#"
        -0x8000000000000001
        ^
        the value does not fit 64 bits"#]],
    );
    check(
        value,
        "18446744073709551616",
        expect![[r#"
        18446744073709551616
        ^
        the value does not fit 64 bits"#]],
    );
    check(
        value,
        "010",
        expect![[r#"
        010
        ^
        leading zero in the value: write decimal, or hex after 0x"#]],
    );
    check(
        value,
        "12x",
        expect![[r#"
        12x
          ^
        `x` is no digit of the value"#]],
    );
    check(
        value,
        "--1",
        expect![[r#"
        --1
         ^
        missing value: a number belongs here"#]],
    );
    check(
        address,
        "-1",
        expect![[r#"
        -1
        ^
        missing address: a number belongs here"#]],
    );
}

#[test]
fn changes_have_the_width_they_are_given() {
    let bytes = |text: &str| match change(text) {
        Ok(Change::Memory { bytes, .. }) => bytes.to_vec(),
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(bytes("+8(%di)=hex:0011aaBB"), [0, 0x11, 0xaa, 0xbb]);
    assert_eq!(bytes("+8(%di) = u16:0x1234"), [0x34, 0x12]);
    assert_eq!(bytes("@0xffffffff81000000=u8:-1"), [0xff]);
    assert_eq!(bytes("+0(%di)=u32:-EPERM"), [0xff; 4]);
    assert_eq!(bytes("+0(%di)=u64:-EPERM"), [0xff; 8]);
    let (register, value) = (Gpr::Rax, 16);
    assert_eq!(change("%ax=0x10"), Ok(Change::Register { register, value }));
    check(
        change,
        "%ax",
        expect![[r#"
        %ax
           ^
        missing `=` and what it is set to"#]],
    );
    check(
        change,
        "%ax=",
        expect![[r#"
        %ax=
            ^
        missing value: a number belongs here"#]],
    );
    check(
        change,
        "ax=1",
        expect![[r#"
        ax=1
        ^
        change a register (%ax=…) or memory (+8(%di)=…, @0x…=…)"#]],
    );
    check(
        change,
        "+8(%di)=5",
        expect![[r#"
        +8(%di)=5
                ^
        memory is set to hex:BYTES, or u8:, u16:, u32: or u64: and a number"#]],
    );
    check(
        change,
        "+8(%di)=hex:",
        expect![[r#"
        +8(%di)=hex:
                    ^
        two hexadecimal digits for each byte belong here"#]],
    );
    check(
        change,
        "+8(%di)=hex:123",
        expect![[r#"
        +8(%di)=hex:123
                       ^
        two hexadecimal digits for each byte belong here"#]],
    );
    check(
        change,
        "+8(%di)=hex:12zz",
        expect![[r#"
        +8(%di)=hex:12zz
                      ^
        `z` is no hexadecimal digit"#]],
    );
    check(
        change,
        "+8(%di)=u8:256",
        expect![[r#"
        +8(%di)=u8:256
                   ^
        the value does not fit 8 bits"#]],
    );
    check(
        change,
        "+8(%di)=u16:-32769",
        expect![[r#"
        +8(%di)=u16:-32769
                    ^
        the value does not fit 16 bits"#]],
    );
    let long = format!("+0(%di)=hex:{}", "00".repeat(249));
    assert_eq!(change(&long).map_err(|error| error.column), Err(12));
}

#[test]
fn conditions_compare_a_register_with_a_value() {
    let read = |text: &str| condition(text).map(|c| (c.comparison, c.value));
    assert_eq!(read("%di==0x10"), Ok((Comparison::Equal, 16)));
    assert_eq!(read("%di <= 5"), Ok((Comparison::LessOrEqual, 5)));
    assert_eq!(read("%di<5"), Ok((Comparison::Less, 5)));
    assert_eq!(read("%di>=-1"), Ok((Comparison::GreaterOrEqual, u64::MAX)));
    assert_eq!(read("%di&1"), Ok((Comparison::AnyBit, 1)));
    check(
        condition,
        "%di",
        expect![[r#"
        %di
           ^
        compare with ==, !=, <, <=, >, >= or & (some bit in common)"#]],
    );
    check(
        condition,
        "%di=1",
        expect![[r#"
        %di=1
           ^
        compare with ==, !=, <, <=, >, >= or & (some bit in common)"#]],
    );
    check(
        condition,
        "%di==",
        expect![[r#"
        %di==
             ^
        missing value: a number belongs here"#]],
    );
}

#[test]
fn decisions_are_lists_and_asking_has_a_limit() {
    let read = decision("%ax=1, return=-EIO").unwrap();
    assert_eq!(read.changes.len(), 1);
    assert_eq!(read.then, Then::Return(5_u64.wrapping_neg()));
    assert_eq!(decision("proceed"), Ok(Decision::default()));
    let asked = |ms, then| {
        Ok(Hold::Ask {
            deadline: Duration::from_millis(ms),
            default: Decision {
                then,
                ..Decision::default()
            },
        })
    };
    let jump = Then::Jump(Gva(0x1000));
    assert_eq!(ask("2s,jump=0x1000"), asked(2000, jump));
    assert_eq!(ask("500ms"), asked(500, Then::Proceed));
    check(
        decision,
        "",
        expect![[r#"

        ^
        write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)"#]],
    );
    check(
        decision,
        "return",
        expect![[r#"
        return
        ^
        write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)"#]],
    );
    check(
        decision,
        "return=1,jump=2",
        expect![[r#"
        return=1,jump=2
                 ^
        the guest can go on in one place only"#]],
    );
    check(
        decision,
        "proceed,",
        expect![[r#"
        proceed,
                ^
        write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)"#]],
    );
    check(
        ask,
        "5",
        expect![[r#"
        5
         ^
        a time belongs here, as in 500ms or 5s"#]],
    );
    check(
        ask,
        "0ms",
        expect![[r#"
        0ms
        ^
        a hit can wait between 1ms and 60s"#]],
    );
    check(
        ask,
        "61s",
        expect![[r#"
        61s
        ^
        a hit can wait between 1ms and 60s"#]],
    );
    check(
        ask,
        "s",
        expect![[r#"
        s
        ^
        a hit can wait between 1ms and 60s"#]],
    );
    check(
        ask,
        "1s,fail",
        expect![[r#"
        1s,fail
           ^
        write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)"#]],
    );
}

#[test]
fn actions_are_printed_as_the_options_that_ask_for_them() {
    let actions = Actions {
        when: vec![condition("%di==0x10").unwrap()],
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::R9, Gpr::Rbx]),
        changes: vec![change("%ax=-ENOMEM").unwrap()],
        then: Then::Return(0),
        post: true,
        hold: Some(ask("1500ms,proceed").unwrap()),
        ..Default::default()
    };
    assert_eq!(
        text::actions(&actions).join(" "),
        "when=%di==0x10 capture=%bx capture=%di capture=%r9 set=%ax=-ENOMEM return=0x0 ask=1500ms,proceed post"
    );
}

fn any_register() -> impl Strategy<Value = Gpr> {
    proptest::sample::select(&Gpr::ALL[..])
}

fn any_value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..200_u64,
        (1..200_u64).prop_map(u64::wrapping_neg)
    ]
}

fn any_change() -> impl Strategy<Value = Change> {
    let bytes = proptest::collection::vec(any::<u8>(), 1..249);
    prop_oneof![
        (any_register(), any_value())
            .prop_map(|(register, value)| Change::Register { register, value }),
        (proptest::option::of(any_register()), any::<i64>(), bytes).prop_map(
            |(base, offset, bytes)| Change::Memory {
                base,
                offset,
                bytes: bytes.into(),
            }
        ),
    ]
}

fn any_decision() -> impl Strategy<Value = Decision> {
    let then = prop_oneof![
        Just(Then::Proceed),
        any_value().prop_map(Then::Return),
        any::<u64>().prop_map(|at| Then::Jump(Gva(at))),
    ];
    (proptest::collection::vec(any_change(), 0..4), then)
        .prop_map(|(changes, then)| Decision { changes, then })
}

fn any_comparison() -> impl Strategy<Value = Comparison> {
    let signs = text::COMPARISONS.map(|(comparison, _)| comparison);
    proptest::sample::select(signs.to_vec())
}

proptest! {
    #[test]
    fn what_is_printed_is_read_as_the_same(
        base in any_register(),
        offset in any::<i64>(),
        len in 1..=248_u16,
        word in any::<u16>(),
        change_ in any_change(),
        default in any_decision(),
        comparison in any_comparison(),
        value in any_value(),
        deadline in (1..=60_000_u64).prop_map(Duration::from_millis),
        max_rate in 1_u32..,
        max_share in 1..=100_u8,
    ) {
        for item in [Item::Memory { base, offset, len }, Item::Stack(word)] {
            prop_assert_eq!(capture(&text::item(&item)), Ok(Capture::Item(item)));
        }
        prop_assert_eq!(change(&text::change(&change_)), Ok(change_));
        prop_assert_eq!(decision(&text::decision(&default)), Ok(default.clone()));
        let question = text::ask(deadline, &default);
        prop_assert_eq!(ask(&question), Ok(Hold::Ask { deadline, default }));
        let when = Condition { register: base, comparison, value };
        prop_assert_eq!(condition(&text::condition(&when)), Ok(when));
        prop_assert_eq!(rate(&format!("{max_rate}/s")), Ok(max_rate));
        prop_assert_eq!(share(&format!("{max_share}%")), Ok(max_share));
    }

    #[test]
    fn errors_point_into_the_text(
        text in "\\PC{0,30}|[%a-z0-9x+()=:,$@& -]{0,30}|(%di|[+]8\\(%di\\)|5s,|return)[=<>:&,0-9a-fx]{0,12}",
    ) {
        let errors = [
            capture(&text).err(),
            change(&text).err(),
            condition(&text).err(),
            decision(&text).err(),
            ask(&text).err(),
            value(&text).err(),
            address(&text).err(),
            rate(&text).err(),
            share(&text).err(),
        ];
        for error in errors.into_iter().flatten() {
            prop_assert!(error.column <= text.chars().count());
        }
    }
}
