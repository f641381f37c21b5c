//! Tests probes on, in and near features of newer kernels: return thunks, BPF programs called at a function's
//! entry, lazy preemption, Rust.
//!
//! Which of these exist depends on the kernel and the processor, and the guest shows it. For a missing feature the
//! test prints a line that starts with `skipped:`.

use hvprobe_linux::symbols::SymbolKind;
use hvprobe_machine::{Machine, MachineConfig, Mechanism, ProbeSpec, ProbeState, Refusals};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, mitigated, optimizing_guest, probe, rig, rig_cpus,
    rounds, values,
};

const FUNCTION: &str = "__x64_sys_getpgid";
const INNER: &str = "do_getpgid";

/// Returns probes of all kinds on the two functions.
fn all_ways() -> Vec<ProbeSpec> {
    let inside = |function: &str| format!("p {function}+{}", names::behind_entry(function));
    let stepped = ProbeSpec {
        mechanism: Some(Mechanism::Stepped),
        ..probe(&inside(INNER))
    };
    let ways = [
        format!("p {FUNCTION}"),
        inside(FUNCTION),
        format!("p {INNER}"),
        format!("r {FUNCTION}"),
        format!("r {INNER}"),
    ];
    let ways = ways.iter().map(|definition| probe(definition));
    ways.chain([stepped]).collect()
}

