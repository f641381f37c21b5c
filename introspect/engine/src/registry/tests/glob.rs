//! Definitions with a pattern, and batches without their refused probes.

use expect_test::{Expect, expect};
use hvprobe_fixtures::kernel::{NOTHING_FORBIDDEN, TEXT};

use super::*;
use crate::registered::{Refusals, Registered};

/// Creates a guest whose kernel has every kind of name that patterns treat differently.
fn rig() -> Rig {
    let filler = TEXT + 0xb00;
    let at = |n: u64| filler + 0x10 * n;
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("get_one", at(0), 0x10, true),
        ("get_alias", at(0), 0x10, true),
        ("get_two", at(1), 0x10, true),
        ("get_two.cold", at(3), 0x10, true),
        ("get_part.isra.0", at(4), 0x10, true),
        ("__pfx_get_three", at(5), 0x10, true),
        ("get_static", at(6), 0x10, true),
        ("get_static", at(7), 0x10, true),
        ("get_data", TEXT + 0x10_0000, 0x10, false),
        ("put_one", at(8), 0x10, true),
        ("_etext", TEXT + 0x4000, 0, true),
    ];
    let mut rig = Rig::boot(&kernel::elf(
        &probed::sections(),
        &[&symbols[..], &NOTHING_FORBIDDEN].concat(),
    ));
    rig.go_live(None);
    rig
}

impl Rig {
    fn batch(
        &mut self,
        definitions: &[&str],
        refusals: Refusals,
    ) -> Result<Registered, RegisterError> {
        let specs = specs(definitions.iter().copied());
        self.registry.register_batch(&specs, refusals, &*self.guest)
    }

    /// Lists the name and the place of every probe.
    fn listing(&self) -> String {
        let line = |info: ProbeInfo| {
            let (symbol, offset) = info.symbol.expect("placed");
            format!("{} {symbol}+{offset:#x} `{}`\n", info.name, info.definition)
        };
        self.list().into_iter().map(line).collect()
    }
}

#[test]
fn the_group_of_a_pattern_is_that_of_all_of_its_probes() {
    let mut rig = rig();
    let found = rig.batch(&["p:g/ get_t*", "p:g/ get_st*"], Refusals::Fail);
    assert_eq!(found.expect("good places").ids().len(), 3);
    let names: Vec<_> = rig.list().into_iter().map(|info| info.name).collect();
    assert_eq!(
        names,
        ["g/p_get_two_0", "g/p_get_static_0", "g/p_get_static_0"]
    );
}

fn chain(error: &dyn std::error::Error) -> String {
    let source = error.source().map(|source| format!(": {}", chain(source)));
    format!("{error}{}", source.unwrap_or_default())
}

fn check(definition: &str, expected: Expect) {
    let mut rig = rig();
    match rig.batch(&[definition], Refusals::Fail) {
        Ok(_) => expected.assert_eq(&rig.listing()),
        Err(error) => expected.assert_eq(&chain(&error)),
    }
}

