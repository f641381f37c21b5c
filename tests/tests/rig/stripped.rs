//! Tests a kernel without `CONFIG_KALLSYMS_ALL`, BTF, ftrace and kprobes of its own, as sandboxes use it
//! (`--kernel 6.1-stripped`). Every place that the kernel itself patches or looks up must still be protected. Tests
//! that hold for all kernels are in `rig::kernels`.

use hvprobe_arch::Gva;
use hvprobe_engine::Refused;
use hvprobe_linux::image::Forbidden;
use hvprobe_machine::{MachineConfig, Mechanism, ProbeId, ProbeSpec, Refusals};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, optimizing_guest, probe, rig, values,
};

/// Returns whether the test has a rig whose guests run such a kernel.
fn stripped(test: &str) -> bool {
    if rig(test).is_none() {
        return false;
    }
    let is_stripped = names::has_symbols_of_functions_only();
    if !is_stripped {
        eprintln!("skipped: {test} needs a stripped kernel (--kernel 6.1-stripped)");
    }
    is_stripped
}

/// Functions with jump labels of `sched_schedstats`, which the workload flips. With more functions of the
/// scheduler, or with functions that run at each timer tick, an emulated processor would do nothing but handle
/// hits.
const LABELLED: [&str; 2] = ["enqueue_task_fair", "dequeue_task_fair"];

/// Probes every instruction of [`LABELLED`] while the kernel rewrites the jump labels among them. Returns the
/// mechanisms used.
///
/// Uses one processor. In QEMU, a second one may still execute an int3 that the kernel has already removed, and
/// only a kernel with kprobes tolerates that. Such a guest dies even without our probes.
fn rewrite_labels(config: impl FnOnce(u32, &[&str]) -> MachineConfig) -> Vec<Mechanism> {
    let script = "echo ready; read go; workload static-keys 3; echo flipped; read go; \
        workload static-keys 1";
    let mut running = Running::boot(config(1, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    assert_eq!(machine.image().unknown_lists(), []);
    let texts = LABELLED.map(|function| running.text(function));
    let places = LABELLED.map(|function| {
        let offsets = running.instructions(function).into_iter();
        offsets
            .map(move |offset| (function, offset))
            .collect::<Vec<_>>()
    });
    let places = places.concat();
    let spec = |(function, offset): &(&str, u64)| probe(&format!("p {function}+{offset}"));
    let specs: Vec<ProbeSpec> = places.iter().map(spec).collect();
    let registered = machine.register_batch(&specs, Refusals::Skip);
    let registered = registered.unwrap_or_else(|error| panic!("{}", chain(&error)));
    let is_label = |why: &Refused| {
        let forbidden =
            matches!(why, Refused::Forbidden { why, .. } if *why == Forbidden::JumpLabel);
        forbidden
    };
    for function in LABELLED {
        let labels = registered
            .skipped
            .iter()
            .filter(|skipped| places[skipped.index].0 == function && is_label(&skipped.why));
        assert!(labels.count() > 0, "{function} has no jump label");
    }
    let ids = registered.ids();
    assert!(ids.len() > 100, "{} of {}", ids.len(), places.len());
    machine.console_input(b"\n");
    running.wait_for("flipped");
    let mut mechanisms: Vec<_> = ids
        .iter()
        .filter_map(|id| info(&machine, *id).mechanism)
        .collect();
    assert!(ids.iter().any(|id| info(&machine, *id).counts.hits > 0));
    machine.unregister(&ids).expect("registered");
    assert_eq!(LABELLED.map(|function| running.text(function)), texts);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    mechanisms.sort_unstable();
    mechanisms.dedup();
    mechanisms
}

#[test]
fn jump_labels_are_refused_and_rewritten_among_breakpoints() {
    if stripped("jump labels") {
        assert!(!rewrite_labels(guest).contains(&Mechanism::Optimized));
    }
}

#[test]
fn jump_labels_are_rewritten_among_jumps() {
    if stripped("jump labels and jumps") {
        assert!(rewrite_labels(optimizing_guest).contains(&Mechanism::Optimized));
    }
}

/// Functions that copy to user memory, and functions that store a word there. The kernel chooses one of the former
/// by the processor's features.
const TO_USER: [&str; 6] = [
    "copy_user_enhanced_fast_string",
    "copy_user_generic_string",
    "copy_user_generic_unrolled",
    "copy_user_short_string",
    "__put_user_4",
    "__put_user_nocheck_4",
];

#[test]
fn copies_to_user_memory_that_fault_find_their_fixups() {
    const TIMES: usize = 3;
    const EFAULT: i64 = 14;
    /// Address at which nothing is mapped.
    const NOWHERE: u64 = 0x10_0000;
    if !stripped("user memory") {
        return;
    }
    // getcpu(2) and uname(2).
    let script = format!(
        "echo ready; read go; for n in 1 2 3; do workload raw 309 buffer 0; workload raw 309 {NOWHERE} 0; \
         workload raw 63 buffer; workload raw 63 {NOWHERE}; done; echo over; read go"
    );
    let mut running = Running::boot(optimizing_guest(2, &["sh", "-c", &script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let image = machine.image();
    let mut ids: Vec<(&str, ProbeId)> = Vec::new();
    for function in TO_USER {
        let Ok(symbol) = image.symbols().lookup(function) else {
            continue;
        };
        let places = (symbol.addr.0..symbol.addr.0 + symbol.size).map(Gva);
        for at in places.filter(|at| image.has_fixup(*at)) {
            let id = running.register(probe(&format!("p {at}")));
            assert_eq!(
                info(&machine, id).mechanism,
                Some(Mechanism::Stepped),
                "{function} {at}"
            );
            ids.push((function, id));
        }
    }
    machine.console_input(b"\n");
    running.wait_for("over");
    for kind in ["copy_user", "__put_user"] {
        let of_kind = ids
            .iter()
            .filter(|(function, _)| function.starts_with(kind));
        let hits = of_kind.map(|(_, id)| info(&machine, *id).counts.hits);
        assert!(
            hits.sum::<u64>() >= 2 * TIMES as u64,
            "{kind} was not called"
        );
    }
    let ids: Vec<ProbeId> = ids.into_iter().map(|(_, id)| id).collect();
    machine.unregister(&ids).expect("registered");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let expected = [0, -EFAULT].repeat(2 * TIMES);
    assert_eq!(values(&printed, "result"), expected);
}

#[test]
fn what_cannot_be_known_is_refused_with_the_reason() {
    if !stripped("refusals") {
        return;
    }
    let mut running = Running::boot(guest(1, &["sh", "-c", "echo ready; read go"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    for (definition, why) in [
        (
            "p loop:lo_open",
            "no symbol `modules` leads to the kernel's modules",
        ),
        ("p exc_page_fault", "noinstr code"),
        ("p asm_exc_int3", "entry code"),
        ("p __x86_indirect_thunk_rax", "thunk"),
        // Refused by its name, because this kernel has no list of such functions.
        ("p notify_die", "kprobe blacklist"),
    ] {
        let error = machine
            .register(&[probe(definition)])
            .expect_err(definition);
        assert!(
            chain(&error).contains(why),
            "{definition}: {}",
            chain(&error)
        );
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}
