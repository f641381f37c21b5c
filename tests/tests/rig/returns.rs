//! Tests return probes in a stock guest: values and durations, exact counts, calls that sleep, nest, move between
//! CPUs or never return, and unregistering with calls in flight.

use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use hvprobe_hit::event::{Call, EventKind};
use hvprobe_machine::{Event, Machine, MachineConfig, Mechanism, ProbeId, ProbeSpec};
use hvprobe_spec::{Change, Comparison, Condition, Item, Then};
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, chain, guest, info, probe, rig, rounds, values};

/// Offset of the first argument in `struct pt_regs` (arch/x86/include/asm/ptrace.h).
const PT_DI: i64 = 112;
const ENTRY: &str = "__x64_sys_getpgid";
/// Function that [`ENTRY`] calls, with the process id in EDI.
const INNER: &str = "do_getpgid";
const EPERM: i64 = 1;
const ESRCH: i64 = 3;
/// A process id that no process in the guest has.
const NOBODY: u64 = 31_007;

/// Shell functions that block readers of a pipe: `start N` starts N readers, and `close` lets them read the pipe's
/// end.
const READERS: &str = "mkfifo /tmp/pipe; exec 3<>/tmp/pipe; \
    start() { n=0; while [ $n -lt $1 ]; do cat </tmp/pipe 3>&- & n=$((n+1)); done; }; \
    close() { exec 3>&-; wait; }; ";

fn script(commands: &str) -> [&str; 3] {
    ["sh", "-c", commands]
}

fn readers(commands: &str) -> String {
    format!("{READERS}{commands}")
}

/// Returns a probe of this kind on the function that reads from the pipe of [`READERS`].
fn pipe_read(kind: &str) -> ProbeSpec {
    probe(&format!("{kind} {}", names::own("pipe_read")))
}

fn call(event: &Event) -> Call {
    match event.kind {
        EventKind::Return(call) => call,
        other => panic!("{other:?}"),
    }
}

fn of(events: &[Event], id: ProbeId) -> Vec<&Event> {
    events.iter().filter(|event| event.probe == id).collect()
}

/// Returns the numbers of hits, missed calls, vetoed calls and orphans of probe `id`.
fn counts(machine: &Machine, id: ProbeId) -> [u64; 4] {
    let counts = info(machine, id).counts;
    assert_eq!((counts.errors, counts.faults), (0, 0));
    [counts.hits, counts.missed, counts.vetoed, counts.orphans]
}

fn returned(event: &Event) -> i64 {
    event.regs.rax.cast_signed()
}

/// Returns the last value that the guest printed as `key: N`.
fn value(printed: &str, key: &str) -> u64 {
    match values(printed, key)[..] {
        [.., last] => u64::try_from(last).expect("a count"),
        [] => panic!("no {key} in:\n{printed}"),
    }
}

/// Runs `command` in a guest with `cpus` CPUs, with the probes `specs` from the start. Returns the guest, its
/// events and its output.
fn run(cpus: u32, command: &[&str], specs: &[ProbeSpec]) -> (Running, Vec<Event>, String) {
    let mut config = guest(cpus, command);
    config.probes = specs.to_vec();
    let mut running = Running::shared(&config);
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    (running, events, printed)
}

#[test]
fn a_return_reports_the_value_and_how_long_the_call_took() {
    if rig("durations").is_none() {
        return;
    }
    let slept = Duration::from_millis(50);
    let command = "for n in 1 2 3 4 5; do usleep 50000; done; workload raw 121 31007";
    let specs = [
        probe("r __x64_sys_clock_nanosleep"),
        probe(&format!("r {ENTRY}")),
    ];
    let (running, events, printed) = run(1, &script(command), &specs);
    let machine = &running.machine;
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    let by_usleep = |event: &&&Event| event.task.is_some_and(|task| task.comm() == "usleep");
    let sleeps = of(&events, ids[0]);
    let sleeps: Vec<_> = sleeps.iter().filter(by_usleep).collect();
    assert_eq!(sleeps.len(), 5, "{printed}");
    for event in sleeps {
        let call = call(event);
        let took = Duration::from_nanos(event.host_ns - call.entry_ns);
        assert!(took >= slept && took < 10 * slept, "{took:?}");
        assert!(event.guest_tsc > call.entry_tsc);
        assert_eq!(returned(event), 0);
        // RIP is in the caller. It is the return address that the entry found on the stack.
        let caller = machine.image().symbols().containing(Gva(event.regs.rip));
        assert_eq!(caller.expect("the caller").0.name, "do_syscall_64");
        assert_eq!(event.regs.rsp, call.entry.rsp + 8);
        assert_eq!(call.entry.rip, machine.probes()[0].addr.expect("placed").0);
    }
    let [event] = of(&events, ids[1])[..] else {
        panic!("{events:?}")
    };
    assert_eq!(returned(event), -ESRCH);
    assert_eq!(values(&printed, "result"), [-ESRCH]);
}

