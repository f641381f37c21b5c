//! Tests the control of probes and machines while a stock guest is busy: stops at a hit, the global switch, forced
//! mechanisms, and batches of thousands.

use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_hit::event::EventKind;
use hvprobe_linux::symbols::SymbolKind;
use hvprobe_machine::{Event, Machine, Mechanism, ProbeId, ProbeSpec, ProbeState, State};
use hvprobe_spec::Hold;
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig, values};

/// Offset of the first argument in `struct pt_regs` (arch/x86/include/asm/ptrace.h).
const PT_DI: i64 = 112;
const ENTRY: &str = "__x64_sys_getpgid";
/// Function that [`ENTRY`] calls, with the process id in EDI.
const INNER: &str = "do_getpgid";

fn script(commands: &str) -> [&str; 3] {
    ["sh", "-c", commands]
}

fn of(events: &[Event], id: ProbeId) -> Vec<&Event> {
    events.iter().filter(|event| event.probe == id).collect()
}

/// Waits until a hit has stopped the machine. Returns the probe and the CPU of that hit.
fn wait_stopped(machine: &Machine) -> (ProbeId, usize) {
    let mut status = machine.status();
    loop {
        assert!(!matches!(status.state, State::Stopped(_)), "{status:?}");
        if let Some(stopped_at) = status.stopped_at {
            assert_eq!(status.state, State::Paused);
            return stopped_at;
        }
        status = machine.wait_change(&status);
    }
}

#[test]
fn a_hit_stops_the_machine_until_it_is_resumed() {
    const STOPS: usize = 4;
    if rig("stops").is_none() {
        return;
    }
    // One CPU calls the function whose hits stop the machine, another reads a file.
    let commands = "workload reads 1000000 & \
        echo ready; read line; workload calls getpgid 10; kill %1; wait; echo over";
    let mut running = Running::shared(&guest(2, &script(commands)));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let mut spec = probe(&format!("p {ENTRY}"));
    spec.actions.hold = Some(Hold::Stop);
    let before = running.register(probe(&format!("p:before {ENTRY}")));
    let id = running.register(spec);
    let behind = running.register(probe(&format!("p:behind {ENTRY}")));
    machine.console_input(b"\n");
    for stop in 1..=STOPS {
        let (probe, _) = wait_stopped(&machine);
        assert_eq!(probe, id);
        let events = running.wait_events(|events| of(events, id).len() == stop);
        let event = of(events, id)[stop - 1];
        // Memory is still in the state of the hit: the registers of the event lead to the argument.
        let mut argument = [0xff; 8];
        let pt_di = Gva(event.regs.rdi).wrapping_add(PT_DI.cast_unsigned());
        machine.read_kernel(pt_di, &mut argument).expect("mapped");
        assert_eq!(argument, [0; 8]);
        // Both virtual CPUs stay stopped, also while text is changed.
        machine.pause().expect("paused already");
        let runs = || machine.ioctls().iter().map(|i| i.run).collect::<Vec<_>>();
        let standing = runs();
        let hits = |id| info(&machine, id).counts.hits;
        let other = running.register(self::probe("p vfs_read"));
        machine.unregister(&[other]).expect("registered");
        assert_eq!(runs(), standing);
        let stop = stop as u64;
        assert_eq!(
            (hits(before), hits(id), hits(behind)),
            (stop, stop, stop - 1)
        );
        assert_eq!(machine.status().stopped_at.map(|(id, _)| id), Some(id));
        if stop == STOPS as u64 {
            machine.unregister(&[id]).expect("registered");
        }
        machine.resume().expect("paused");
    }
    running.wait_for("over");
    let counts = |id| info(&machine, id).counts;
    let (before, behind) = (counts(before), counts(behind));
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(values(&printed, "calls"), [10]);
    assert_eq!((before.hits, before.missed), (10, 0));
    // The probe that stopped the machine was unregistered during the last stop, so the probe after it did not run
    // at that hit.
    assert_eq!(behind.hits + behind.missed, 10);
    assert_eq!(machine.status().stopped_at, None);
}

