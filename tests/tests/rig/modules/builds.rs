//! Tests probes that were made with the debug information of one build of a module. The guest's kernel shows which
//! build is loaded.

use std::fs;

use hvprobe_engine::Refused;
use hvprobe_fixtures::module_file;
use hvprobe_machine::{ProbeSpec, ProbeState};
use hvprobe_tests::program::hvprobe;
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig};
use tempfile::TempDir;

/// Loads the module, prints the note with its build id, and then executes the commands that it reads, one from each
/// line.
const GUEST: &str = "insmod /lib/modules/dummy.ko && echo note: $(od -An -v -tx1 \
    /sys/module/dummy/notes/.note.gnu.build-id) end of note; while read -r line; do case $line in \
    load) insmod /lib/modules/dummy.ko;; \
    unload) rmmod dummy;; \
    end) break;; \
    esac || echo failed; echo done $line; done";
/// Length of the note before the id: three words and `GNU`.
const HEAD: usize = 16;

fn of_build(definition: &str, id: &[u8]) -> ProbeSpec {
    ProbeSpec {
        module_build_id: Some(id.to_vec()),
        ..probe(definition)
    }
}

/// Returns the build id of the module, from the note that the guest prints.
fn build_id(running: &mut Running) -> Vec<u8> {
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
    note[HEAD..].to_vec()
}

#[test]
fn probes_for_a_build_of_a_module_go_to_no_other() {
    if rig("builds of modules").is_none() {
        return;
    }
    let mut running = Running::boot(guest(1, &["sh", "-c", GUEST]));
    let machine = running.machine.clone();
    let own = build_id(&mut running);
    let own = own.as_slice();
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

/// The debug information is made up, because that of distributions is large. It describes a function that the
/// module also has.
#[test]
fn files_of_a_module_lead_to_the_build_that_they_are_of() {
    if rig("files of modules").is_none() {
        return;
    }
    let mut running = Running::boot(guest(1, &["sh", "-c", GUEST]));
    let own = build_id(&mut running);
    running.machine.console_input(b"end\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);

    let mut other = own.clone();
    other[0] ^= 1;
    let [own_text, other_text] = [&own, &other].map(|id| hex(id));
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("dummy.ko");
    let run = |id: &[u8]| {
        let bytes = module_file::file_of_function(id, "dummy_setup");
        fs::write(&file, bytes).expect("a file");
        let file = file.to_str().expect("UTF-8");
        let probe = ["-p", "dummy_setup file"];
        let command = ["--", "insmod", "/lib/modules/dummy.ko"];
        hvprobe(&[&["run", "--debug-info", file], &probe[..], &command].concat())
    };
    let found = run(&own);
    let hit = |line: &String| line.contains("dummy_setup: (") && line.contains(" file=0xffff");
    assert_eq!(
        found.out.iter().filter(|line| hit(line)).count(),
        1,
        "{found:#?}"
    );
    let refused = run(&other);
    assert!(!refused.out.iter().any(hit), "{refused:#?}");
    let says = |id: &str| refused.err.iter().any(|line| line.contains(id));
    assert!(says(&own_text) && says(&other_text), "{refused:#?}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
