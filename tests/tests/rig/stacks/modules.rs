//! Tests stacks that pass through a module. The init text of `dummy` calls a function of the kernel, which calls
//! the module's function that sets up a device.

use hvprobe_tests::program::Program;
use hvprobe_tests::rig::{Running, assert_clean, guest, rig};
use rustix::process::Signal;

use super::{TRACEFS, of, recorded, stack, stacks, theirs};

/// Function of the kernel that the module's `dummy_setup` calls.
const CALLED: &str = "ether_setup";
const LOAD: &str = "insmod /lib/modules/dummy.ko";

#[test]
fn stacks_lead_through_modules_as_the_guests_own_kernel_records_them() {
    if rig("stacks through modules held against the kernel's").is_none() {
        return;
    }
    let script = format!(
        "{TRACEFS}{}rmmod dummy; echo ready; read line; {LOAD}; echo loaded; read line; rmmod dummy",
        recorded(CALLED, Some("insmod"), LOAD)
    );
    let mut running = Running::boot(guest(1, &["sh", "-c", &script]));
    let printed = running.wait_for("ready").replace('\r', "");
    let machine = running.machine.clone();
    let called = running.register(stacks(&format!("p {CALLED}")));
    let own = running.register(stacks("p dummy:dummy_setup"));
    machine.console_input(b"\n");
    running.wait_for("loaded");
    let of_insmod = |events: &[_], id| of(events, id, Some("insmod"));
    let events = running.wait_events(|events| {
        [called, own]
            .iter()
            .all(|id| !of_insmod(events, *id).is_empty())
    });
    let [of_called, of_own] = [called, own].map(|id| {
        let hits = of_insmod(events, id);
        assert_eq!(hits.len(), 1, "{hits:?}");
        // Names of the module can be resolved only while it is loaded.
        let (names, goes_on) = stack(&machine, &hits[0]);
        assert!(!goes_on, "{names:#?}");
        names
    });
    machine.console_input(b"\n");
    let (ending, _, rest) = running.finish();
    assert_clean(&ending, &rest, 0);

    let theirs = theirs(&printed, CALLED);
    assert_eq!(theirs.len(), 1, "{theirs:#?}");
    let theirs = theirs.first().expect("one");
    assert_eq!(of_called.len(), theirs.len(), "{of_called:#?} {theirs:#?}");
    let both = of_called.iter().zip(theirs).skip(1);
    // The init text is gone when names are resolved; some kernels keep its symbols.
    let (named, gone): (Vec<_>, Vec<_>) = both.partition(|(ours, _)| !ours.starts_with("0x"));
    assert_eq!(gone.len(), 1, "{of_called:#?}");
    assert!(
        named.iter().all(|(ours, theirs)| ours == theirs),
        "{named:#?}"
    );
    assert!(named[0].0.starts_with("dummy_setup+0x"), "{named:#?}");
    assert!(of_own[0].starts_with("dummy_setup+0x"), "{of_own:#?}");
    assert_eq!(of_own[1..], of_called[2..]);
}

#[test]
fn functions_of_modules_are_named_in_printed_stacks() {
    if rig("printed stacks through modules").is_none() {
        return;
    }
    let definition = format!("p {CALLED}");
    let script = format!("{LOAD}; read line");
    let words = [
        "run",
        "--stack",
        "-p",
        &definition,
        "--",
        "sh",
        "-c",
        &script,
    ];
    let program = Program::start(&words);
    let frame = program.wait_out(" => dummy_setup+0x");
    assert!(frame.ends_with(" [dummy]"), "{frame}");
    program.signal(Signal::INT);
    let _ended = program.finish();
}
