//! Compares kernel stacks in a stock guest with those that its own kernel records at the same functions.

mod modules;

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::Symbol;
use hvprobe_machine::{Event, Machine, MachineConfig, Mechanism, ProbeId, ProbeSpec};
use hvprobe_spec::{FRAME, FRAMES_MAX, Item, TextHeader};
use hvprobe_tests::rig::{
    Running, assert_clean, guest, info, optimizing_guest, probe, quickly, rig,
};

/// A function whose stacks are compared.
struct Compared {
    function: &'static str,
    /// Name of the tasks whose stacks are compared; `None` for all tasks.
    comm: Option<&'static str>,
    /// Whether the stacks are always the same; otherwise most of our stacks must be among those of the kernel.
    exact: bool,
}

/// Functions that are reached by a system call, an exception and an interrupt, and from a kernel thread.
const COMPARED: [Compared; 4] = [
    Compared {
        function: "vfs_read",
        comm: Some("dd"),
        exact: true,
    },
    Compared {
        function: "handle_mm_fault",
        comm: Some("dd"),
        exact: false,
    },
    Compared {
        function: "update_process_times",
        comm: None,
        exact: false,
    },
    Compared {
        function: "process_one_work",
        comm: None,
        exact: false,
    },
];

/// Entry code of the timer interrupt. The frames after it in a stack belong to the interrupted code.
const INTERRUPT: &str = "asm_sysvec_apic_timer_interrupt";
/// Calls and page faults of `dd`, and one second for kernel threads. Runs once before the comparison, so that files
/// are in the page cache.
const WORKLOAD: &str = "work() { for n in 1 2 3; do dd if=/dev/zero of=/dev/null bs=1 count=3 \
     2>/dev/null; done; sleep 1; }; work; ";

/// Returns the probe `definition` with a stack trace at every hit.
fn stacks(definition: &str) -> ProbeSpec {
    let mut spec = probe(definition);
    let most = u8::try_from(FRAMES_MAX).expect("small");
    let item = vec![Item::StackTrace(most)];
    match spec.is_return() {
        false => spec.actions.capture = item,
        true => spec.actions.capture_at_return = item,
    }
    spec
}

/// Functions on a stack, each with the offset, and whether the stack is truncated.
type Stack = (Vec<String>, bool);

/// Returns the function that contains `at`, with the offset. Returns the address if there is no such function now.
fn name(machine: &Machine, at: Gva) -> String {
    let named = |(symbol, offset): (Symbol<'_>, u64)| format!("{}+{offset:#x}", symbol.name);
    let of_kernel = machine.image().symbols().containing(at).map(named);
    let of_module = || {
        let module = machine.module_at(at)?;
        module.symbols().containing(at).map(named)
    };
    of_kernel
        .or_else(of_module)
        .unwrap_or_else(|| format!("{:#x}", at.0))
}

/// Returns the stack in `event`, which must have captured nothing else.
fn stack(machine: &Machine, event: &Event) -> Stack {
    let (header, halves) = event
        .captured
        .bytes()
        .split_first_chunk()
        .expect("a header");
    assert_eq!(event.captured.unreadable(), 0, "{event:?}");
    let TextHeader { len, truncated } = TextHeader::from_bytes(*header);
    assert_eq!(usize::from(len), halves.len(), "{event:?}");
    let (halves, rest) = halves.as_chunks::<FRAME>();
    assert!(rest.is_empty(), "{event:?}");
    let names = halves.iter().map(|half| {
        let at = u64::from(u32::from_le_bytes(*half)) | 0xffff_ffff_0000_0000;
        name(machine, Gva(at))
    });
    (names.collect(), truncated)
}

/// Returns the stacks of one function that the kernel printed, with offsets. The first frame has none, because
/// there the kernel's own probe reports an address one byte after the function's entry.
fn theirs(printed: &str, function: &str) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    let (_, section) = printed
        .split_once(&format!("stacks of {function}\n"))
        .expect("printed");
    let (section, _) = section.split_once("end of stacks").expect("printed");
    for stack in section.split("<stack trace>").skip(1) {
        let lines = stack.lines().skip(1);
        let frames = lines.map_while(|line| line.trim().strip_prefix("=> "));
        let names = frames.map(|frame| {
            let place = frame.split_whitespace().next().unwrap_or_default();
            match place.rsplit_once('/') {
                Some((place, _)) => place.to_owned(),
                None => place.to_owned(),
            }
        });
        found.insert(compared(names.collect()));
    }
    found
}