#[test]
fn hits_and_missed_are_the_calls_on_one_and_two_vcpus() {
    if rig("exact counts of returns").is_none() {
        return;
    }
    for cpus in [1, 2] {
        let threads = cpus.to_string();
        let specs = [probe(&format!("r {ENTRY}")), probe(&format!("r {INNER}"))];
        let (running, _, printed) = run(cpus, &["workload", "hammer", "2", &threads], &specs);
        let machine = &running.machine;
        let calls = value(&printed, "calls");
        assert!(calls > 100);
        for probe in machine.probes() {
            assert_eq!(counts(machine, probe.id), [calls, 0, 0, 0], "{cpus} CPUs");
        }
        eprintln!("{cpus} CPUs: {calls} calls, each through two return probes");
    }
}

#[test]
fn several_probes_of_one_function_share_a_stop_at_its_entry_and_its_return() {
    const CALLS: usize = 20;
    if rig("several return probes").is_none() {
        return;
    }
    let specs = [
        probe(&format!("r:first {ENTRY}")),
        probe(&format!("p:entry {ENTRY}")),
        probe(&format!("r:second {ENTRY}")),
        probe(&format!("r:third {ENTRY}")),
        probe(&format!("r:inner {INNER}")),
    ];
    let calls = CALLS.to_string();
    let (running, events, _) = run(1, &["workload", "calls", "getpgid", &calls], &specs);
    let machine = &running.machine;
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    for id in &ids {
        assert_eq!(counts(machine, *id), [CALLS as u64, 0, 0, 0]);
    }
    // Return probes of a function run in reverse order of registration.
    let order = [ids[1], ids[4], ids[3], ids[2], ids[0]];
    assert_eq!(events.len(), order.len() * CALLS);
    for hit in events.chunks(order.len()) {
        assert!(hit.iter().map(|event| event.probe).eq(order));
        let (entry, returns) = (&hit[0], &hit[2..]);
        for event in returns {
            let call = call(event);
            assert_eq!((call.entry_ns, call.entry), (entry.host_ns, entry.regs));
            assert_eq!(event.host_ns, returns[0].host_ns);
            assert_eq!(event.regs, returns[0].regs);
        }
        let numbers: Vec<u64> = hit[1..].iter().map(|event| call(event).id).collect();
        let distinct: std::collections::BTreeSet<_> = numbers.iter().collect();
        assert_eq!(distinct.len(), 4, "{numbers:?}");
    }
}

#[test]
fn a_return_knows_what_was_captured_at_its_entry() {
    if rig("entry data").is_none() {
        return;
    }
    let mut spec = probe(&format!("r {ENTRY}"));
    spec.actions.capture = vec![
        Item::Memory {
            base: Gpr::Rdi,
            offset: PT_DI,
            len: 8,
        },
        Item::Memory {
            base: Gpr::Rdi,
            offset: i64::MIN,
            len: 3,
        },
        Item::Stack(0),
    ];
    spec.actions.capture_at_return = vec![Item::Stack(0)];
    let commands = "for pid in 0 31007 1 31008; do workload raw 121 $pid; done";
    let (_running, events, printed) = run(1, &script(commands), &[spec]);
    let results = values(&printed, "result");
    assert_eq!(results[1], -ESRCH);
    assert_eq!(events.iter().map(returned).collect::<Vec<_>>(), results);
    for (event, pid) in events.iter().zip([0_u64, 31_007, 1, 31_008]) {
        let bytes = event.captured.bytes();
        assert_eq!(bytes.len(), 8 + 3 + 8 + 8);
        assert_eq!(bytes[..8], pid.to_le_bytes());
        assert_eq!(bytes[8..11], [0; 3]);
        assert!(event.captured.is_unreadable(1) && !event.captured.is_unreadable(2));
        // The return address as the caller pushed it, not the trampoline's.
        assert_eq!(bytes[11..19], event.regs.rip.to_le_bytes());
    }
}