#[test]
fn the_global_switch_takes_every_patch_out_and_puts_it_back_under_load() {
    const ROUNDS: usize = 10;
    const PROBED: [&str; 3] = [ENTRY, INNER, "do_task_dead"];
    if rig("the global switch").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(2, &["workload", "stdin-hold", "2"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let texts = |running: &Running| PROBED.map(|function| running.text(function));
    let originals = texts(&running);
    let ids = [
        running.register(probe(&format!("p {ENTRY}"))),
        running.register(probe(&format!("r {ENTRY}"))),
        running.register(probe(&format!("p {INNER}+{}", names::behind_entry(INNER)))),
    ];
    let disabled = running.register(ProbeSpec {
        disabled: true,
        ..probe(&format!("p {INNER}"))
    });
    let hits = || ids.map(|id| info(&machine, id).counts.hits);
    let placed = || {
        machine
            .probes()
            .iter()
            .all(|p| p.state == ProbeState::Placed)
    };
    for _ in 0..ROUNDS {
        assert!(machine.armed());
        let since = hits();
        running
            .wait_while_running(|_| hits().iter().zip(since).all(|(now, then)| *now >= then + 5));
        for (now, original) in texts(&running).iter().zip(&originals) {
            assert_ne!(now, original);
        }
        machine.set_armed(false).expect("running");
        assert!(!machine.armed());
        let off = hits();
        // While the switch is off, a new probe waits with the others.
        let late = running.register(probe(&format!("r {INNER}")));
        assert_eq!(texts(&running), originals);
        assert!(placed());
        assert_eq!(machine.probes().iter().filter(|p| p.disabled).count(), 1);
        machine.unregister(&[late]).expect("registered");
        // Nothing was counted while the switch was off.
        assert_eq!(hits(), off);
        machine.set_armed(true).expect("running");
    }
    assert_eq!(info(&machine, disabled).counts.hits, 0);
    machine.set_armed(false).expect("running");
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    machine.set_armed(true).expect("running");
}

#[test]
fn a_forced_mechanism_counts_every_call_of_two_busy_vcpus() {
    if rig("forced mechanisms").is_none() {
        return;
    }
    // `mov 0x70(%rdi),%edi`, which can only be executed as a copy.
    let definition = format!("p {ENTRY}+{}", names::behind_entry(ENTRY));
    for (wanted, post) in [
        (Some(Mechanism::Boosted), false),
        (Some(Mechanism::Stepped), false),
        (None, true),
    ] {
        let mut spec = ProbeSpec {
            mechanism: wanted,
            ..probe(&definition)
        };
        spec.actions.post = post;
        let mut config = guest(2, &["workload", "hammer", "1", "2"]);
        config.probes = vec![spec];
        let mut running = Running::shared(&config);
        let machine = running.machine.clone();
        running.wait_live();
        let mechanism = machine.probes()[0].mechanism;
        let (ending, events, printed) = running.finish();
        assert_clean(&ending, &printed, 0);
        let counts = machine.probes()[0].counts;
        let calls = u64::try_from(values(&printed, "calls")[0]).expect("a number of calls");
        assert_eq!((counts.hits, counts.missed, counts.faults), (calls, 0, 0));
        assert_eq!(mechanism, Some(wanted.unwrap_or(Mechanism::Stepped)));
        let posts = events.iter().filter(|event| event.kind == EventKind::Post);
        assert_eq!(posts.count() as u64, if post { calls } else { 0 });
        eprintln!("{definition} {mechanism:?}: {calls} calls");
    }
    // The entry nop needs no copy, so it cannot be boosted.
    let mut config = guest(1, &["workload", "hammer", "1", "1"]);
    config.probes = vec![ProbeSpec {
        mechanism: Some(Mechanism::Boosted),
        ..probe(&format!("p {ENTRY}"))
    }];
    let error = Machine::boot(config).expect_err("an impossible mechanism");
    assert!(
        chain(&error).ends_with("can only be emulated, not boosted"),
        "{}",
        chain(&error)
    );
}

#[test]
fn thousands_are_registered_in_one_call_or_none() {
    const MANY: usize = 3000;
    if rig("thousands of probes").is_none() {
        return;
    }
    let commands = "echo ready; read line; ls -lR /sys/kernel/mm >/tmp/list; workload reads 10; \
        echo work done; read line";
    let mut running = Running::shared(&guest(2, &script(commands)));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let image = machine.image();
    let names: Vec<&str> = image
        .symbols()
        .iter()
        .filter(|symbol| symbol.kind == SymbolKind::Text && image.is_ftrace_site(symbol.addr))
        .filter(|symbol| !image.is_init_text(symbol.addr) && image.forbidden(symbol.addr).is_none())
        .filter(|symbol| image.symbols().lookup(symbol.name).is_ok())
        .map(|symbol| symbol.name)
        .collect();
    let step = names.len() / MANY;
    let names: Vec<&str> = names.into_iter().step_by(step).take(MANY).collect();
    assert_eq!(names.len(), MANY);
    let texts = || -> Vec<[u8; 8]> {
        let text = |name: &&str| {
            let mut text = [0; 8];
            let at = running.address(name);
            machine.read_kernel(at, &mut text).expect("mapped");
            text
        };
        names.iter().map(text).collect()
    };
    let originals = texts();
    let mut batch: Vec<_> = names
        .iter()
        .map(|name| probe(&format!("p {name}")))
        .collect();

    batch.insert(MANY / 2, probe("p exc_int3"));
    let began = Instant::now();
    let error = machine.register(&batch).expect_err("one cannot be probed");
    let refused = began.elapsed();
    assert!(
        chain(&error).starts_with(&format!("probe {} (p exc_int3): ", MANY / 2)),
        "{error:?}"
    );
    assert_eq!(machine.probes(), []);
    assert!(texts() == originals);

    batch.remove(MANY / 2);
    let began = Instant::now();
    let ids = machine
        .register(&batch)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let registered = began.elapsed();
    let now = texts();
    assert!(
        now.iter()
            .zip(&originals)
            .all(|(now, then)| now[0] == 0xcc && now[1..] == then[1..])
    );
    machine.console_input(b"\n");
    drop(running.wait_for("work done"));
    let probes = machine.probes();
    let hit = probes.iter().filter(|probe| probe.counts.hits > 0).count();
    assert!(hit > 20, "{hit} of {MANY} were hit");
    assert!(probes.iter().all(|probe| probe.state == ProbeState::Placed));
    let began = Instant::now();
    machine.unregister(&ids).expect("registered");
    let unregistered = began.elapsed();
    assert_eq!(machine.probes(), []);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    eprintln!(
        "{MANY} probes: refused in {refused:?}, registered in {registered:?}, {hit} hit, \
         unregistered in {unregistered:?}"
    );
}
