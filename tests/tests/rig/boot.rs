//! Tests that a stock kernel boots under our VMM, and that probes in it count exactly.

use hvprobe_machine::{Mechanism, ProbeSpec};
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, guest, is_short, mitigated, probe, rig};

fn boots_with(cpus: u32, test: &str) {
    if rig(test).is_none() {
        return;
    }
    let mut running = Running::boot(guest(cpus, &["sh", "-c", "nproc; exit 7"]));
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 7);
    assert!(
        printed.lines().any(|line| line.trim() == cpus.to_string()),
        "the guest does not see {cpus} CPUs:\n{printed}"
    );
}

#[test]
fn a_stock_kernel_boots_with_one_vcpu_and_passes_its_status_on() {
    boots_with(1, "boot with 1 vCPU");
}

#[test]
fn a_stock_kernel_boots_with_two_vcpus_and_passes_its_status_on() {
    boots_with(2, "boot with 2 vCPUs");
}

#[test]
fn a_probe_on_a_system_call_counts_exactly_the_calls_of_the_workload() {
    const CALLS: usize = 1000;
    if rig("exact count").is_none() {
        return;
    }
    let mut config = guest(1, &["workload", "calls", "getpgid", "1000"]);
    config.probes = vec![probe("p:entry __x64_sys_getpgid")];
    let (ending, events, printed) = Running::boot(config).finish();
    assert_clean(&ending, &printed, 0);
    let ours: Vec<_> = events
        .iter()
        .filter(|event| event.task.is_some_and(|task| task.comm() == "workload"))
        .collect();
    assert_eq!(ours.len(), CALLS, "{printed}");
    assert_eq!(events.len(), CALLS, "somebody else calls getpgid");
    let first = ours[0];
    let task = first.task.expect("filtered by it");
    assert!(task.pid > 1 && task.pid == task.tgid, "{task:?}");
    assert!(ours.iter().all(|event| event.regs.rip == first.regs.rip));
    for pair in ours.windows(2) {
        let times = pair.iter().map(|event| (event.guest_tsc, event.host_ns));
        let [before, after] = times.collect::<Vec<_>>()[..] else {
            unreachable!("two of them");
        };
        assert!(
            before.0 < after.0 && before.1 < after.1,
            "{before:?}, {after:?}"
        );
    }
}

/// Retpolines and return thunks replace the kernel's indirect calls and returns. Where the processor needs it,
/// a system call enters the kernel with page tables of its own.
#[test]
fn a_guest_with_its_mitigations_on_is_probed_like_any_other() {
    const CALLS: u64 = 500;
    if rig("mitigations").is_none() {
        return;
    }
    let script = "cat /sys/devices/system/cpu/vulnerabilities/*; grep -m 1 flags /proc/cpuinfo; \
                  workload calls getpgid 500";
    // Page-table isolation as the kernel chooses it, and forced on, each with and without optimization.
    let ways = [(false, true), (true, false), (false, false), (true, true)];
    for (pti, optimize) in ways.into_iter().take(if is_short() { 2 } else { 4 }) {
        let mut config = guest(1, &["sh", "-c", script]);
        config.cmdline = mitigated();
        if pti {
            config.cmdline += " pti=on";
        }
        config.optimize = optimize;
        let inner = names::behind_entry("do_getpgid");
        let mut stepped = probe(&format!("p do_getpgid+{inner}"));
        stepped.mechanism = Some(Mechanism::Stepped);
        let behind = names::behind_entry("__x64_sys_getpgid");
        let ways = [
            "p __x64_sys_getpgid",
            &format!("p __x64_sys_getpgid+{behind}"),
            "r do_getpgid",
            "r __x64_sys_getpgid",
        ];
        config.probes = ways.map(probe).into_iter().chain([stepped]).collect();
        let tick = format!("p {}", names::own("scheduler_tick"));
        let hot = ["p vfs_read", "r vfs_read", &tick, "r schedule"];
        config.probes.extend(hot.map(|definition| ProbeSpec {
            maxactive_auto: definition.starts_with('r'),
            ..probe(definition)
        }));
        let mut running = Running::boot(config);
        let machine = running.machine.clone();
        let (ending, _, printed) = running.finish();
        assert_clean(&ending, &printed, 0);
        assert!(printed.contains("Mitigation: "), "{printed}");
        let flags = printed.lines().find(|line| line.starts_with("flags"));
        let isolates = flags.is_some_and(|line| line.split_whitespace().any(|it| it == "pti"));
        assert!(isolates || !pti, "no page-table isolation:\n{printed}");
        for (n, probe) in machine.probes().iter().enumerate() {
            let counts = probe.counts;
            let what = format!(
                "{}, pti: {pti}, optimize: {optimize}: {counts:?}",
                probe.name
            );
            if n < 5 {
                assert_eq!((counts.hits, counts.missed), (CALLS, 0), "{what}");
            } else {
                assert!(counts.hits > 0 && counts.missed == 0, "{what}");
            }
        }
    }
}
