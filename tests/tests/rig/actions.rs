//! Tests the actions of a hit in a stock guest: captures, changes, skipped functions, post-handlers and faults.

use std::collections::HashMap;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::{Gpr, rflags};
use hvprobe_hit::event::EventKind;
use hvprobe_machine::{Event, Mechanism, ProbeId};
use hvprobe_spec::{Base, Change, Fetched, Item, Memory, Pointer, Read, Then};
use hvprobe_tests::rig::{Running, assert_clean, guest, info, probe, rig, values};

/// Offsets in `struct pt_regs` (arch/x86/include/asm/ptrace.h). The function of a system call gets the address of
/// that structure in RDI.
const PT_SI: i64 = 104;
const PT_DI: i64 = 112;
const PT_ORIG_AX: i64 = 120;

const SYS_GETPGID: u64 = 121;
const ENTRY: &str = "__x64_sys_getpgid";
/// Function that [`ENTRY`] calls, with the process id in EDI.
const INNER: &str = "do_getpgid";
const EPERM: i64 = 1;
const ESRCH: i64 = 3;
const EFAULT: i64 = 14;
const ENOSYS: i64 = 38;
/// A process id that no process in the guest has.
const NOBODY: u64 = 31_007;
/// An address of user space where nothing is mapped.
const UNMAPPED: u64 = 0x0066_6000;

const PAGE_FAULT: u8 = 14;

fn script(commands: &str) -> [&str; 3] {
    ["sh", "-c", commands]
}

fn word(register: Gpr, offset: i64) -> Item {
    Item::Memory {
        base: register,
        offset,
        len: 8,
    }
}

fn words(event: &Event) -> Vec<u64> {
    let words = event.captured.bytes().chunks_exact(8);
    words
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
        .collect()
}

fn of(events: &[Event], id: ProbeId) -> Vec<&Event> {
    events.iter().filter(|event| event.probe == id).collect()
}

#[test]
fn a_capture_at_a_system_call_is_what_the_program_passed() {
    if rig("captures").is_none() {
        return;
    }
    let mut spec = probe(&format!("p {ENTRY}"));
    spec.actions.capture = vec![
        word(Gpr::Rdi, PT_DI),
        word(Gpr::Rdi, i64::MIN),
        word(Gpr::Rdi, PT_ORIG_AX),
        Item::Stack(0),
        Item::Memory {
            base: Gpr::Rdi,
            offset: PT_SI,
            len: 16,
        },
    ];
    spec.actions.registers = [Gpr::Rdi].into_iter().collect();
    let command = format!("workload raw {SYS_GETPGID} 31007 0x1122334455667788");
    let mut config = guest(1, &script(&command));
    config.probes = vec![spec];
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let at = machine.probes()[0].addr.expect("placed");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(values(&printed, "result"), [-ESRCH]);
    let [event] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((event.kind, event.regs.rip), (EventKind::Hit, at.0));
    assert!(event.shown.contains(Gpr::Rdi) && !event.shown.contains(Gpr::Rax));
    assert_eq!(event.task.map(|task| task.comm()), Some("workload".into()));
    let captured = words(event);
    assert_eq!(captured[0], NOBODY);
    assert_eq!(captured[1], 0);
    assert_eq!(captured[2], SYS_GETPGID);
    let caller = machine.image().symbols().containing(Gva(captured[3]));
    assert_eq!(caller.expect("the caller").0.name, "do_syscall_64");
    assert_eq!(captured[4..], [0x1122_3344_5566_7788, NOBODY]);
    let unreadable: Vec<_> = (0..5)
        .filter(|&n| event.captured.is_unreadable(n))
        .collect();
    assert_eq!(unreadable, [1]);
}