/// Returns the part of a stack that is compared.
fn compared(mut names: Vec<String>) -> Vec<String> {
    if let Some(first) = names.first_mut() {
        let end = first.find('+').unwrap_or(first.len());
        first.truncate(end);
    }
    let interrupt = names.iter().position(|name| name.starts_with(INTERRUPT));
    if let Some(interrupt) = interrupt {
        names.truncate(interrupt + 1);
    }
    names
}

/// Makes the guest's own kernel record stacks at its probes.
const TRACEFS: &str = "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing; \
     echo 96 > buffer_size_kb; echo 1 > options/sym-offset; echo 1 > options/stacktrace; ";

/// Returns commands that make the guest's own kernel record the stacks of `function` during `work`, and print
/// them. If `comm` is given, only those of tasks with this name.
fn recorded(function: &str, comm: Option<&str>, work: &str) -> String {
    let filter = comm.map_or_else(String::new, |comm| {
        format!("echo 'comm == \"{comm}\"' > events/kprobes/e/filter; ")
    });
    format!(
        "echo 'p:e {function}' > kprobe_events; {filter}\
         echo 1 > events/kprobes/e/enable; {work}; echo 0 > events/kprobes/e/enable; \
         echo 'stacks of {function}'; head -n 300 trace; echo 'end of stacks'; \
         echo > trace; echo > kprobe_events; "
    )
}

/// Returns the script of a guest that records stacks with its own kernel, then repeats the work, and then
/// waits.
fn script() -> String {
    let sections = COMPARED.map(|it| recorded(it.function, it.comm, "work"));
    format!(
        "{TRACEFS}{WORKLOAD} {}echo ready; read line; work; echo finished; read line",
        sections.concat()
    )
}

fn of(events: &[Event], id: ProbeId, comm: Option<&str>) -> Vec<Event> {
    let events = events.iter().filter(|event| event.probe == id);
    let events = events.filter(|event| {
        let task = event.task.expect("of a task");
        comm.is_none_or(|comm| task.comm() == comm)
    });
    events.copied().collect()
}

#[test]
fn stacks_are_those_that_the_guests_own_kernel_records() {
    if rig("stacks held against the kernel's").is_some() {
        compare_stacks(None);
    }
}

#[test]
fn stacks_that_were_copied_are_those_that_the_guests_own_kernel_records() {
    if rig("copied stacks held against the kernel's").is_some() {
        compare_stacks(Some(Mechanism::Optimized));
    }
}

/// Compares stacks of hits that take exits or, with `Optimized`, of hits that take none.
fn compare_stacks(mechanism: Option<Mechanism>) {
    let config = match mechanism {
        None => guest(1, &["sh", "-c", &script()]),
        Some(_) => optimizing_guest(1, &["sh", "-c", &script()]),
    };
    let mut running = Running::shared(&config);
    let printed = running.wait_for("ready").replace('\r', "");
    let machine = running.machine.clone();
    let probes = COMPARED.map(|it| running.register(stacks(&format!("p {}", it.function))));
    for id in probes {
        let info = info(&machine, id);
        let is_optimized = info.mechanism == Some(Mechanism::Optimized);
        assert_eq!(is_optimized, mechanism.is_some(), "{info:?}");
    }
    machine.console_input(b"\n");
    running.wait_for("finished");
    machine.unregister(&probes).expect("registered");
    machine.console_input(b"\n");
    let (ending, events, rest) = running.finish();
    assert_clean(&ending, &rest, 0);
    for (what, id) in COMPARED.iter().zip(probes) {
        let theirs = theirs(&printed, what.function);
        let hits = of(&events, id, what.comm);
        let (mut ours, mut strange) = (BTreeSet::new(), Vec::new());
        for event in &hits {
            let (names, goes_on) = stack(&machine, event);
            assert!(!goes_on || names.len() == FRAMES_MAX, "{names:#?}");
            // After the `endbr64`, if the function has one.
            let entry = ["+0x0", "+0x4"].map(|offset| format!("{}{offset}", what.function));
            assert!(entry.contains(&names[0]), "{names:#?}");
            let names = compared(names);
            if !theirs.contains(&names) {
                strange.push(names.clone());
            }
            ours.insert(names);
        }
        let same = ours.intersection(&theirs).count();
        eprintln!(
            "{}: {} hits, {} stacks, {same} of {} of the kernel's",
            what.function,
            hits.len(),
            ours.len(),
            theirs.len()
        );
        assert!(same > 0, "{ours:#?}\n{theirs:#?}");
        assert!(strange.len() * 2 < hits.len(), "{strange:#?}\n{theirs:#?}");
        if what.exact {
            assert_eq!(ours, theirs, "{}", what.function);
        }
    }
}

