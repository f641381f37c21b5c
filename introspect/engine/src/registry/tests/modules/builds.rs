//! Probes for one build of a module.

use super::*;

fn of_build(definition: &str, id: &[u8]) -> ProbeSpec {
    ProbeSpec {
        module_build_id: Some(id.to_vec()),
        ..spec(definition)
    }
}

#[test]
fn probes_go_to_the_build_that_they_were_made_for_and_to_no_other() {
    let mut loader = Loader::live();
    let module = loader.load("m", 0);
    let id = loader.rig.register(&[of_build("p m:enter", BUILD_ID)])[0];
    assert_eq!(loader.rig.addr(id), module.base);
    let other = loader
        .rig
        .changes_nothing(|rig| rig.try_register(&[of_build("p m:work", b"another")]));
    let (_, why) = refusal(other);
    let expected = "module m is another build than the debug information is of: its build id is \
                616e206964206f662061206275696c64, that of the debug information 616e6f74686572";
    assert_eq!(why.to_string(), expected);
}

#[test]
fn probes_that_wait_are_refused_when_another_build_comes() {
    let mut loader = Loader::live();
    let ids = loader.rig.register(&[
        of_build("p m:enter", b"another"),
        of_build("p m:work", BUILD_ID),
    ]);
    let module = loader.load("m", COMING);
    let refused = loader.changed(Some(module));
    let [(id, Refused::OtherBuild { loaded, wanted, .. })] = &refused[..] else {
        panic!("{refused:?}");
    };
    assert_eq!((*id, loaded.as_deref()), (ids[0], Some(BUILD_ID)));
    assert_eq!(wanted, b"another");
    assert_eq!(loader.rig.byte(module.base), 0x55);
    assert!(matches!(loader.rig.state(ids[0]), ProbeState::Refused(_)));
    assert_eq!(loader.rig.byte(module.base.wrapping_add(0x40)), INT3);
}

#[test]
fn a_build_that_cannot_be_identified_is_none_that_was_wanted() {
    let mut loader = Loader::live();
    let module = loader.load("m", 0);
    // Notes outside the module's memory are not the module's.
    let notes = module.at.wrapping_add(0x390);
    loader.rig.guest.write(notes, &MODULES.0.to_le_bytes());
    let result = loader
        .rig
        .changes_nothing(|rig| rig.try_register(&[of_build("p m:enter", BUILD_ID)]));
    let (_, why) = refusal(result);
    assert!(
        why.to_string().contains("its build id is not known"),
        "{why}"
    );
}