#[test]
fn a_changed_argument_is_the_one_the_kernel_acts_on() {
    if rig("changes").is_none() {
        return;
    }
    // One change is in the memory that the entry reads, one in the register that the inner function reads, and one
    // at an address that is not mapped.
    let mut memory = probe(&format!("p {ENTRY}"));
    memory.actions.changes = vec![Change::Memory {
        base: Some(Gpr::Rdi),
        offset: PT_DI,
        bytes: Box::new(1_u64.to_le_bytes()),
    }];
    let mut register = probe(&format!("p {INNER}"));
    register.actions.changes = vec![Change::Register {
        register: Gpr::Rdi,
        value: 1,
    }];
    let mut nowhere = probe(&format!("p {ENTRY}"));
    nowhere.actions.changes = vec![Change::Memory {
        base: None,
        offset: 0x10,
        bytes: Box::new([1]),
    }];
    let call = format!("workload raw {SYS_GETPGID} {NOBODY}");
    let commands = format!("{call}; read line; {call}; read line; {call}; read line; {call}");
    let mut running = Running::shared(&guest(1, &script(&commands)));
    running.wait_for("result: -3");
    let machine = running.machine.clone();
    let mut counts = Vec::new();
    for (nth, spec) in [memory, register, nowhere].into_iter().enumerate() {
        let id = running.register(spec);
        machine.console_input(b"\n");
        running.wait_printed(|printed| values(printed, "result").len() == nth + 2);
        counts.push(info(&machine, id).counts);
        machine.unregister(&[id]).expect("registered");
    }
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    // The process group of process 1 is 0 or 1, depending on whether it made itself a session.
    let results = values(&printed, "result");
    assert!(matches!(results[..], [-3, 0 | 1, 0 | 1, -3]), "{results:?}");
    assert_eq!(events.len(), 3);
    let counts: Vec<_> = counts.iter().map(|c| (c.hits, c.errors)).collect();
    assert_eq!(counts, [(1, 0), (1, 0), (1, 1)]);
}

#[test]
fn memory_of_the_process_is_captured_and_changed_at_a_hit() {
    const CAPTURED: u16 = 7;
    if rig("user memory").is_none() {
        return;
    }
    // At its entry, the function has the address of the path in RSI, and has not read the path yet.
    let mut spec = probe("p do_sys_openat2");
    spec.actions.capture = vec![Item::Memory {
        base: Gpr::Rsi,
        offset: 0,
        len: CAPTURED,
    }];
    spec.actions.changes = vec![Change::Memory {
        base: Some(Gpr::Rsi),
        offset: 0,
        bytes: Box::new(*b"/other\0"),
    }];
    // The shell itself writes the path to memory and opens it: before 5.11 a program's arguments were writable only
    // after a fault.
    let commands = "echo one > /first; echo two > /other; echo first; read line; \
                    read what </first; echo $what; echo second; read line; \
                    workload held raw 257 -100 buffer 0";
    let mut running = Running::shared(&guest(1, &script(commands)));
    let machine = running.machine.clone();
    running.wait_for("first");
    let id = running.register(spec.clone());
    machine.console_input(b"\n");
    let printed = running.wait_for("second");
    machine.unregister(&[id]).expect("registered");
    assert!(
        printed.lines().any(|line| line.trim() == "two"),
        "{printed}"
    );
    machine.console_input(b"\n");
    // This path is in memory that was never accessed, so it is not mapped.
    running.wait_for("ready");
    let id = running.register(spec);
    machine.console_input(b"\n");
    running.wait_for("over");
    let counts = info(&machine, id).counts;
    machine.unregister(&[id]).expect("registered");
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let is_first = |event: &&Event| event.captured.bytes() == b"/first\0";
    assert_eq!(events.iter().filter(is_first).count(), 1, "{events:?}");
    let is_missing = |event: &&Event| event.captured.is_unreadable(0);
    assert_eq!(events.iter().filter(is_missing).count(), 1, "{events:?}");
    assert_eq!(counts.errors, 1);
}