/// Checks that the stacks of `vfs_read` in `dd` are the same without and with `returning`, a return probe on its
/// caller.
fn with_returns(config: impl Fn(&[&str]) -> MachineConfig, returning: &ProbeSpec) {
    let script = format!("{WORKLOAD} echo ready; read line; work; echo more; read line; work");
    let mut running = Running::shared(&config(&["sh", "-c", &script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let alone = running.register(stacks("p vfs_read"));
    machine.console_input(b"\n");
    running.wait_for("more");
    machine.unregister(&[alone]).expect("registered");
    let inner = running.register(stacks("p vfs_read"));
    let outer = running.register(returning.clone());
    let returned = running.register(stacks("r vfs_read"));
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let stacks = |id| -> BTreeSet<Stack> {
        let events = of(&events, id, Some("dd"));
        events.iter().map(|event| stack(&machine, event)).collect()
    };
    let (expected, found) = (stacks(alone), stacks(inner));
    assert!(!expected.is_empty());
    assert_eq!(found, expected);
    let calls = of(&events, outer, Some("dd"));
    assert!(!calls.is_empty(), "no call returned");
    // The stack of a return begins with the caller.
    let callers: BTreeSet<Stack> = expected
        .into_iter()
        .map(|(names, goes_on)| (names[1..].to_vec(), goes_on))
        .collect();
    assert_eq!(stacks(returned), callers);
}

#[test]
fn calls_whose_returns_take_exits_leave_no_trace_in_stacks() {
    if rig("stacks with returns that take exits").is_none() {
        return;
    }
    with_returns(|command| guest(1, command), &probe("r ksys_read"));
}

#[test]
fn calls_that_are_followed_without_exits_leave_no_trace_in_stacks() {
    if rig("stacks with returns without exits").is_none() {
        return;
    }
    with_returns(
        |command| optimizing_guest(1, command),
        &probe("r ksys_read"),
    );
}

/// Returns the output of `hvprobe run` with these options for a guest that runs `dd`.
fn printed(options: &[&str]) -> String {
    let mut command = Command::new("hvprobe");
    command.arg("run").args(quickly());
    command.args(["-p", "p vfs_read"]).args(options);
    command.args([
        "--",
        "dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=1",
        "count=5",
    ]);
    let output = command
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn stacks_are_printed_with_their_functions_though_the_guest_has_ended() {
    if rig("printed stacks").is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("stacks.svg");
    let folded = printed(&["--folded", "--flame", picture.to_str().expect("a path")]);
    let of_dd = folded.lines().find_map(|line| {
        let stack = line.strip_prefix("dd;entry_SYSCALL_64_after_hwframe;do_syscall_64;")?;
        stack.split_once(";vfs_read ")?.1.parse::<u64>().ok()
    });
    assert!(of_dd.is_some_and(|hits| hits >= 5), "{folded}");
    let picture = std::fs::read_to_string(picture).expect("a picture");
    let drawn = folded.lines().filter_map(|line| line.rsplit_once(' '));
    let hits: u64 = drawn.filter_map(|(_, hits)| hits.parse::<u64>().ok()).sum();
    let all = format!("<title>all ({hits} hits, 100%)</title>");
    assert!(picture.contains(&all), "{all}: {picture}");
    assert!(picture.contains("<title>vfs_read ("), "{picture}");

    let events = printed(&["--stack", "--json"]);
    let is_of_dd = |event: &&serde_json::Value| event["comm"] == "dd";
    let events: Vec<serde_json::Value> = events
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let of_dd: Vec<_> = events.iter().filter(is_of_dd).collect();
    assert!(of_dd.len() >= 5, "{events:#?}");
    for event in of_dd {
        assert_eq!(event["stack_complete"], true, "{event:#}");
        let stack = event["stack"].as_array().expect("a stack");
        let ends = [stack.first(), stack.last()].map(|frame| frame.expect("frames"));
        let symbols = ends.map(|frame| &frame["symbol"]);
        assert_eq!(symbols, ["vfs_read", "entry_SYSCALL_64_after_hwframe"]);
        assert_eq!(ends[0]["addr"], event["registers"]["rip"], "{event:#}");
    }

    let bars = printed(&["--bars", "--hist", "keys=stacktrace if comm == \"dd\""]);
    assert!(bars.contains("@[\n    vfs_read+0x"), "{bars}");
}
