//! Tests that the oops messages of a stock guest for a fault at a probepoint name the probed function, as if there
//! were no probe. Tries each mechanism that runs a copy.

use hvprobe_arch::regs::Gpr;
use hvprobe_machine::{EndReason, Mechanism, ProbeSpec};
use hvprobe_spec::Change;
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, info, optimizing_guest, probe, rig};

/// Function that loads the process id from memory to which RDI points, right after the entry nop.
const ENTRY: &str = "__x64_sys_getpgid";
/// Address at which nothing is mapped.
const NOWHERE: u64 = 0x10;

/// Makes three calls, each in a process of its own, which is killed by its fault.
const COMMANDS: &str = "for n in 1 2 3; do \
       echo ready $n; read line; workload calls getpgid 1; echo died $n; \
     done; dmesg | grep -o 'RIP: 0010:[^ ]*'; echo told; exit 5";

#[test]
fn an_oops_names_the_probed_function() {
    if rig("a fault").is_none() {
        return;
    }
    let config = optimizing_guest(1, &["sh", "-c", COMMANDS]);
    let mut running = Running::boot(config);
    running.wait_for("ready 1");
    let machine = running.machine.clone();
    let behind = names::behind_entry(ENTRY);
    let mut spoils = ProbeSpec {
        mechanism: Some(Mechanism::Emulated),
        ..probe(&format!("p {ENTRY}"))
    };
    spoils.actions.changes = vec![Change::Register {
        register: Gpr::Rdi,
        value: NOWHERE,
    }];
    running.register(spoils);
    let ways = [Mechanism::Optimized, Mechanism::Boosted, Mechanism::Stepped];
    for (n, way) in (1..).zip(ways) {
        running.wait_for(&format!("ready {n}"));
        let faults = ProbeSpec {
            mechanism: Some(way),
            ..probe(&format!("p {ENTRY}+{behind}"))
        };
        let id = running.register(faults);
        assert_eq!(info(&machine, id).mechanism, Some(way));
        machine.console_input(b"\n");
        running.wait_for(&format!("died {n}"));
        let counts = info(&machine, id).counts;
        assert_eq!((counts.hits, counts.faults), (1, 1), "{way}: {counts:?}");
        machine.unregister(&[id]).expect("registered");
    }
    let printed = running.wait_for("told");
    let (ending, _) = running.end();
    assert_eq!(ending.reason, Some(EndReason::Shutdown), "{printed}");
    assert_eq!(ending.guest_status, Some(5), "{printed}");
    // An oops prints RIP twice.
    let named: Vec<&str> = printed
        .lines()
        .filter_map(|line| line.trim().strip_prefix("RIP: 0010:"))
        .collect();
    let expected = format!("{ENTRY}+{behind:#x}/");
    assert!(
        named.len() >= ways.len() && named.iter().all(|name| name.starts_with(&expected)),
        "{named:?}"
    );
}