#[test]
fn a_skipped_function_gives_user_space_the_error_we_chose() {
    if rig("skipped functions").is_none() {
        return;
    }
    let skip = |definition: String, errno: i64| {
        let mut spec = probe(&definition);
        spec.actions.then = Then::Return((-errno).cast_unsigned());
        spec
    };
    let before = probe(&format!("p:before {ENTRY}"));
    let behind = probe(&format!("p:behind {ENTRY}"));
    let inner = probe(&format!("p:inner {INNER}"));
    let mut config = guest(
        1,
        &script("for n in 1 2 3 4 5; do workload raw 121 0; done; workload raw 124 31007"),
    );
    config.probes = vec![
        before,
        skip(format!("p:skip {ENTRY}"), EPERM),
        behind,
        inner,
        skip("p __x64_sys_getsid".to_owned(), ENOSYS),
    ];
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(
        values(&printed, "result"),
        [-EPERM, -EPERM, -EPERM, -EPERM, -EPERM, -ENOSYS]
    );
    let counts: Vec<_> = machine
        .probes()
        .iter()
        .map(|probe| (probe.counts.hits, probe.counts.missed))
        .collect();
    assert_eq!(counts, [(5, 0), (5, 0), (0, 5), (0, 0), (1, 0)]);
    assert_eq!(events.len(), 11);
}

#[test]
fn a_function_sent_elsewhere_runs_there() {
    if rig("changed paths").is_none() {
        return;
    }
    // Sends getpgid(0) to getppid, which ignores the argument. So both calls return the id of the parent, the
    // shell.
    let config = guest(
        1,
        &script("read line; workload raw 121 0; workload raw 110; echo done"),
    );
    let mut running = Running::shared(&config);
    let mut spec = probe(&format!("p {ENTRY}"));
    spec.actions.then = Then::Jump(running.address("__x64_sys_getppid"));
    spec.actions.post = true;
    let id = running.register(spec);
    let machine = running.machine.clone();
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let results = values(&printed, "result");
    assert!(results[0] > 0 && results[0] == results[1], "{results:?}");
    assert_eq!(info(&machine, id).counts.hits, 1);
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Hit]);
}

/// Returns every probeable offset of `function`.
fn probeable(running: &Running, function: &str) -> Vec<u64> {
    let size = running.text(function).len() as u64;
    (0..size)
        .filter(|offset| {
            let spec = probe(&format!("p {function}+{offset}"));
            let ids = running.machine.register(&[spec]);
            ids.is_ok_and(|ids| running.machine.unregister(&ids).is_ok())
        })
        .collect()
}

/// Returns items that capture how many interrupts the only CPU has handled: the vectors that the kernel counts by
/// name (`irq_stat`, arch/x86/include/asm/hardirq.h), and those of devices (`kstat.irqs_sum`,
/// include/linux/kernel_stat.h).
fn interrupts(running: &Running) -> Vec<Item> {
    let mut offset = [0; 8];
    let offsets = running.address("__per_cpu_offset");
    let read = running.machine.read_kernel(offsets, &mut offset);
    read.expect("mapped");
    let item = |symbol, len| {
        let at = running.address(symbol).0;
        Item::Fetched(Box::new(Fetched {
            base: Base::Constant(at.wrapping_add(u64::from_le_bytes(offset))),
            pointers: vec![Pointer {
                offset: 0,
                memory: Memory::Kernel,
            }],
            read: Read::Bytes(len),
        }))
    };
    vec![item("irq_stat", 64), item("kstat", 8)]
}

