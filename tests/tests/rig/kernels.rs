//! Properties that hold on every kernel, tested in a few guests: `cargo lab matrix` runs these tests with one
//! kernel after another. Nothing here depends on the code of a kernel's functions.

use std::time::Duration;

use hvprobe_hit::event::EventKind;
use hvprobe_machine::{Event, MachineConfig, Mechanism, ProbeId, ProbeSpec, ProbeState};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, optimizing_guest, probe, rig, short, values,
};

/// A function that only the workload calls.
const FUNCTION: &str = "__x64_sys_getpgid";
const SLEEP: &str = "__x64_sys_clock_nanosleep";

/// Start of the direct map of physical memory, if the kernel does not choose it at random (`__PAGE_OFFSET_BASE_L4` and
/// `__PAGE_OFFSET_BASE_L5` in arch/x86/include/asm/page_64_types.h).
const DIRECT_MAP: [u64; 2] = [0xffff_8880_0000_0000, 0xff11_0000_0000_0000];

/// Registers a probe of [`FUNCTION`] with the mechanism `wanted` at one of `offsets`, and removes that offset from
/// `offsets`.
fn register(running: &Running, wanted: Mechanism, offsets: &mut Vec<u64>) -> ProbeId {
    let machine = &running.machine;
    let mut reasons = Vec::new();
    for (n, offset) in offsets.clone().into_iter().enumerate() {
        let spec = ProbeSpec {
            mechanism: Some(wanted),
            ..probe(&format!("p {FUNCTION}+{offset}"))
        };
        match machine.register(&[spec]) {
            Ok(ids) if info(machine, ids[0]).mechanism == Some(wanted) => {
                offsets.remove(n);
                return ids[0];
            }
            Ok(ids) => {
                reasons.push(format!("{:?}", info(machine, ids[0])));
                machine.unregister(&ids).expect("just registered");
            }
            Err(error) => reasons.push(chain(&error)),
        }
    }
    panic!("nothing is {wanted:?}: {reasons:#?}");
}

#[test]
fn counts() {
    if rig("exact counts on two virtual CPUs").is_none() {
        return;
    }
    let mut config = guest(2, &["workload", "hammer", "1", "2"]);
    config.probes = vec![probe(&format!("p {FUNCTION}"))];
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let counts = machine.probes()[0].counts;
    let calls = values(&printed, "calls")[0];
    assert!(calls > 100, "{calls} calls");
    let hits = i64::try_from(counts.hits).expect("few");
    assert_eq!((hits, counts.missed, counts.faults), (calls, 0, 0));
}

/// Addresses of a guest's kernel.
struct Placed {
    /// How far the kernel was moved.
    offset: Option<u64>,
    /// Address of `_stext`.
    start: u64,
    /// Start of the direct map.
    direct_map: u64,
}

/// Boots a guest with `cmdline`. Checks that its kernel has the symbols' addresses, and that probes have hits.
fn placed(cmdline: String) -> Placed {
    let script = "grep -w _stext /proc/kallsyms; echo ready; read go; workload calls getpgid 3";
    let config = MachineConfig {
        cmdline,
        ..optimizing_guest(1, &["sh", "-c", script])
    };
    let mut running = Running::boot(config);
    let printed = running.wait_for("ready");
    let machine = running.machine.clone();
    let start = running.address("_stext").0;
    assert!(
        printed.contains(&format!("{start:x} T _stext")),
        "{printed}"
    );
    let mut base = [0; 8];
    let at = running.address("page_offset_base");
    machine.read_kernel(at, &mut base).expect("kernel data");
    let probes = ["p", "r"].map(|kind| running.register(probe(&format!("{kind} {FUNCTION}"))));
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    for id in probes {
        assert_eq!(info(&machine, id).counts.hits, 3, "{printed}");
    }
    Placed {
        offset: machine.image().offset(),
        start,
        direct_map: u64::from_le_bytes(base),
    }
}

#[test]
fn kaslr() {
    if rig("the kernel at random addresses").is_none() {
        return;
    }
    if names::has_symbols_of_functions_only() {
        eprintln!("skipped: this kernel's symbols do not lead to its data");
        return;
    }
    let linked = placed(short() + " nokaslr");
    assert_eq!(linked.offset, None);
    assert!(
        DIRECT_MAP.contains(&linked.direct_map),
        "{:#x}",
        linked.direct_map
    );
    let moved = placed(short());
    let offset = moved.offset.expect("a stock kernel can be moved");
    assert_eq!(moved.start, linked.start + offset);
    assert!(
        offset.is_multiple_of(2 << 20) && offset < 1 << 30,
        "{offset:#x}"
    );
    assert!(
        !DIRECT_MAP.contains(&moved.direct_map),
        "{:#x}",
        moved.direct_map
    );
}