/// Probes functions that return through one of the kernel's thunks. They do so on processors that need it, or
/// when the command line forces it.
fn returns_through_a_thunk(optimize: bool) {
    const CALLS: u64 = 300;
    const WANTED: &str = "untrained return thunk";
    let script = format!(
        "cat /sys/devices/system/cpu/vulnerabilities/retbleed; \
         echo ready; read line; workload calls getpgid {CALLS}; echo over; read line"
    );
    let mut running = Running::boot(MachineConfig {
        cmdline: mitigated() + " retbleed=force,unret",
        optimize,
        ..guest(2, &["sh", "-c", &script])
    });
    let printed = running.wait_for("ready");
    if !printed.contains(WANTED) {
        eprintln!("skipped: this kernel has no {WANTED}:\n{printed}");
    }
    let machine = running.machine.clone();
    let texts = [FUNCTION, INNER].map(|function| running.text(function));
    let ids = machine.register(&all_ways());
    let ids = ids.unwrap_or_else(|error| panic!("{}", chain(&error)));
    machine.console_input(b"\n");
    running.wait_for("over");
    for id in &ids {
        let info = info(&machine, *id);
        let counts = (info.counts.hits, info.counts.missed, info.counts.orphans);
        assert_eq!(counts, (CALLS, 0, 0), "{info:?}");
    }
    machine.unregister(&ids).expect("registered");
    assert_eq!([FUNCTION, INNER].map(|name| running.text(name)), texts);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn functions_that_return_through_a_thunk_are_probed_like_any_other() {
    if rig("return thunks").is_some() {
        for optimize in [false, true] {
            returns_through_a_thunk(optimize);
        }
    }
}

#[test]
fn a_function_entry_is_left_to_a_bpf_program_of_the_guest_while_that_is_there() {
    const CALLS: u64 = 100;
    if rig("the guest's fentry").is_none() {
        return;
    }
    let ways = [true, false];
    for &optimize in &ways[..rounds(2)] {
        let calls = CALLS.to_string();
        let command = ["workload", "fentry", FUNCTION, &calls];
        let mut config = MachineConfig {
            optimize,
            ..guest(2, &command)
        };
        let inside = format!("p {FUNCTION}+{}", names::behind_entry(FUNCTION));
        config.probes = [format!("p {FUNCTION}"), inside, format!("r {INNER}")]
            .iter()
            .map(|definition| probe(definition))
            .collect();
        let mut running = Running::boot(config);
        let machine = running.machine.clone();
        running.wait_for("attached");
        let probes = machine.probes();
        assert_eq!(probes[0].state, ProbeState::Gone, "{:?}", probes[0]);
        assert_eq!(probes[1].state, ProbeState::Placed, "{:?}", probes[1]);
        machine.console_input(b"\n");
        let (ending, printed) = running.end();
        assert_clean(&ending, &printed, 0);
        let runs: i64 = values(&printed, "runs").iter().sum();
        assert_eq!(u64::try_from(runs), Ok(CALLS), "{printed}");
        let hits: Vec<u64> = machine.probes().iter().map(|it| it.counts.hits).collect();
        assert_eq!(hits, [2 * CALLS, 3 * CALLS, 3 * CALLS], "{printed}");
    }
}

#[test]
fn tasks_that_are_preempted_lazily_are_all_counted() {
    const HITS: u64 = 2000;
    if rig("lazy preemption").is_none() {
        return;
    }
    let cpus = u32::try_from(rig_cpus()).expect("few").max(2);
    let threads = 8 * cpus;
    let script = format!(
        "mount -t debugfs debugfs /sys/kernel/debug; cat /sys/kernel/debug/sched/preempt; \
         workload stdin-hold {threads}"
    );
    let mut config = optimizing_guest(cpus, &["sh", "-c", &script]);
    config.cmdline += " preempt=lazy";
    config.probes = [
        format!("p {FUNCTION}"),
        format!("p {INNER}"),
        format!("r{threads} {FUNCTION}"),
    ]
    .map(|definition| probe(&definition))
    .into();
    let mut running = Running::boot(config);
    let printed = running.wait_for("ready");
    if !printed.contains("(lazy)") {
        eprintln!("skipped: this kernel is not preempted lazily");
    }
    let machine = running.machine.clone();
    let least = |machine: &Machine| {
        let hits = machine.probes().into_iter().map(|it| it.counts.hits);
        hits.min().unwrap_or(0)
    };
    running.wait_while_running(|machine| least(machine) > HITS);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let calls: i64 = values(&printed, "calls").iter().sum();
    let calls = u64::try_from(calls).expect("a number of calls");
    for probe in machine.probes() {
        let counts = (probe.counts.hits, probe.counts.missed, probe.counts.orphans);
        assert_eq!(counts, (calls, 0, 0), "{probe:?}");
    }
}

#[test]
fn functions_in_rust_take_probes_and_are_as_they_were_afterwards() {
    if rig("Rust").is_none() {
        return;
    }
    let mut running = Running::boot(optimizing_guest(2, &["workload", "stdin-hold", "2"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    // Prefix of Rust's mangled names.
    let Ok(found) = machine.image().symbols().glob("_R*") else {
        panic!("it is a pattern");
    };
    let functions: Vec<String> = found
        .filter(|symbol| symbol.kind == SymbolKind::Text && symbol.size >= 16)
        .map(|symbol| symbol.name.to_string())
        .collect();
    if functions.is_empty() {
        eprintln!("skipped: nothing in this kernel is written in Rust");
    }
    let unique = |name: &&String| machine.image().symbols().lookup(name).is_ok();
    let functions: Vec<&String> = functions.iter().filter(unique).collect();
    let texts: Vec<_> = functions.iter().map(|name| running.text(name)).collect();
    let specs: Vec<ProbeSpec> = functions
        .iter()
        .flat_map(|name| [probe(&format!("p {name}")), probe(&format!("r {name}"))])
        .collect();
    if !specs.is_empty() {
        let batch = machine.register_batch(&specs, Refusals::Skip);
        let ids = batch
            .unwrap_or_else(|error| panic!("{}", chain(&error)))
            .ids();
        let probes = machine.probes();
        let jumps = probes
            .iter()
            .filter(|it| it.mechanism == Some(Mechanism::Optimized));
        let (jumps, all, wanted) = (jumps.count(), ids.len(), specs.len());
        eprintln!("{all} of {wanted} probes in Rust, {jumps} of them jumps");
        assert!(all * 2 > wanted, "most are refused");
        let own = running.register(probe(&format!("p {FUNCTION}")));
        running.wait_while_running(|machine| info(machine, own).counts.hits > 500);
        machine.unregister(&ids).expect("registered");
        for (name, text) in functions.iter().zip(&texts) {
            assert_eq!(&running.text(name), text, "{name}");
        }
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
