//! Tests many probes and too many hits in a stock guest: patterns, a batch of 10,000 probes, and budgets.

use std::time::Instant;

use hvprobe_linux::symbols::SymbolKind;
use hvprobe_machine::{Budget, Excess, ProbeSpec, ProbeState, Refusals};
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig};

const FUNCTION: &str = "__x64_sys_getpgid";

#[test]
fn pattern_counts_every_call_of_each_function_that_matches() {
    const CALLS: u64 = 200;
    if rig("patterns").is_none() {
        return;
    }
    let script = "echo ready; read line; workload calls getpgid 200";
    let mut running = Running::shared(&guest(1, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let done = machine
        .register_batch(
            &[probe("p __x64_sys_getp[!p]*"), probe("r vfs_*")],
            Refusals::Fail,
        )
        .expect("functions that can be probed");
    eprintln!(
        "{} probes, stopped for {:?}",
        done.probes.len(),
        done.stopped_for
    );
    let symbols = machine.image().symbols();
    let expected = symbols
        .iter()
        .filter(|symbol| symbol.kind == SymbolKind::Text && machine.image().is_text(symbol.addr))
        .filter(|symbol| symbol.name.starts_with("vfs_") && !symbol.name.contains('.'))
        .count();
    let returns = done.probes.iter().filter(|(index, _)| *index == 1);
    assert_eq!(returns.count(), expected);
    machine.console_input(b"\n");
    let (ending, _) = running.end();
    assert!(
        machine
            .probes()
            .iter()
            .all(|probe| probe.state == ProbeState::Placed)
    );
    let (mut reads, mut calls) = (0, 0);
    for (index, id) in done.probes {
        let info = info(&machine, id);
        assert_eq!(info.counts.missed, 0, "{}", info.name);
        match info.name.as_str() {
            "p___x64_sys_getpgid_0" => {
                calls += info.counts.hits;
                assert_eq!(index, 0);
            }
            "r_vfs_read_0" => reads += info.counts.hits,
            _ => {}
        }
    }
    assert_eq!(calls, CALLS);
    assert!(reads > 0);
    assert_eq!(ending.guest_status, Some(0));
}

#[test]
fn refused_functions_are_reported_and_the_rest_is_planted_on_request() {
    if rig("patterns with refused functions").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(1, &["sh", "-c", "echo ready; read line"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let batch = [probe("p *debug*")];
    let error = chain(&machine.register(&batch).expect_err("some are noinstr"));
    eprintln!("{error}");
    assert!(error.contains("none was planted"), "{error}");
    assert_eq!(machine.probes(), []);
    let done = machine
        .register_batch(&batch, Refusals::Skip)
        .expect("the rest can be planted");
    for skipped in &done.skipped {
        eprintln!("{}: {}", skipped.target, chain(&skipped.why));
    }
    assert!(!done.skipped.is_empty() && done.probes.len() > done.skipped.len());
    assert!(
        machine
            .probes()
            .iter()
            .all(|probe| probe.state == ProbeState::Placed)
    );
    machine.unregister(&done.ids()).expect("registered");
    let error = chain(&machine.register(&[probe("p vfs_raed*")]).expect_err("none"));
    assert!(error.contains("did you mean"), "{error}");
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn ten_thousand_probes_are_planted_in_one_stop_and_count_exactly() {
    const PROBES: usize = 10_000;
    const CALLS: u64 = 100;
    if rig("10,000 probes").is_none() {
        return;
    }
    let script = "echo ready; read line; workload calls getpgid 100; echo work done; read line";
    let mut running = Running::shared(&guest(1, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let symbols = machine.image().symbols();
    let is_alone = |name: &str| symbols.lookup(name).is_ok();
    let functions: Vec<&str> = symbols
        .iter()
        .filter(|symbol| {
            // The site of ftrace is at the start of the function, or after the ENDBR64 there.
            let mut entries = [0, 4]
                .map(|into| symbol.addr.wrapping_add(into))
                .into_iter();
            entries.any(|at| machine.image().is_ftrace_site(at))
        })
        .filter(|symbol| machine.image().is_text(symbol.addr) && is_alone(symbol.name))
        .filter(|symbol| symbol.name != FUNCTION)
        .map(|symbol| symbol.name)
        .collect();
    assert!(functions.len() > PROBES, "{}", functions.len());
    // Spreads the probes over the kernel.
    let spread = functions.iter().step_by(functions.len() / PROBES);
    let mut batch: Vec<_> = spread.map(|name| probe(&format!("p {name}"))).collect();
    batch.push(probe(&format!("p {FUNCTION}")));
    let since = Instant::now();
    let done = machine
        .register_batch(&batch, Refusals::Skip)
        .expect("the guest stops");
    eprintln!(
        "{} probes in {:?}, stopped for {:?}; {} refused",
        done.probes.len(),
        since.elapsed(),
        done.stopped_for,
        done.skipped.len()
    );
    assert!(done.probes.len() >= PROBES * 9 / 10);
    machine.console_input(b"\n");
    running.wait_for("work done");
    let since = Instant::now();
    let ids = done.ids();
    let counted = info(&machine, ids[ids.len() - 1]);
    machine.unregister(&ids).expect("registered");
    eprintln!("unregistered in {:?}", since.elapsed());
    assert_eq!((counted.counts.hits, counted.counts.missed), (CALLS, 0));
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

/// Returns a probe of the function with a budget.
fn budgeted(rate: u32, excess: Excess) -> ProbeSpec {
    ProbeSpec {
        budget: Some(Budget {
            max_rate: Some(rate),
            max_share: None,
            excess,
        }),
        ..probe(&format!("p {FUNCTION}"))
    }
}

#[test]
fn sampled_and_counted_hits_together_are_all_calls() {
    const RATE: u32 = 20;
    const CALLS: u64 = 2000;
    if rig("sampling").is_none() {
        return;
    }
    let script = "echo ready; read line; workload calls getpgid 2000";
    let mut running = Running::shared(&guest(1, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let id = running.register(budgeted(RATE, Excess::Sample));
    let mut stream = machine.subscribe(vec![id], 1 << 12);
    let since = Instant::now();
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    let windows = since.elapsed().as_secs() + 2;
    let counts = info(&machine, id).counts;
    eprintln!("{counts:?} in {windows} windows");
    assert_eq!(counts.hits + counts.throttled + counts.missed, CALLS);
    assert!(counts.throttled > 0 && counts.hits <= u64::from(RATE) * windows);
    let (mut events, mut throttled) = (0, 0);
    assert!(machine.flush_events());
    // Throttled hits are reported a while later.
    while events + throttled < counts.hits + counts.throttled {
        let delivery = stream.blocking_next().expect("the guest goes on");
        assert_eq!(delivery.dropped, 0);
        events += delivery.events.len() as u64;
        throttled += delivery
            .throttled
            .iter()
            .map(|notice| notice.throttled.count)
            .sum::<u64>();
    }
    assert_eq!((events, throttled), (counts.hits, counts.throttled));
    assert_clean(&ending, &printed, 0);
}

#[test]
fn probe_beyond_its_budget_is_turned_off_and_can_be_enabled_again() {
    const RATE: u32 = 50;
    if rig("turning off").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(1, &["workload", "stdin-hold", "1"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let original = running.text(FUNCTION);
    let id = running.register(budgeted(RATE, Excess::Disable));
    for round in 1..=2 {
        running.wait_while_running(|machine| info(machine, id).disabled);
        let info = info(&machine, id);
        assert!(info.turned_off, "{info:?}");
        assert_eq!(info.counts.hits, round * u64::from(RATE));
        assert!(info.counts.throttled > 0);
        assert_eq!(running.text(FUNCTION), original);
        if round == 1 {
            machine.enable(&[id]).expect("can be planted");
        }
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