#[test]
fn mechanisms() {
    const CALLS: u64 = 500;
    if rig("each mechanism by name").is_none() {
        return;
    }
    let calls = CALLS.to_string();
    let command = ["workload", "held", "calls", "getpgid", &calls];
    let mut running = Running::shared(&optimizing_guest(2, &command));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let text = running.text(FUNCTION);
    let mut offsets = running.instructions(FUNCTION);
    // Mechanisms that only some instructions allow come first.
    let ids = [
        Mechanism::Optimized,
        Mechanism::Boosted,
        Mechanism::Stepped,
        Mechanism::Emulated,
    ]
    .map(|wanted| register(&running, wanted, &mut offsets));
    machine.console_input(b"\n");
    running.wait_for("over");
    for id in ids {
        let info = info(&machine, id);
        let counts = (info.counts.hits, info.counts.missed, info.counts.faults);
        assert_eq!(counts, (CALLS, 0, 0), "{info:?}");
    }
    machine.unregister(&ids).expect("registered");
    assert_eq!(running.text(FUNCTION), text);
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(events.len() as u64, 4 * CALLS);
    let named = |event: &Event| event.task.is_some_and(|task| task.comm() == "workload");
    assert!(events.iter().all(named), "a hit without its task");
}

/// Checks that return probes report return values and durations, in a guest with the configuration that `config`
/// returns. Returns the mechanisms used.
fn follow(config: impl FnOnce(u32, &[&str]) -> MachineConfig) -> [Mechanism; 2] {
    const SLEPT: Duration = Duration::from_millis(50);
    const ESRCH: i64 = 3;
    let script = "echo ready; read go; for n in 1 2 3; do usleep 50000; done; \
        workload raw 121 31007; echo over; read go";
    let mut running = Running::shared(&config(2, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let texts = [SLEEP, FUNCTION].map(|function| running.text(function));
    let ids = [SLEEP, FUNCTION].map(|function| running.register(probe(&format!("r {function}"))));
    let mechanisms = ids.map(|id| info(&machine, id).mechanism.expect("armed"));
    machine.console_input(b"\n");
    running.wait_for("over");
    machine.unregister(&ids).expect("registered");
    assert_eq!(
        [SLEEP, FUNCTION].map(|function| running.text(function)),
        texts
    );
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let of = |id: ProbeId, comm: &str| {
        let events = events.iter().filter(|event| event.probe == id);
        let of_task = |event: &&Event| event.task.is_some_and(|task| task.comm() == comm);
        events.filter(of_task).collect::<Vec<_>>()
    };
    let sleeps = of(ids[0], "usleep");
    assert_eq!(sleeps.len(), 3, "{printed}");
    for event in sleeps {
        let EventKind::Return(call) = event.kind else {
            panic!("{event:?}");
        };
        let took = Duration::from_nanos(event.host_ns.saturating_sub(call.entry_ns));
        assert!(took >= SLEPT && took < 20 * SLEPT, "{took:?}");
        assert_eq!(event.regs.rax, 0);
    }
    let [gone] = of(ids[1], "workload")[..] else {
        panic!("{printed}");
    };
    assert_eq!(gone.regs.rax.cast_signed(), -ESRCH);
    mechanisms
}

#[test]
fn returns() {
    if rig("return probes").is_some() {
        let mechanisms = follow(guest);
        assert!(!mechanisms.contains(&Mechanism::Optimized));
    }
}

#[test]
fn returns_without_exits() {
    if rig("optimized return probes").is_some() {
        assert_eq!(follow(optimizing_guest), [Mechanism::Optimized; 2]);
    }
}

/// Checks that probes of modules are refused if the kernel's symbols do not lead to its modules, and that the guest
/// continues.
fn without_modules(mut running: Running, definitions: &[&str]) {
    let machine = running.machine.clone();
    for definition in definitions {
        let refused = machine
            .register(&[probe(definition)])
            .expect_err(definition);
        let why = chain(&refused);
        assert!(why.contains("CONFIG_KALLSYMS_ALL"), "{definition}: {why}");
    }
    // Ends the guest's script, whose commands may fail: the guest may lack a module for this kernel.
    machine.console_input(b"\n\n\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    eprintln!("skipped: this kernel's modules cannot be read: probes of them are refused");
}

#[test]
fn modules() {
    if rig("probes of a module").is_none() {
        return;
    }
    let script = "echo ready; read go; insmod /lib/modules/dummy.ko && echo loaded; read go; \
        cat /proc/net/dev >/dev/null; rmmod dummy && echo unloaded; read go";
    let mut running = Running::shared(&optimizing_guest(2, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let definitions = [
        "p dummy:dummy_setup",
        "r dummy:dummy_dev_init",
        "r dummy:dummy_get_stats64",
    ];
    if names::has_symbols_of_functions_only() {
        return without_modules(running, &definitions);
    }
    let ids = definitions.map(|definition| running.register(probe(definition)));
    machine.console_input(b"\n");
    running.wait_for("loaded");
    for id in ids {
        let info = info(&machine, id);
        assert_eq!(info.state, ProbeState::Placed, "{info:?}");
    }
    // Loading creates one device.
    let hits = |id| info(&machine, id).counts.hits;
    assert_eq!([hits(ids[0]), hits(ids[1])], [1, 1]);
    machine.console_input(b"\n");
    running.wait_for("unloaded");
    for id in ids {
        let info = info(&machine, id);
        assert_eq!(info.state, ProbeState::Gone, "{info:?}");
    }
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let by_cat = |event: &&Event| event.task.is_some_and(|task| task.comm() == "cat");
    let read = events.iter().filter(|event| event.probe == ids[2]);
    assert_eq!(read.filter(by_cat).count(), 1, "{printed}");
}
