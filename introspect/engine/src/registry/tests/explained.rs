//! Explanations of definitions without a guest, compared with registrations.

use std::collections::BTreeMap;

use hvprobe_spec::{Hold, Item, Source};

use super::*;
use crate::explain::{Explained, explain};
use crate::registered::Refusals;
use crate::unoptimized::Unoptimized;

fn explained(rig: &Rig, spec: &ProbeSpec) -> Explained {
    let mut all = explain(&rig.guest.image, spec);
    assert_eq!(all.len(), 1);
    all.remove(0).expect("it can be probed")
}

/// Returns the mechanism according to an explanation.
fn mechanism(explained: &Explained) -> Mechanism {
    match explained.exit {
        None => Mechanism::Optimized,
        Some(_) => explained.with_exits,
    }
}

#[test]
fn every_function_is_said_to_be_what_it_then_is() {
    let mut rig = Rig::optimizing();
    let mut watched = 0;
    for pattern in ["p *", "r *"] {
        let pattern = spec(pattern);
        let (mut said, mut refused) = (BTreeMap::new(), BTreeMap::new());
        for one in explain(&rig.guest.image, &pattern) {
            match one {
                Ok(it) => said.insert(it.at, it).map(|_| ()),
                Err(it) => refused.insert(it.target, it.why).map(|_| ()),
            };
        }
        let registered = rig
            .registry
            .register_batch(&[pattern], Refusals::Skip, &*rig.guest)
            .expect("the guest stops");
        let ids = registered.ids();
        assert!(ids.len() > 100 && said.len() == ids.len());
        for info in rig.list() {
            let said = said.remove(&info.addr.unwrap()).expect("the same places");
            assert_eq!(Some(&said.symbol), info.symbol.as_ref());
            let expected = match info.unoptimized {
                Some(Unoptimized::Internal) => {
                    let what = "this function is not watched for the sake of other probes";
                    assert!(said.provided.contains(&what), "{said:?}");
                    watched += 1;
                    said.with_exits
                }
                _ => mechanism(&said),
            };
            assert_eq!(info.mechanism, Some(expected), "{said:?}");
        }
        let skipped = registered.skipped.into_iter();
        let skipped: BTreeMap<_, _> = skipped.map(|it| (it.target, it.why)).collect();
        assert_eq!(refused, skipped);
        rig.unregister(&ids).unwrap();
    }
    assert!(watched > 0);
}

#[test]
fn what_needs_exits_is_said_with_the_reason() {
    let mut rig = Rig::optimizing();
    let post = post(EMULATED);
    let held = acting(
        BOOSTED,
        Actions {
            hold: Some(Hold::Stop),
            ..Actions::default()
        },
    );
    let boosted = ProbeSpec {
        mechanism: Some(Mechanism::Boosted),
        ..spec(BOOSTED)
    };
    for (spec, why) in [
        (post, "it has a post-handler"),
        (held, "it holds the virtual CPU"),
        (boosted, "it asks for an exit"),
    ] {
        let said = explained(&rig, &spec);
        assert_eq!(said.exit.as_deref(), Some(why));
        assert_eq!(said.provided, [""; 0]);
        let id = rig.register(&[spec])[0];
        assert_eq!(rig.mechanism(id), said.with_exits);
        rig.unregister(&[id]).unwrap();
    }
}

#[test]
fn what_cannot_be_a_jump_is_refused_if_it_has_to_be_one() {
    let rig = Rig::optimizing();
    let optimized = ProbeSpec {
        mechanism: Some(Mechanism::Optimized),
        ..post(EMULATED)
    };
    let result = explain(&rig.guest.image, &optimized).remove(0);
    let Refused::Unoptimized { at, .. } = result.expect_err("it has a post-handler").why else {
        panic!("another reason");
    };
    assert_eq!(at, rig.at("filler_000", 0));
}

#[test]
fn arguments_and_what_is_read_for_them_are_those_of_a_registration() {
    let mut rig = Rig::optimizing();
    let definition = "p:g/e vfs_read count file->f_mode if count > 7";
    let said = explained(&rig, &spec(definition));
    assert_eq!(said.event, "g/e");
    assert_eq!(said.definition, definition);
    let id = rig.one(definition);
    let info = rig.info(id);
    assert_eq!(said.shown, *info.shown);
    assert_eq!(said.actions, *info.actions);
    assert_eq!(
        (said.at, Some(said.symbol)),
        (info.addr.unwrap(), info.symbol)
    );
    let sources = said.shown.arguments.iter().map(|it| &it.source);
    let kinds: Vec<_> = sources.map(|it| matches!(it, Source::Item(_))).collect();
    assert_eq!(kinds, [false, true]);
    assert!(matches!(said.actions.capture[..], [Item::Fetched(_)]));
    assert_eq!(said.code.len(), 5);
    assert_eq!(said.instruction, "nop [rax+rax]");
    assert!(said.ftrace);
}

#[test]
fn what_is_no_argument_is_refused_at_its_column() {
    let rig = Rig::live();
    let result = explain(&rig.guest.image, &spec("p vfs_read nothing")).remove(0);
    let Refused::Argument(error) = result.expect_err("no such argument").why else {
        panic!("another reason");
    };
    assert_eq!(error.column, 11);
    let result = explain(&rig.guest.image, &spec("p nowhere_*")).remove(0);
    let why = result.expect_err("no such function").why;
    assert!(matches!(why, Refused::NoMatch { .. }), "{why:?}");
}

#[test]
fn stacks_without_unwind_tables_are_refused_as_at_a_registration() {
    let mut rig = Rig::live();
    let mut stacks = spec("p vfs_read");
    stacks.actions.capture = vec![Item::StackTrace(8)];
    let mut said = explain(&rig.guest.image, &stacks);
    let said = said.remove(0).expect_err("the image has no tables").why;
    assert!(matches!(said, Refused::NoStacks(_)), "{said:?}");
    let (_, refused) = refusal(rig.changes_nothing(|rig| rig.try_register(&[stacks])));
    assert_eq!(refused, said);
}
