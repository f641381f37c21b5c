//! Tests probes beside the guest's own ways of patching text and catching breakpoints: its own kprobes and
//! kretprobes, static keys and tracepoints, a debugger in user space, and ftrace on the functions that we probe.

mod any_order;

use hvprobe_arch::insn::instruction_len;
use hvprobe_engine::Unoptimized;
use hvprobe_machine::{Mechanism, ProbeId, ProbeSpec, ProbeState, Refusals};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, optimizing_guest, probe, rig, values,
};

const FUNCTION: &str = "__x64_sys_getpgid";

#[test]
fn the_guests_own_breakpoints_and_patches_go_on_beside_ours() {
    if rig("the guest's own breakpoints").is_none() {
        return;
    }
    // Our probes are on `FUNCTION`, and the guest's own probes on a function that it calls.
    let inner = names::behind_entry("do_getpgid");
    let script = &format!(
        "workload calls getpgid 50; \
         workload kprobe-event do_getpgid+{inner} 100 3; \
         workload kretprobe-event do_getpgid 100 3; \
         workload static-keys 3; \
         workload ptrace-debugger 20; \
         workload calls getpgid 50"
    );
    let mut config = guest(2, &["sh", "-c", script]);
    let post = ProbeSpec {
        mechanism: Some(hvprobe_machine::Mechanism::Stepped),
        ..probe(&format!("p {FUNCTION}+{}", names::behind_entry(FUNCTION)))
    };
    config.probes = vec![
        probe(&format!("p {FUNCTION}")),
        probe(&format!("r {FUNCTION}")),
        post,
    ];
    let mut running = Running::boot(config);
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

/// Patterns that match hundreds of functions. The guest calls few of them, because it does not use the network and
/// only reads files.
const HUNDREDS: [&str; 4] = ["tcp_*", "vfs_*", "ip_*", "skb_*"];

#[test]
fn a_guest_that_traces_hundreds_of_probed_functions_goes_on() {
    if rig("ftrace at hundreds of probes").is_none() {
        return;
    }
    let filter = HUNDREDS.join(" ");
    let script = format!(
        "cd /sys/kernel/tracing; echo '{filter}' > set_ftrace_filter; echo ready; read line; \
         echo function > current_tracer; echo traced; read line; \
         echo nop > current_tracer; echo given back; read line"
    );
    let mut running = Running::boot(guest(1, &["sh", "-c", &script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let specs = HUNDREDS.map(|pattern| probe(&format!("p {pattern}")));
    let registered = machine.register_batch(&specs, Refusals::Skip);
    let ids = registered.expect("some can be probed").ids();
    let count = |state| {
        let probes = machine.probes();
        probes.iter().filter(|probe| probe.state == state).count()
    };
    assert!(ids.len() > 300, "{}", ids.len());
    assert_eq!(count(ProbeState::Placed), ids.len());
    machine.console_input(b"\n");
    running.wait_for("traced");
    // Functions without an entry nop are not traced.
    let traced = count(ProbeState::Gone);
    assert!(traced * 10 > ids.len() * 9, "{traced} of {}", ids.len());
    machine.console_input(b"\n");
    running.wait_for("given back");
    assert_eq!(count(ProbeState::Placed), ids.len());
    machine.unregister(&ids).expect("registered");
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
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
         echo nop > current_tracer; echo > set_ftrace_filter; \
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

/// A function in which a jump can displace several instructions.
const SPANNED: &str = "do_getpgid";

/// Returns an offset into [`SPANNED`] at which a probe gets a jump over several instructions, and the offset of the
/// second of these instructions.
fn spanned(running: &Running) -> [u64; 2] {
    let start = running.address(SPANNED);
    let code = running.text(SPANNED);
    let is_jump = |id: &ProbeId| {
        let mechanism = info(&running.machine, *id).mechanism;
        mechanism == Some(Mechanism::Optimized)
    };
    let second = |offset: u64| {
        let spec = probe(&format!("p {SPANNED}+{offset}"));
        let registered = running.machine.register_batch(&[spec], Refusals::Skip);
        let ids = registered.ok()?.ids();
        let jumps = !ids.is_empty() && ids.iter().all(is_jump);
        running.machine.unregister(&ids).expect("registered");
        let rest = &code[usize::try_from(offset).expect("small")..];
        let len = instruction_len(rest, start.wrapping_add(offset))?;
        (jumps && len < 5).then_some(offset + len as u64)
    };
    (1..64)
        .find_map(|offset| Some([offset, second(offset)?]))
        .expect("a jump over several instructions")
}

#[test]
fn a_jump_and_the_guests_own_kprobe_never_meet() {
    if rig("jumps beside the guest's kprobes").is_none() {
        return;
    }
    let own = "/sys/kernel/tracing/events/kprobes/own";
    let script = format!(
        "echo ready; cd /sys/kernel/tracing; \
         while read offset && test $offset != end; do \
           if echo \"p:own {SPANNED}+$offset\" >> kprobe_events; \
           then echo \"own: 1\"; else echo \"own: 0\"; fi; \
           read line; \
           if test -d {own}; then echo 1 > {own}/enable; fi; \
           workload calls getpgid 100; \
           if test -d {own}; then echo 0 > {own}/enable; \
             cat kprobe_profile > /tmp/profile; read name hits misses < /tmp/profile; \
             echo \"profile: $hits\"; fi; \
           workload calls getpgid 100; \
           echo over; read line; \
           workload calls getpgid 100; \
           if test -d {own}; then echo -:own >> kprobe_events; fi; \
           echo \"gone: 1\"; \
           until read -t 1 line; do \
             for n in 1 2 3 4 5 6 7 8; do workload nothing & done; wait; \
           done; \
         done"
    );
    // Where an int3 cannot guard an instruction under a jump, a scan looks for tasks at that instruction. It would
    // mistake stale words in freed memory and on the stacks of ended tasks for such tasks. So the guest clears
    // freed memory and, until it reads a line, starts tasks that overwrite these stacks.
    let mut config = optimizing_guest(2, &["sh", "-c", &script]);
    config.cmdline += " init_on_free=1";
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    let text = running.text(SPANNED);
    let [offset, second] = spanned(&running);
    let spec = probe(&format!("p {SPANNED}+{offset}"));
    let count = |printed: &str, key| values(printed, key).len();

    // Our probe is first. When the guest checks the text, our jump has become an int3, so that the guest refuses
    // its own kprobe; it would take a jump for an ordinary instruction. Shortly afterwards the jump is back,
    // because the guest has registered nothing.
    let id = running.register(spec.clone());
    assert_eq!(info(&machine, id).mechanism, Some(Mechanism::Optimized));
    machine.console_input(format!("{offset}\n").as_bytes());
    let printed = running.wait_printed(|printed| count(printed, "own") == 1);
    assert_eq!(values(&printed, "own"), [0], "{printed}");
    machine.unregister(&[id]).expect("registered");
    assert_eq!(running.text(SPANNED), text);
    machine.console_input(b"\n");
    running.wait_for("over");
    machine.console_input(b"\n");
    running.wait_printed(|printed| count(printed, "gone") == 1);
    machine.console_input(b"\n");

    // The guest's kprobe is first. It is not armed yet, and is under the jump that our probe would get.
    machine.console_input(format!("{second}\n").as_bytes());
    running.wait_printed(|printed| count(printed, "own") == 2);
    let there = probe(&format!("p {SPANNED}+{second}"));
    let refused = machine
        .register(&[there])
        .expect_err("the guest's is there");
    assert!(chain(&refused).contains("kprobe of its own"), "{refused}");
    let id = running.register(spec);
    let why = info(&machine, id).unoptimized;
    let at = running.address(SPANNED).wrapping_add(second);
    assert_eq!(why, Some(Unoptimized::Kprobe { at }));
    machine.console_input(b"\n");
    running.wait_printed(|printed| count(printed, "calls") == 5);
    assert_eq!(info(&machine, id).counts.hits, 200);
    machine.console_input(b"\n");
    running.wait_printed(|printed| count(printed, "gone") == 2);
    // The guest's kprobe is gone, so nothing prevents the jump.
    running.wait_while_running(|machine| info(machine, id).unoptimized.is_none());
    machine.unregister(&[id]).expect("registered");
    assert_eq!(running.text(SPANNED), text);
    machine.console_input(b"\nend\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(values(&printed, "own"), [0, 1], "{printed}");
    assert_eq!(values(&printed, "profile"), [100], "{printed}");
}
