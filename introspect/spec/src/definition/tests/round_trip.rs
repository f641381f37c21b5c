//! Printed definitions parse to the definitions that were printed, and no text makes the parser panic.

use hvprobe_arch::Gva;
use proptest::prelude::*;

use super::super::*;

proptest! {
    #[test]
    fn printed_definitions_parse_to_themselves(
        name in proptest::option::of("[A-Za-z_][A-Za-z0-9_]{0,62}(/[A-Za-z_][A-Za-z0-9_]{0,62})?"),
        target in prop_oneof![
            (
                proptest::option::of("[A-Za-z1-9_][A-Za-z0-9_]{0,54}"),
                "[A-Za-z_.][A-Za-z0-9_.$]{0,60}",
                any::<u64>(),
            )
                .prop_map(|(module, name, offset)| Target::Symbol { module, name, offset }),
            (
                proptest::option::of("[A-Za-z1-9_][A-Za-z0-9_]{0,54}"),
                "[a-z_.]{0,8}(\\*|\\?|\\[!?[a-m]-[n-z]\\])[a-z_.*?]{0,8}",
            )
                .prop_map(|(module, pattern)| Target::Functions { module, pattern }),
            any::<u64>().prop_map(|at| Target::Address(Gva(at))),
        ],
        returns in proptest::option::of(proptest::option::of(1_u32..=4096)),
    ) {
        let (kind, target) = match (returns, target) {
            (None, target) => (Kind::Probe, target),
            (Some(maxactive), Target::Symbol { module, name, .. }) => {
                (Kind::Return { maxactive }, Target::Symbol { module, name, offset: 0 })
            }
            (Some(maxactive), target) => (Kind::Return { maxactive }, target),
        };
        let name = name.filter(|_| !matches!(target, Target::Functions { .. }));
        let definition = Definition { kind, name, target, arguments: Vec::new(), filter: None, marks: Marks::default() };
        prop_assert_eq!(parse(&definition.to_string()), Ok(definition));
    }

    #[test]
    fn errors_point_into_the_text(
        text in "\\PC{0,40}|[p:r/a_0x+% \t]{0,20}|(p |p:a |r |r0x1:a )[a0x+. \t*?\\[\\]!-]{0,20}(%return)?|\
            (p |r )a ([a-c]=)?([+-]u?[0-9]{0,2}\\(){0,3}(%di|@a\\+4|\\$arg1|\\$retval|\\$comm|a->b\\.c|\\\\5|\\\\\"x\"|\\(s,m\\)a->b)\\){0,3}\
            (:([usx](8|64)|string|symstr|%pd|b3@2/8|u)(\\[[0-9]{1,2}\\]?)?)?( if [a ()!&|=<~\"0-9]{0,12})?",
    ) {
        match parse(&text) {
            Ok(definition) => prop_assert_eq!(parse(&definition.to_string()), Ok(definition)),
            Err(error) => {
                prop_assert!(error.column <= text.chars().count());
                prop_assert_eq!(error.render(&text).lines().count(), 2);
            }
        }
    }
}