#[test]
fn a_condition_at_the_entry_leaves_other_calls_alone() {
    if rig("the entry's veto").is_none() {
        return;
    }
    let mut spec = probe(&format!("r1 {INNER}"));
    spec.actions.when = vec![Condition {
        register: Gpr::Rdi,
        comparison: Comparison::Equal,
        value: NOBODY,
    }];
    let commands = "for pid in 0 31007 0 0 31007; do workload raw 121 $pid; done";
    let (running, events, printed) = run(1, &script(commands), &[spec]);
    let machine = &running.machine;
    let id = machine.probes()[0].id;
    assert_eq!(counts(machine, id), [2, 0, 3, 0]);
    assert_eq!(events.len(), 2);
    for event in &events {
        // The inner function returns an int.
        assert_eq!(event.regs.rax, u64::from((-3_i32).cast_unsigned()));
        assert_eq!(call(event).entry.rdi, NOBODY);
    }
    assert_eq!(values(&printed, "result").len(), 5);
}

#[test]
fn a_changed_return_value_is_what_user_space_gets() {
    if rig("changed return values").is_none() {
        return;
    }
    let change = |definition: &str, value: i64| {
        let mut spec = probe(definition);
        spec.actions.changes = vec![Change::Register {
            register: Gpr::Rax,
            value: value.cast_unsigned(),
        }];
        spec
    };
    let specs = [
        change(&format!("r {ENTRY}"), 77),
        // Runs first, so the other probe sees this value and overrides it.
        change(&format!("r {ENTRY}"), -EPERM),
        change("r __x64_sys_getsid", -EPERM),
    ];
    let commands = "workload raw 121 0; workload raw 124 0";
    let (_running, events, printed) = run(1, &script(commands), &specs);
    assert_eq!(values(&printed, "result"), [77, -EPERM]);
    let seen: Vec<_> = events.iter().map(returned).collect();
    assert_eq!(seen.len(), 3);
    assert!(seen[0] >= 0, "{seen:?}");
    assert_eq!(seen[1], -EPERM);
}

