//! Probes that were made with the debug information of one build of a module: the guest's kernel tells which is
//! loaded.

use hvprobe_engine::Refused;
use hvprobe_machine::{ProbeSpec, ProbeState};
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig};

/// Loads the module, prints its note, and then reads lines and does what they say.
const GUEST: &str = "insmod /lib/modules/dummy.ko && echo note: $(od -An -v -tx1 \
    /sys/module/dummy/notes/.note.gnu.build-id) end of note; while read -r line; do case $line in \
    load) insmod /lib/modules/dummy.ko;; \
    unload) rmmod dummy;; \
    end) break;; \
    esac || echo failed; echo done $line; done";
/// What stands before the id: three lengths and `GNU`.
const HEAD: usize = 16;

fn of_build(definition: &str, id: &[u8]) -> ProbeSpec {
    ProbeSpec {
        module_build_id: Some(id.to_vec()),
        ..probe(definition)
    }
}

#[test]
fn probes_for_a_build_of_a_module_go_to_no_other() {
    if rig("builds of modules").is_none() {
        return;
    }
    let mut running = Running::boot(guest(1, &["sh", "-c", GUEST]));
    let machine = running.machine.clone();
    let printed = running.wait_for("end of note");
    let note = printed.split("note: ").nth(1).expect("a note");
    let bytes = note
        .split_whitespace()
        .map_while(|it| u8::from_str_radix(it, 16).ok());
    let note: Vec<u8> = bytes.collect();
    assert!(
        note.len() > HEAD && note[HEAD - 4..HEAD] == *b"GNU\0",
        "{note:x?}"
    );
    let own = &note[HEAD..];
    let mut other = own.to_vec();
    other[0] ^= 1;

    let good = running.register(of_build("p dummy:dummy_setup", own));
    assert_eq!(info(&machine, good).state, ProbeState::Placed);
    let refused = machine
        .register(&[of_build("p dummy:dummy_get_stats64", &other)])
        .expect_err("another build");
    let why = chain(&refused);
    assert!(
        why.contains("another build than the debug information is of"),
        "{why}"
    );
    machine.unregister(&[good]).expect("registered");

    machine.console_input(b"unload\n");
    running.wait_for("done unload");
    let ids = [("dummy_setup", own), ("dummy_get_stats64", &other)]
        .map(|(name, id)| running.register(of_build(&format!("p dummy:{name}"), id)));
    for id in ids {
        assert_eq!(info(&machine, id).state, ProbeState::Pending);
    }
    machine.console_input(b"load\n");
    running.wait_for("done load");
    let [waited, wrong] = ids.map(|id| info(&machine, id));
    assert_eq!((waited.state, waited.counts.hits), (ProbeState::Placed, 1));
    let refusal = Refused::OtherBuild {
        module: "dummy".to_owned(),
        loaded: Some(own.to_vec()),
        wanted: other,
    };
    assert_eq!(wrong.state, ProbeState::Refused(refusal.to_string()));
    machine.console_input(b"end\n");
    let (ending, _, printed) = running.finish();
    assert!(!printed.contains("failed"), "{printed}");
    assert_clean(&ending, &printed, 0);
}
