//! Printed arguments and filters parse to the values that were printed.

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use proptest::prelude::*;

use super::*;
use crate::definition::{Kind, Marks, Target};

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z_][a-zA-Z0-9_]{0,7}".prop_filter("a word of the language", |name| name != "if")
}

fn path(at_least: usize) -> impl Strategy<Value = Vec<Access>> {
    proptest::collection::vec((any::<bool>(), name()), at_least..3).prop_map(|steps| {
        let access =
            |(i, (arrow, field)): (usize, (bool, String))| access(0, arrow || i == 0, &field);
        steps.into_iter().enumerate().map(access).collect()
    })
}

fn register() -> impl Strategy<Value = Register> {
    let special = [
        Register::Ip,
        Register::Flags,
        Register::Cs,
        Register::Ss,
        Register::OrigAx,
    ];
    prop_oneof![
        proptest::sample::select(Gpr::ALL.to_vec()).prop_map(Register::General),
        proptest::sample::select(special.to_vec()),
    ]
}

fn leaf() -> impl Strategy<Value = ExprKind> {
    prop_oneof![
        register().prop_map(ExprKind::Register),
        any::<u64>().prop_map(ExprKind::Memory),
        ("[a-z_.][a-z0-9_.$]{0,6}", any::<i64>())
            .prop_map(|(name, offset)| ExprKind::Symbol { name, offset }),
        Just(ExprKind::Stack),
        (0..=2048_u16).prop_map(ExprKind::StackWord),
        (1..=2048_u16).prop_map(ExprKind::Argument),
        path(0).prop_map(|path| ExprKind::Return { path }),
        path(0).prop_map(|path| ExprKind::Current { path }),
        any::<u64>().prop_map(ExprKind::Immediate),
        (name(), path(0)).prop_map(|(name, path)| ExprKind::Variable { name, path }),
    ]
}

fn expr() -> impl Strategy<Value = Expr> {
    leaf()
        .prop_map(Expr::from)
        .prop_recursive(4, 5, 1, |inner| {
            let inner = inner.prop_map(Box::new);
            prop_oneof![
                (any::<bool>(), any::<i64>(), inner.clone()).prop_map(|(user, offset, inner)| {
                    ExprKind::Dereference {
                        user,
                        offset,
                        inner,
                    }
                    .into()
                }),
                (any::<bool>(), inner.clone()).prop_map(|(read, inner)| ExprKind::PerCpu {
                    read,
                    inner
                }
                .into()),
                (
                    name(),
                    proptest::option::of("[a-z]{1,4}(\\.[a-z]{1,4})?"),
                    inner,
                    path(1)
                )
                    .prop_map(|(of, member, inner, path)| ExprKind::Cast {
                        of,
                        member,
                        inner,
                        path
                    }
                    .into()),
            ]
        })
}

fn element() -> impl Strategy<Value = Element> {
    let bits = || proptest::sample::select(vec![8_u8, 16, 32, 64]);
    let shown = proptest::sample::select(vec![Shown::Unsigned, Shown::Signed, Shown::Hex]);
    prop_oneof![
        (shown, bits()).prop_map(|(shown, bits)| Element::Integer { shown, bits }),
        Just(Element::Char),
        Just(Element::Symbol),
        (1..=8_u8, 0..=56_u8).prop_map(|(width, offset)| Element::Bitfield {
            width,
            offset,
            container: 64,
        }),
    ]
}

fn argument() -> impl Strategy<Value = FetchArg> {
    // All fetched values can have one of these types, and memory can also be an array.
    let plain = (expr(), proptest::option::of(element()));
    let array = (expr(), any::<i64>(), element(), 1..=ARRAY_MAX);
    prop_oneof![
        plain.prop_map(|(expr, element)| (expr, element, None)),
        array.prop_map(|(inner, offset, element, count)| {
            let inner = Box::new(inner);
            let kind = ExprKind::Dereference {
                user: false,
                offset,
                inner,
            };
            (kind.into(), Some(element), Some(count))
        }),
    ]
    .prop_map(|(expr, element, count)| {
        let column = crate::Column::default();
        let ty = element.map(|element| TypeName {
            column,
            element,
            count,
        });
        FetchArg::new(None, expr, ty)
    })
}

fn value() -> impl Strategy<Value = (Operator, Value)> {
    let numbers = [
        Operator::Equal,
        Operator::NotEqual,
        Operator::Less,
        Operator::LessOrEqual,
        Operator::Greater,
        Operator::GreaterOrEqual,
        Operator::AnyBit,
    ];
    let texts = [Operator::Equal, Operator::NotEqual, Operator::Glob];
    prop_oneof![
        (proptest::sample::select(numbers.to_vec()), any::<u64>()).prop_map(|(operator, value)| {
            let text = value.to_string();
            (operator, Value::Number { value, text })
        }),
        (
            proptest::sample::select(numbers.to_vec()),
            "-?[A-Z_][A-Z0-9_]{0,8}|[A-Z_]{1,4}(\\|[A-Z]{1,4}|\\|0x[0-9]{1,3}){0,2}"
        )
            .prop_map(|(operator, text)| (operator, Value::Name(text))),
        (
            proptest::sample::select(texts.to_vec()),
            "[ -&(-Z^-~]{0,8}|[ !#-Z^-~]{0,8}"
        )
            .prop_map(|(operator, text)| (operator, Value::Text(text))),
    ]
}

fn filters() -> impl Strategy<Value = Filter> {
    let test = (name(), value()).prop_map(|(field, (operator, value))| {
        let (column, value_column) = Default::default();
        Filter::Test(Test {
            column,
            field,
            form: Form::Plain,
            operator,
            value_column,
            value,
        })
    });
    test.prop_recursive(5, 16, 2, |inner| {
        let inner = inner.prop_map(Box::new);
        prop_oneof![
            inner.clone().prop_map(Filter::Not),
            (inner.clone(), inner.clone()).prop_map(|(left, right)| Filter::And(left, right)),
            (inner.clone(), inner).prop_map(|(left, right)| Filter::Or(left, right)),
        ]
    })
}

proptest! {
    #[test]
    fn printed_definitions_with_arguments_parse_to_themselves(
        arguments in proptest::collection::vec(argument(), 0..6),
        every in any::<bool>(),
        filter in proptest::option::of(filters()),
        target in prop_oneof![
            Just(Target::Symbol { module: None, name: "f".to_owned(), offset: 0 }),
            Just(Target::Functions { module: None, pattern: "f*".to_owned() }),
            Just(Target::Address(Gva(0x1000))),
        ],
    ) {
        let mut arguments = arguments;
        for (i, argument) in arguments.iter_mut().enumerate() {
            argument.name = Some(format!("a{i}"));
        }
        if every {
            let expr = ExprKind::Arguments.into();
            arguments.push(FetchArg::new(None, expr, None));
        }
        let definition = Definition {
            kind: Kind::Return { maxactive: None },
            name: None,
            target,
            arguments,
            filter,
            marks: Marks::default(),
        };
        let text = definition.to_string();
        let parsed = parse(&text);
        if let Err(error) = &parsed {
            // Random nesting may exceed the maximum number of steps or characters of an argument.
            prop_assume!(!error.message.starts_with("Argument expression is too long"), "{}", text);
        }
        prop_assert_eq!(parsed, Ok(definition), "{}", text);
    }
}