#[test]
fn a_post_handler_sees_what_the_next_pre_handler_sees() {
    const CALLS: usize = 20;
    let Some(rig) = rig("post-handlers") else {
        return;
    };
    let commands = format!(
        "echo ready; read line; workload calls getpgid {CALLS}; \
         workload raw {SYS_GETPGID} 1; workload raw {SYS_GETPGID} {NOBODY}"
    );
    let mut running = Running::shared(&guest(1, &script(&commands)));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let (at, original) = (running.address(INNER), running.text(INNER));
    let offsets = probeable(&running, INNER);
    assert_eq!(running.text(INNER), original);
    assert!(offsets.len() > 20, "{offsets:x?}");
    let interrupts = interrupts(&running);
    let specs: Vec<_> = offsets
        .iter()
        .map(|offset| {
            let mut spec = probe(&format!("p {INNER}+{offset}"));
            spec.actions.post = true;
            spec.actions.capture.clone_from(&interrupts);
            spec
        })
        .collect();
    let ids = machine.register(&specs).expect("known to be probeable");
    let used = |mechanism| {
        let probes = machine.probes();
        let used = probes.iter().filter(|p| p.mechanism == Some(mechanism));
        used.count()
    };
    let (emulated, stepped) = (used(Mechanism::Emulated), used(Mechanism::Stepped));
    assert!(emulated > 5 && stepped > 3, "{emulated} {stepped}");
    assert_eq!(emulated + stepped, ids.len());
    machine.console_input(b"\n");
    running.wait_printed(|printed| values(printed, "result").len() == 2);
    machine.unregister(&ids).expect("registered");
    assert_eq!(running.text(INNER), original);
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);

    let inside = |rip: u64| rip.checked_sub(at.0).filter(|o| offsets.contains(o));
    let (mut pairs, mut interrupted) = (0, 0);
    let mut events = events.iter().peekable();
    let mut calls = 0;
    while let Some(pre) = events.next() {
        assert_eq!(pre.kind, EventKind::Hit, "{pre:?}");
        assert!(inside(pre.regs.rip).is_some(), "{pre:?}");
        calls += usize::from(pre.regs.rip == at.0);
        let post = events.next().expect("a post-handler for each pre-handler");
        assert_eq!((post.kind, post.probe), (EventKind::Post, pre.probe));
        // At a call, another function runs before our next probepoint.
        if inside(post.regs.rip).is_some() {
            let next = events.peek().expect("a hit where the guest goes on");
            // QEMU 10.0 sets RF in the frames of interrupts, so after an interrupt the guest continues with RF set.
            let mut expected = post.regs;
            if rig == "tcg" && words(pre) != words(next) {
                expected.rflags |= next.regs.rflags & rflags::RF;
                interrupted += 1;
            }
            assert_eq!(expected, next.regs);
            pairs += 1;
        }
    }
    assert_eq!(calls, CALLS + 2);
    assert!(pairs >= 8 * calls, "{pairs}");
    eprintln!(
        "{pairs} pairs, {interrupted} of them interrupted, {emulated} emulated and {stepped} stepped sites"
    );
}

/// A place where an instruction of the kernel accesses user memory, and a system call that leads there. The address
/// of the memory is the call's argument `@`.
struct UserAccess {
    /// Candidates: functions, each with the offset of the instruction. The processor's features decide which one is
    /// used.
    places: &'static [(&'static str, u64)],
    /// Register that holds the address of the memory at the instruction.
    register: Gpr,
    /// Number and arguments of the system call, with `@` for the address.
    call: &'static str,
    write: bool,
}

const USER_ACCESSES: [UserAccess; 3] = [
    // put_user of getcpu.
    UserAccess {
        places: &[("__put_user_nocheck_4", 3)],
        register: Gpr::Rcx,
        call: "309 @ 0 0",
        write: true,
    },
    // get_user of ioctl(0, FIONBIO).
    UserAccess {
        places: &[("__get_user_4", 0x1c)],
        register: Gpr::Rax,
        call: "16 0 0x5421 @",
        write: false,
    },
    // copy_from_user of nanosleep.
    UserAccess {
        // In this order: for a processor with neither `rep_good` nor `erms`, or with `erms` but not `fsrm`; for one
        // with `fsrm`; for one with `rep_good` only (copy_user_generic in arch/x86/include/asm/uaccess_64.h).
        places: &[
            ("copy_user_short_string", 0xa),
            ("copy_user_enhanced_fast_string", 0xa),
            ("copy_user_generic_string", 0x2c),
        ],
        register: Gpr::Rsi,
        call: "35 @ 0",
        write: false,
    },
];