#[test]
fn a_function_skipped_behind_its_return_probe_returns_through_it() {
    if rig("skipping and return probes").is_none() {
        return;
    }
    let mut skip = probe(&format!("p {ENTRY}"));
    skip.actions.then = Then::Return((-EPERM).cast_unsigned());
    let specs = [
        probe(&format!("r {ENTRY}")),
        skip,
        probe(&format!("r {ENTRY}")),
        probe(&format!("r {INNER}")),
    ];
    let (running, events, printed) = run(1, &["workload", "raw", "121", "0"], &specs);
    let machine = &running.machine;
    assert_eq!(values(&printed, "result"), [-EPERM]);
    let all: Vec<_> = machine
        .probes()
        .iter()
        .map(|probe| counts(machine, probe.id))
        .collect();
    assert_eq!(
        all,
        [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    );
    assert_eq!(events.len(), 2);
    assert_eq!(returned(&events[1]), -EPERM);
}

#[test]
fn calls_beyond_maxactive_are_missed_and_auto_misses_none() {
    const SLEEPERS: u64 = 24;
    if rig("maxactive").is_none() {
        return;
    }
    let commands = readers(&format!(
        "echo ready; read line; start {SLEEPERS}; read line; close; echo over; read line"
    ));
    let mut running = Running::shared(&guest(2, &script(&commands)));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let entry = running.register(pipe_read("p"));
    let one = running.register(pipe_read("r1"));
    let default = running.register(pipe_read("r"));
    let auto = running.register(ProbeSpec {
        maxactive_auto: true,
        ..pipe_read("r")
    });
    assert_eq!(info(&machine, one).maxactive, Some(1));
    assert_eq!(info(&machine, default).maxactive, Some(10));
    machine.console_input(b"\n");
    running.wait_events(|events| of(events, entry).len() as u64 == SLEEPERS);
    machine.console_input(b"\n");
    running.wait_for("over");
    assert_eq!(counts(&machine, entry)[0], SLEEPERS);
    assert_eq!(counts(&machine, one), [1, SLEEPERS - 1, 0, 0]);
    assert_eq!(counts(&machine, default), [10, SLEEPERS - 10, 0, 0]);
    assert_eq!(counts(&machine, auto), [SLEEPERS, 0, 0, 0]);
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    // All readers have read the pipe's end.
    assert!(of(&events, auto).iter().all(|event| returned(event) == 0));
}

#[test]
fn tasks_that_die_in_a_call_leave_orphans_whose_instances_come_back() {
    const ROUNDS: u64 = 6;
    const THREADS: u64 = 3;
    if rig("orphans").is_none() {
        return;
    }
    let (rounds, threads) = (ROUNDS.to_string(), THREADS.to_string());
    let specs = [probe("r32 get_signal"), pipe_read("r32")];
    let (running, events, printed) = run(2, &["workload", "deaths", &rounds, &threads], &specs);
    let machine = &running.machine;
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    let killed = value(&printed, "killed");
    let reads = value(&printed, "pipe_read");
    let [hits, missed, vetoed, orphans] = counts(machine, ids[0]);
    assert_eq!((missed, vetoed, orphans), (0, 0, killed));
    assert_eq!(hits, of(&events, ids[0]).len() as u64);
    // All tasks died there, except one in every second round, which called `exit_group`.
    assert!(killed > 20);
    let [hits, missed, vetoed, orphans] = counts(machine, ids[1]);
    assert_eq!((hits, missed, vetoed, orphans), (reads, 0, 0, 0));
}

#[test]
fn functions_that_do_not_return_to_their_caller_are_refused() {
    if rig("refused return probes").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(1, &script("echo ready; read line")));
    running.wait_for("ready");
    let machine = running.machine.clone();
    for (function, why) in [
        ("do_exit", "never returns"),
        ("do_task_dead", "never returns"),
        ("__x64_sys_exit_group", "never returns"),
        ("__switch_to", "switches stacks"),
    ] {
        let specs = [
            probe(&format!("r {ENTRY}")),
            probe(&format!("r {function}")),
        ];
        let error = chain(&machine.register(&specs).expect_err(function));
        assert!(
            error.starts_with("probe 1 ") && error.contains(why),
            "{error}"
        );
        assert_eq!(machine.probes(), []);
    }
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn calls_that_sleep_nest_move_and_change_their_program_are_all_followed() {
    if rig("long calls").is_none() {
        return;
    }
    let auto = |definition: &str| ProbeSpec {
        maxactive_auto: true,
        ..probe(definition)
    };
    let specs = [
        auto("r __x64_sys_nanosleep"),
        auto("r hrtimer_nanosleep"),
        auto("r ep_loop_check_proc"),
        auto("r __x64_sys_execve"),
        auto("r bprm_execve"),
    ];
    let commands = "workload sleepers 6 40 && workload nested 4 25 && workload execs 6";
    let mut config = guest(2, &script(commands));
    config.probes = specs.to_vec();
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    let sleeps = value(&printed, "sleeps");
    assert_eq!(counts(&machine, ids[0]), [sleeps, 0, 0, 0]);
    let nested = value(&printed, "ep_loop_check_proc");
    assert_eq!(counts(&machine, ids[2]), [nested, 0, 0, 0]);
    for id in &ids {
        let [hits, missed, vetoed, orphans] = counts(&machine, *id);
        assert_eq!((missed, vetoed, orphans), (0, 0, 0), "{id}");
        assert_eq!(hits, of(&events, *id).len() as u64);
        let numbers: std::collections::BTreeSet<_> = of(&events, *id)
            .iter()
            .map(|event| call(event).id)
            .collect();
        assert_eq!(numbers.len() as u64, hits);
    }
    // Nested calls return in reverse order: the deepest, with the lowest frame, first.
    let depth = of(&events, ids[2]);
    let last: Vec<_> = depth[depth.len() - 4..]
        .iter()
        .map(|e| e.regs.rsp)
        .collect();
    assert!(last.is_sorted(), "{last:x?}");
    eprintln!("{} moves, {sleeps} sleeps", value(&printed, "moves"));
}

#[test]
fn unregistering_with_calls_in_flight_lets_them_return() {
    if rig("unregistering in flight").is_some() {
        unregister_in_flight(false);
    }
}

#[test]
fn unregistering_with_calls_in_flight_without_exits_lets_them_return() {
    if rig("unregistering in flight, with jumps").is_some() {
        unregister_in_flight(true);
    }
}

fn unregister_in_flight(optimize: bool) {
    const BLOCKED: usize = 5;
    let commands = readers(
        "echo ready; read line; start 5; read line; start 3; read line; close; echo over; \
         read line",
    );
    let mut running = Running::shared(&MachineConfig {
        optimize,
        ..guest(2, &script(&commands))
    });
    running.wait_for("ready");
    let machine = running.machine.clone();
    let original = running.text(names::own("pipe_read"));
    let task_dead = running.text("do_task_dead");
    let entry = running.register(pipe_read("p"));
    let ids = machine
        .register(&[pipe_read("r"), pipe_read("r"), probe("r vfs_read")])
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_ne!(running.text("do_task_dead"), task_dead);
    for id in &ids {
        let jumps = info(&machine, *id).mechanism == Some(Mechanism::Optimized);
        assert_eq!(jumps, optimize);
    }
    machine.console_input(b"\n");
    running.wait_events(|events| of(events, entry).len() == BLOCKED);
    machine.unregister(&ids).expect("registered");
    assert_eq!(running.text("do_task_dead"), task_dead);
    // Registers another return probe. Calls of its function that are in flight have frames of the removed probes;
    // later calls have none.
    let later = running.register(pipe_read("r"));
    machine.console_input(b"\n");
    running.wait_events(|events| of(events, entry).len() == BLOCKED + 3);
    machine.console_input(b"\n");
    running.wait_for("over");
    assert_eq!(counts(&machine, later), [3, 0, 0, 0]);
    machine.unregister(&[entry, later]).expect("registered");
    assert_eq!(running.text(names::own("pipe_read")), original);
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(of(&events, ids[0]), Vec::<&Event>::new());
    assert_eq!(of(&events, ids[1]), Vec::<&Event>::new());
    assert_eq!(of(&events, later).len(), 3);
}

#[test]
fn calls_of_a_disabled_probe_return_in_silence() {
    if rig("disabling in flight").is_some() {
        disable_in_flight(false);
    }
}

#[test]
fn calls_without_exits_of_a_disabled_probe_return_in_silence() {
    if rig("disabling in flight, with jumps").is_some() {
        disable_in_flight(true);
    }
}

fn disable_in_flight(optimize: bool) {
    let commands =
        readers("echo ready; read line; start 4; read line; close; echo over; read line");
    let mut running = Running::shared(&MachineConfig {
        optimize,
        ..guest(1, &script(&commands))
    });
    running.wait_for("ready");
    let machine = running.machine.clone();
    let entry = running.register(pipe_read("p"));
    let quiet = running.register(pipe_read("r"));
    let heard = running.register(pipe_read("r"));
    machine.console_input(b"\n");
    running.wait_events(|events| of(events, entry).len() == 4);
    machine.disable(&[quiet]).expect("registered");
    machine.console_input(b"\n");
    running.wait_for("over");
    assert_eq!(counts(&machine, quiet), [0, 4, 0, 0]);
    assert_eq!(counts(&machine, heard), [4, 0, 0, 0]);
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert!(of(&events, quiet).is_empty());
}

#[test]
fn return_probes_come_and_go_while_two_vcpus_call_and_return() {
    if rig("return probes under load").is_none() {
        return;
    }
    let rounds = rounds(60_u64);
    let mut running = Running::shared(&guest(2, &["workload", "stdin-hold", "2"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let originals = [ENTRY, INNER].map(|function| running.text(function));
    let offsets = running.instructions(INNER);
    let amidst = offsets.iter().find(|offset| **offset >= 14);
    let amidst = amidst.expect("more than a few instructions");
    let specs = [
        probe(&format!("r {ENTRY}")),
        probe(&format!("p {INNER}+{amidst}")),
        probe(&format!("r {INNER}")),
    ];
    let mut hits = 0;
    for round in 0..rounds {
        let ids = machine.register(&specs).expect("can be probed");
        running.wait_while_running(|machine| {
            counts(machine, ids[0])[0] >= 5 && counts(machine, ids[2])[0] >= 5
        });
        for id in [ids[0], ids[2]] {
            let [returned, missed, vetoed, orphans] = counts(&machine, id);
            assert_eq!((missed, vetoed, orphans), (0, 0, 0), "round {round}");
            hits += returned;
        }
        machine.unregister(&ids).expect("registered");
        for (function, original) in [ENTRY, INNER].iter().zip(&originals) {
            assert_eq!(&running.text(function), original, "round {round}");
        }
    }
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    eprintln!("{rounds} rounds, {hits} returns or more");
}

#[test]
fn tasks_that_end_take_no_instance_of_what_they_call_last() {
    const ENDED: u64 = 40;
    if rig("return probes on __schedule").is_none() {
        return;
    }
    for optimize in [false, true] {
        let script =
            "i=0; while [ $i -lt 40 ]; do /bin/true; i=$((i+1)); done; echo over; read line";
        let mut config = guest(1, &["sh", "-c", script]);
        config.optimize = optimize;
        config.probes = vec![probe("r512 __schedule")];
        let mut running = Running::shared(&config);
        running.wait_for("over");
        let machine = running.machine.clone();
        let id = machine.probes()[0].id;
        // A task is freed a grace period after its end.
        running.wait_while_running(|machine| counts(machine, id)[3] >= ENDED);
        let [hits, missed, vetoed, _] = counts(&machine, id);
        assert!(hits > ENDED, "{hits}");
        assert_eq!((missed, vetoed), (0, 0));
        machine.console_input(b"\n");
        let (ending, _, printed) = running.finish();
        assert_clean(&ending, &printed, 0);
    }
}
