//! Tests probes in kernel modules that are loaded and unloaded, in a stock guest.

mod arguments;
mod builds;

use hvprobe_arch::Gva;
use hvprobe_engine::Refused;
use hvprobe_hit::event::EventKind;
use hvprobe_machine::{Event, ProbeId, ProbeSpec, ProbeState};
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig};

/// Reads lines and executes them as commands; `stats` makes `dummy_get_stats64` run once.
const COMMANDS: &str = "echo ready; while read -r line; do case $line in \
    load) insmod /lib/modules/dummy.ko;; \
    other) insmod /lib/modules/crc-itu-t.ko;; \
    stats) cat /proc/net/dev >/tmp/stats;; \
    unload) rmmod dummy;; \
    end) rmmod crc-itu-t 2>/dev/null; break;; \
    esac || echo failed; echo done $line; done";

fn boot(cpus: u32) -> Running {
    let mut running = Running::shared(&guest(cpus, &["sh", "-c", COMMANDS]));
    running.wait_for("ready");
    running
}

/// Makes the guest execute the command `what`, and waits until it has done so for the `nth` time.
fn have(running: &mut Running, what: &str, nth: usize) {
    running
        .machine
        .console_input(format!("{what}\n").as_bytes());
    let done = format!("done {what}");
    let printed = running.wait_printed(|printed| printed.matches(&done).count() == nth);
    assert!(!printed.contains("failed"), "{printed}");
}

fn text_at(running: &Running, at: Gva) -> [u8; 32] {
    let mut text = [0; 32];
    let read = running.machine.read_kernel(at, &mut text);
    read.unwrap_or_else(|error| panic!("{at}: {}", chain(&error)));
    text
}

/// Returns the number of hits of probe `id` by the program that reads the statistics. Leaves out hits by the
/// network stack, which also reads them.
fn by_cat(events: &[Event], id: ProbeId) -> usize {
    let by_cat = |event: &&Event| event.task.is_some_and(|task| task.comm() == "cat");
    let hits = events.iter().filter(|event| event.probe == id);
    hits.filter(by_cat).count()
}

fn hits(running: &Running, id: ProbeId) -> u64 {
    let counts = info(&running.machine, id).counts;
    assert_eq!((counts.missed, counts.faults, counts.orphans), (0, 0, 0));
    counts.hits
}