#[test]
fn an_access_to_user_memory_faults_in_its_place() {
    const TIMES: usize = 3;
    if rig("faults").is_none() {
        return;
    }
    let mut commands = "echo ready; read line; for n in 1 2 3; do ".to_owned();
    for access in &USER_ACCESSES {
        for address in ["buffer", &UNMAPPED.to_string()] {
            commands += &format!("workload raw {}; ", access.call.replace('@', address));
        }
    }
    commands += "done";
    let mut running = Running::shared(&guest(1, &script(&commands)));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let is_there = |(function, fixup): &(&str, u64)| {
        let function = machine.image().symbols().lookup(function);
        function.is_ok_and(|it| machine.image().has_fixup(it.addr.wrapping_add(*fixup)))
    };
    let mut places = USER_ACCESSES.iter().flat_map(|access| access.places);
    if !places.all(is_there) {
        machine.console_input(b"\n");
        let (ending, _, printed) = running.finish();
        assert_clean(&ending, &printed, 0);
        eprintln!("skipped: this kernel does not access user memory at the places known here");
        return;
    }
    let place = |&(function, fixup): &(&str, u64)| {
        let mut spec = probe(&format!("p {function}+{fixup}"));
        spec.actions.post = true;
        spec.actions.faults = true;
        running.register(spec)
    };
    let places = USER_ACCESSES.map(|access| access.places.iter().map(place).collect::<Vec<_>>());
    let ids = places.concat();
    for id in &ids {
        assert_eq!(info(&machine, *id).mechanism, Some(Mechanism::Stepped));
    }
    machine.console_input(b"\n");
    running.wait_printed(|printed| values(printed, "result").len() == 6 * TIMES);
    // Other tasks in the guest copy user memory as well. Their hits must not change the counts from here on.
    machine.disable(&ids).expect("registered");
    let counts: HashMap<_, _> = ids
        .iter()
        .map(|id| (*id, info(&machine, *id).counts))
        .collect();
    machine.unregister(&ids).expect("registered");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let expected = [0, -EFAULT].repeat(3 * TIMES);
    assert_eq!(values(&printed, "result"), expected);

    for id in ids {
        let counts = &counts[&id];
        let all = of(&events, id);
        let count = |wanted: &dyn Fn(&Event) -> bool| {
            all.iter().filter(|event| wanted(event)).count() as u64
        };
        let is_fault = |event: &Event| matches!(event.kind, EventKind::Fault { .. });
        assert_eq!(counts.hits, count(&|event| event.kind == EventKind::Hit));
        assert_eq!(counts.faults, count(&is_fault));
        // Each hit ends with a fault or with the post-handler.
        let posts = count(&|event| event.kind == EventKind::Post);
        assert_eq!(counts.hits, counts.faults + posts);
        assert_eq!(counts.missed, 0);
    }
    for (access, ids) in USER_ACCESSES.iter().zip(places) {
        let of_places = access.places.iter().zip(ids).map(|((function, _), id)| {
            let mut all = of(&events, id);
            all.retain(|event| event.regs.get(access.register) == UNMAPPED);
            (*function, id, all)
        });
        let used: Vec<_> = of_places.filter(|(.., all)| !all.is_empty()).collect();
        let [(function, id, at_unmapped)] = &used[..] else {
            panic!("none or several of {:?}: {counts:?}", access.places);
        };
        assert_eq!(at_unmapped.len(), 2 * TIMES, "{function}");
        let ended = counts[id].hits - counts[id].faults;
        assert!(ended >= TIMES as u64, "{function}: {ended}");
        for pair in at_unmapped.chunks(2) {
            assert_eq!(pair[0].kind, EventKind::Hit);
            assert_eq!(
                pair[1].kind,
                EventKind::Fault {
                    vector: PAGE_FAULT,
                    error_code: Some(u32::from(access.write) << 1),
                }
            );
            // RIP is the probepoint, and the flags are the guest's own.
            assert_eq!(pair[1].regs, pair[0].regs);
        }
        eprintln!("{function}: {:?}", counts[id]);
    }
}