#[test]
fn every_function_that_matches_gets_one_probe_of_its_own() {
    check(
        "p get_*",
        expect![[r#"
            p_get_one_0 get_one+0x0 `p get_one`
            p_get_two_0 get_two+0x0 `p get_two`
            p_get_static_0 get_static+0x0 `p:p_get_static_0 0xffffffff81000b60`
            p_get_static_0 get_static+0x0 `p:p_get_static_0 0xffffffff81000b70`
        "#]],
    );
    check(
        "p [gp]?t_*ne",
        expect![[r#"
            p_get_one_0 get_one+0x0 `p get_one`
            p_put_one_0 put_one+0x0 `p put_one`
        "#]],
    );
}

#[test]
fn function_is_planted_under_the_name_that_matches() {
    check(
        "p *alias",
        expect!["p_get_alias_0 get_one+0x0 `p get_alias`\n"],
    );
}

#[test]
fn parts_and_clones_match_only_patterns_with_a_dot() {
    check(
        "p get_*.*",
        expect![[r#"
            p_get_two_cold_0 get_two.cold+0x0 `p get_two.cold`
            p_get_part_isra_0_0 get_part.isra.0+0x0 `p get_part.isra.0`
        "#]],
    );
}

#[test]
fn pattern_without_a_match_offers_names_and_unloaded_modules_are_named() {
    check(
        "p gte_one*",
        expect!["probe 0 (p gte_one*): no function matches `gte_one*`; did you mean `get_one`?"],
    );
    check(
        "p data*",
        expect!["probe 0 (p data*): no function matches `data*`"],
    );
    check(
        "p ext4:ext4_*",
        expect![
            "probe 0 (p ext4:ext4_*): module ext4 is not loaded, so it is not known what `ext4_*` stands for"
        ],
    );
}

#[test]
fn pattern_is_planted_in_one_stop_and_unregistered_one_by_one() {
    let mut rig = rig();
    let before = rig.visible();
    let mut done = Registered::default();
    let stops = rig.stops_of(|rig| {
        done = rig
            .batch(&["p put_one", "p get_*", "p get_two"], Refusals::Fail)
            .unwrap();
    });
    assert_eq!(stops, 1);
    let from: Vec<_> = done.probes.iter().map(|(index, _)| *index).collect();
    assert_eq!(from, [0, 1, 1, 1, 1, 2]);
    for id in done.ids() {
        assert_eq!(rig.byte(rig.addr(id)), INT3);
        rig.unregister(&[id]).unwrap();
    }
    assert!(rig.visible() == before);
}

#[test]
fn one_refused_function_keeps_the_whole_pattern_back() {
    let mut rig = rig();
    // The guest has two breakpoints of its own.
    for name in ["get_two", "put_one"] {
        rig.guest.write(rig.at(name, 0), &[INT3]);
    }
    let stops = rig.guest.stops();
    let error = rig.changes_nothing(|rig| rig.batch(&["p put_one", "p *"], Refusals::Fail));
    assert!(matches!(
        error,
        Err(RegisterError::Refused { index: 0, .. })
    ));
    let error = rig.changes_nothing(|rig| rig.batch(&["p *t_*"], Refusals::Fail));
    expect!["probe 0 (p *t_*): 2 of 5 functions cannot be probed, so none was planted: name those you want, or have the others skipped (`--skip-refused`); the first: get_two: 0xffffffff81000b10 already holds an int3 that is not ours: the guest is probing or patching it"]
        .assert_eq(&chain(&error.unwrap_err()));
    assert_eq!(rig.guest.stops(), stops);
}

#[test]
fn refused_places_are_left_out_on_request_and_reported_one_by_one() {
    let mut rig = rig();
    rig.guest.write(rig.at("get_two", 0), &[INT3]);
    let batch = [
        "p nobody",
        "p get_*",
        "p nobody_*",
        "p get_static",
        "p put_one",
    ];
    let done = rig.batch(&batch, Refusals::Skip).unwrap();
    let skipped: String = done
        .skipped
        .iter()
        .map(|it| format!("{} {}: {}\n", it.index, it.target, chain(&it.why)))
        .collect();
    expect![[r#"
        0 nobody: unknown symbol `nobody`
        1 get_two: 0xffffffff81000b10 already holds an int3 that is not ours: the guest is probing or patching it
        2 nobody_*: no function matches `nobody_*`
        3 get_static: symbol `get_static` is ambiguous, it is at 0xffffffff81000b60, 0xffffffff81000b70; give the address instead
    "#]].assert_eq(&skipped);
    let from: Vec<_> = done.probes.iter().map(|(index, _)| *index).collect();
    assert_eq!(from, [1, 1, 1, 4]);
    assert_eq!(rig.list().len(), 4);
    assert!(done.ids().iter().all(|id| rig.byte(rig.addr(*id)) == INT3));
}

#[test]
fn text_that_changes_before_the_stop_costs_only_its_own_probe() {
    let mut rig = rig();
    let at = rig.at("get_two", 0);
    rig.guest.meanwhile(move |guest| guest.write(at, &[0x99]));
    let done = rig.batch(&["p get_*", "p put_*"], Refusals::Skip).unwrap();
    assert_eq!(done.probes.len(), 4);
    let [skipped] = done.skipped.as_slice() else {
        panic!("{:?}", done.skipped);
    };
    assert_eq!((skipped.index, skipped.target.as_str()), (0, "get_two"));
    assert_eq!(skipped.why, Refused::TextChanged { at });
    assert_eq!(rig.byte(at), 0x99);
    assert!(done.ids().iter().all(|id| rig.byte(rig.addr(*id)) == INT3));
    assert_eq!(rig.list().len(), 4);
}

#[test]
fn nothing_is_registered_when_the_guest_does_not_stop() {
    let mut rig = rig();
    rig.guest.refuse_stops(true);
    let result = rig.changes_nothing(|rig| rig.batch(&["p get_*"], Refusals::Skip));
    assert!(matches!(result, Err(RegisterError::Stop(_))));
}

#[test]
fn patterns_wait_for_final_text_as_single_probes() {
    let mut rig = Rig::booting();
    let ids = rig.register(&specs(["p filler_00?"]));
    assert_eq!(ids.len(), 10);
    assert!(ids.iter().all(|id| rig.state(*id) == ProbeState::Pending));
    assert_eq!(rig.go_live(None), []);
    assert!(ids.iter().all(|id| rig.byte(rig.addr(*id)) == INT3));
}

#[test]
fn patterns_of_return_probes_keep_what_each_call_needs() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs(["r7 filler_00[01]"]));
    let infos: Vec<_> = ids.iter().map(|id| rig.info(*id)).collect();
    assert!(infos.iter().all(|info| info.maxactive == Some(7)));
    let names: Vec<_> = infos.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["r_filler_000_0", "r_filler_001_0"]);
}

#[test]
fn a_pattern_of_vmlinux_is_of_the_kernel_alone() {
    let all = |definition: &str| {
        let mut rig = rig();
        let batch = rig.batch(&[definition], Refusals::Fail);
        batch.unwrap_or_else(|error| panic!("{}", chain(&error)));
        rig.listing()
    };
    assert_eq!(all("p vmlinux:get_*"), all("p get_*"));
}