#[test]
fn a_pending_probe_fires_once_its_module_is_there_and_is_gone_with_it() {
    if rig("pending probes of modules").is_none() {
        return;
    }
    let mut running = boot(2);
    let machine = running.machine.clone();
    let [setup, init, stats, returned, nowhere] = [
        "p dummy:dummy_setup",
        "r dummy:dummy_dev_init",
        "p dummy:dummy_get_stats64",
        "r dummy:dummy_get_stats64",
        "p no_such_module:function",
    ]
    .map(|definition| running.register(probe(definition)));
    let state = |id| info(&machine, id).state;
    for id in [setup, init, stats, returned, nowhere] {
        assert_eq!(
            (state(id), info(&machine, id).addr),
            (ProbeState::Pending, None)
        );
    }
    have(&mut running, "load", 1);
    // Loading creates one device.
    assert_eq!((hits(&running, setup), hits(&running, init)), (1, 1));
    for id in [setup, init, stats, returned] {
        let info = info(&machine, id);
        assert_eq!(info.state, ProbeState::Placed);
        let at = info.addr.expect("placed");
        assert!(!machine.image().is_text(at));
        assert_eq!(text_at(&running, at)[0], 0xcc);
    }
    assert_eq!(state(nowhere), ProbeState::Pending);
    have(&mut running, "stats", 1);
    have(&mut running, "unload", 1);
    for id in [setup, init, stats, returned] {
        assert_eq!(state(id), ProbeState::Gone);
    }
    let counted = hits(&running, stats);
    assert_eq!(hits(&running, returned), counted);

    // A gone probe stays gone. A later registration uses the module that is loaded then.
    have(&mut running, "load", 2);
    have(&mut running, "stats", 2);
    assert_eq!(
        (state(setup), state(stats)),
        (ProbeState::Gone, ProbeState::Gone)
    );
    assert_eq!((hits(&running, setup), hits(&running, stats)), (1, counted));
    let again = running.register(probe("p dummy:dummy_get_stats64"));
    assert_eq!(state(again), ProbeState::Placed);
    have(&mut running, "stats", 3);
    machine
        .unregister(&[setup, init, stats, returned, nowhere])
        .expect("registered");
    have(&mut running, "unload", 2);
    assert_eq!(state(again), ProbeState::Gone);
    machine.unregister(&[again]).expect("registered");
    machine.console_input(b"end\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let of_init: Vec<_> = events.iter().filter(|event| event.probe == init).collect();
    assert_eq!(of_init.len(), 1);
    assert!(matches!(of_init[0].kind, EventKind::Return(_)));
    assert_eq!(of_init[0].regs.rax, 0);
    let read = [stats, returned, again].map(|id| by_cat(&events, id));
    assert_eq!(read, [1, 1, 1]);
}

#[test]
fn probes_of_one_module_leave_the_text_of_others_alone() {
    if rig("several modules").is_none() {
        return;
    }
    let mut running = boot(2);
    let machine = running.machine.clone();
    have(&mut running, "other", 1);
    let named = [(3, "crc_itu_t".to_owned()), (8, "dummy".to_owned())];
    let (position, missing) = machine.module_types(&named).expect_err("not loaded");
    let refused = if names::keeps_types_of_modules() {
        position == 8 && matches!(missing, Refused::ModuleNotLoaded { .. })
    } else {
        position == 3
    };
    assert!(refused, "{position}: {missing:?}");
    have(&mut running, "load", 1);
    if names::keeps_types_of_modules() {
        let types = machine.module_types(&named).expect("they are loaded");
        let taken = types["dummy"]
            .function("dummy_xmit")
            .expect("a function of it");
        let names: Vec<_> = taken.parameters.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["skb", "dev"]);
        assert!(types["dummy"].function("crc_itu_t").is_err());
        assert!(types["crc_itu_t"].function("crc_itu_t").is_ok());
    }
    // Registered disabled, to get the functions' addresses.
    let disabled = |definition: &str| ProbeSpec {
        disabled: true,
        ..probe(definition)
    };
    let ids = [
        "p crc_itu_t:crc_itu_t",
        "p dummy:dummy_xmit",
        "p dummy:dummy_get_stats64",
    ]
    .map(|definition| running.register(disabled(definition)));
    let at = ids.map(|id| info(&machine, id).addr.expect("placed"));
    let original = at.map(|at| text_at(&running, at));
    let by_name = running.register(probe("p dummy_get_stats64"));
    let address = at[2];
    let by_address = running.register(probe(&format!("p {address}")));
    assert_eq!(text_at(&running, at[0]), original[0]);
    assert_eq!(text_at(&running, at[1]), original[1]);
    assert_eq!(text_at(&running, at[2])[0], 0xcc);
    assert_eq!(text_at(&running, at[2])[1..], original[2][1..]);
    have(&mut running, "stats", 1);
    machine
        .unregister(&[by_name, by_address])
        .expect("registered");
    assert_eq!(at.map(|at| text_at(&running, at)), original);
    machine.enable(&ids).expect("registered");
    for at in at {
        assert_eq!(text_at(&running, at)[0], 0xcc);
    }
    have(&mut running, "unload", 1);
    let states = ids.map(|id| info(&machine, id).state);
    assert_eq!(
        states,
        [ProbeState::Placed, ProbeState::Gone, ProbeState::Gone]
    );
    assert_eq!(text_at(&running, at[0])[0], 0xcc);
    machine.unregister(&ids).expect("registered");
    assert_eq!(text_at(&running, at[0]), original[0]);
    machine.console_input(b"end\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let read = [by_name, by_address].map(|id| by_cat(&events, id));
    assert_eq!(read, [1, 1]);
}

#[test]
fn where_the_engine_watches_modules_users_probe_too() {
    const LOADS: u64 = 4;
    if rig("modules that come and go").is_none() {
        return;
    }
    let loads = LOADS.to_string();
    let file = ["/lib/modules/dummy.ko", "/proc/net/dev"];
    let mut config = guest(2, &["workload", "modules", file[0], &loads, file[1]]);
    config.probes = [
        "p do_init_module",
        "p free_module",
        "r do_init_module",
        "r free_module",
        "p dummy:dummy_setup",
    ]
    .map(probe)
    .to_vec();
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let probes = machine.probes();
    let hits: Vec<_> = probes.iter().map(|probe| probe.counts.hits).collect();
    assert_eq!(hits, [LOADS, LOADS, LOADS, LOADS, 1]);
    assert!(probes.iter().all(|probe| probe.counts.missed == 0));
    assert_eq!(probes[4].state, ProbeState::Gone);
    assert_eq!(events.len() as u64, 4 * LOADS + 1);
}
