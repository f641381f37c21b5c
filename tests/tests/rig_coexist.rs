//! Probes beside the guest's own ways of patching text and catching breakpoints: kprobes and
//! kretprobes of its own, static keys and tracepoints, a debugger in user space, and ftrace on the
//! very functions that we probe.

use hvprobe_tests::rig::{Running, assert_clean, guest, info, probe, rig, values};
use hvprobe_vmm::machine::{ProbeSpec, ProbeState};

const FUNCTION: &str = "__x64_sys_getpgid";

#[test]
fn the_guests_own_breakpoints_and_patches_go_on_beside_ours() {
    if rig("the guest's own breakpoints").is_none() {
        return;
    }
    // Ours are on the caller of the function that the guest's own probes are in.
    let script = "workload calls getpgid 50; \
                  workload kprobe-event do_getpgid+5 100 3; \
                  workload kretprobe-event do_getpgid 100 3; \
                  workload static-keys 20; \
                  workload ptrace-debugger 20; \
                  workload calls getpgid 50";
    let mut config = guest(2, &["sh", "-c", script]);
    let post = ProbeSpec {
        mechanism: Some(hvprobe_vmm::machine::Mechanism::Stepped),
        ..probe(&format!("p {FUNCTION}+5"))
    };
    config.probes = vec![
        probe(&format!("p {FUNCTION}")),
        probe(&format!("r {FUNCTION}")),
        post,
    ];
    let running = Running::boot(config);
    let machine = running.machine.clone();
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(values(&printed, "kprobe_profile"), [300, 300], "{printed}");
    let calls: i64 = values(&printed, "calls").iter().sum();
    for probe in machine.probes() {
        let counted = probe.counts.hits + probe.counts.missed;
        assert_eq!(i64::try_from(counted), Ok(calls), "{}", probe.name);
        assert_eq!(probe.state, ProbeState::Placed, "{}", probe.name);
    }
}

#[test]
fn a_function_entry_is_left_to_the_guests_ftrace_while_it_traces_it() {
    if rig("the guest's ftrace").is_none() {
        return;
    }
    let script = format!(
        "cd /sys/kernel/tracing; \
         workload calls getpgid 100; \
         echo {FUNCTION} > set_ftrace_filter; echo function > current_tracer; \
         workload calls getpgid 100; \
         echo traced; read line; \
         grep -c {FUNCTION} trace > /tmp/traced; read lines < /tmp/traced; echo \"lines: $lines\"; \
         echo nop > current_tracer; \
         workload calls getpgid 100"
    );
    let mut config = guest(2, &["sh", "-c", &script]);
    config.probes = vec![probe(&format!("p {FUNCTION}")), probe("r vfs_read")];
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    running.wait_for("traced");
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    let entry = info(&machine, ids[0]);
    assert_eq!(entry.state, ProbeState::Gone);
    assert_eq!(entry.counts.hits, 100);
    assert_eq!(info(&machine, ids[1]).state, ProbeState::Placed);
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(values(&printed, "lines"), [100], "{printed}");
    let entry = info(&machine, ids[0]);
    assert_eq!(entry.counts.hits, 200, "{printed}");
    assert_eq!(entry.state, ProbeState::Placed);
}
