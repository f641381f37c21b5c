//! Tests probes in a stock guest: colocation, changes while the guest is busy, the guest's own breakpoints, and the
//! cost of a hit.

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::SymbolKind;
use hvprobe_machine::{Mechanism, ProbeInfo, ProbeState};
use hvprobe_tests::rig::{Running, assert_clean, guest, probe, progress, rig, rounds};
use hvprobe_tests::{names, wait};

/// Functions that every workload and every timer interrupt enters.
const HOT: [&str; 16] = [
    "vfs_read",
    "vfs_write",
    "kmem_cache_alloc",
    "kmem_cache_free",
    "handle_mm_fault",
    "__schedule",
    "try_to_wake_up",
    "path_openat",
    "link_path_walk",
    "dput",
    "ktime_get",
    "hrtimer_interrupt",
    "update_process_times",
    "scheduler_tick",
    "__alloc_pages",
    "filldir64",
];

const FUNCTION: &str = "__x64_sys_getpgid";
/// Number of bytes to compare: enough for the function and for all bytes that may have been patched.
const FUNCTION_BYTES: usize = 64;

/// Returns the value of the line `key: value` that the workload prints.
fn value(printed: &str, key: &str) -> u64 {
    printed
        .lines()
        .filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "))
        .find_map(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no `{key}: N` in:\n{printed}"))
}

/// Returns the offsets of the function's first probeable instructions, found by registering probes.
fn probeable_offsets(running: &Running, wanted: usize) -> Vec<u64> {
    let mut found = Vec::new();
    for offset in 0..FUNCTION_BYTES as u64 {
        let spec = probe(&format!("p {FUNCTION}+{offset}"));
        if let Ok(ids) = running.machine.register(&[spec]) {
            running.machine.unregister(&ids).expect("just registered");
            found.push(offset);
        }
        if found.len() == wanted {
            break;
        }
    }
    found
}

fn text_of(running: &Running, at: Gva) -> Vec<u8> {
    let mut text = vec![0; FUNCTION_BYTES];
    running
        .machine
        .read_kernel(at, &mut text)
        .expect("the function is mapped");
    text
}

fn address(running: &Running) -> Gva {
    let symbols = running.machine.image().symbols();
    symbols.lookup(FUNCTION).expect("a known function").addr
}

#[test]
fn ten_colocated_probes_all_fire_in_the_order_of_registration() {
    const CALLS: usize = 200;
    if rig("colocated probes").is_none() {
        return;
    }
    let mut config = guest(1, &["workload", "calls", "getpgid", "200"]);
    config.probes = (0..10)
        .map(|n| probe(&format!("p:probe{n} {FUNCTION}")))
        .collect();
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(events.len(), 10 * CALLS);
    let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
    assert_eq!(ids.len(), 10);
    for hit in events.chunks(10) {
        assert!(hit.iter().map(|event| event.probe).eq(ids.iter().copied()));
        assert!(hit.iter().all(|event| event.guest_tsc == hit[0].guest_tsc));
    }
    for probe in machine.probes() {
        assert_eq!((probe.counts.hits, probe.counts.missed), (CALLS as u64, 0));
    }
}

#[test]
fn an_emulated_hit_costs_one_kvm_run_and_no_other_ioctl() {
    const CALLS: u64 = 500;
    if rig("ioctls per hit").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(1, &["workload", "stdin-hold", "1"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let ids = machine
        .register(&[probe(&format!("p {FUNCTION}"))])
        .expect("the function can be probed");
    assert_eq!(machine.probes()[0].mechanism, Some(Mechanism::Emulated));
    let hits = || machine.probes()[0].counts.hits;
    machine.pause().expect("running");
    let (before, hits_before) = (machine.ioctls()[0], hits());
    machine.resume().expect("paused");
    wait::until("hits", hits, |now| *now >= hits_before + CALLS);
    machine.pause().expect("running");
    let (after, hits_after) = (machine.ioctls()[0], hits());
    let hits = hits_after - hits_before;
    // Parking a virtual CPU reads its TSC. Nothing else needs an ioctl other than KVM_RUN.
    assert!(
        after.other - before.other <= 2,
        "{before:?} {after:?} {hits} hits"
    );
    // Timer ticks and the like cause further exits, but not one for each hit.
    let runs = after.run - before.run;
    assert!(
        runs >= hits && runs < hits + hits / 2 + 100,
        "{runs} runs for {hits} hits"
    );
    machine.resume().expect("paused");
    machine.unregister(&ids).expect("registered");
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn text_is_the_original_after_probes_came_and_went_on_two_busy_vcpus() {
    if rig("changes while busy").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(2, &["workload", "stdin-hold", "2"]));
    running.wait_for("ready");
    let at = address(&running);
    let original = text_of(&running, at);
    let offsets = probeable_offsets(&running, 5);
    assert!(offsets.len() >= 3, "{offsets:?}");
    assert_eq!(text_of(&running, at), original);
    let machine = running.machine.clone();
    let batch: Vec<_> = offsets
        .iter()
        .map(|offset| probe(&format!("p {FUNCTION}+{offset}")))
        .collect();
    let mut hits = 0;
    let rounds = rounds(30_u64);
    for round in 0..rounds {
        let ids = machine.register(&batch).expect("known to be probeable");
        assert_ne!(text_of(&running, at), original);
        let counted = |ids: &[_]| -> u64 {
            let probes = machine.probes();
            let of = |id| probes.iter().find(|p: &&ProbeInfo| p.id == id);
            ids.iter().filter_map(|id| Some(of(*id)?.counts.hits)).sum()
        };
        wait::until("hits", || counted(&ids), |now| *now >= 20);
        if round % 2 == 0 {
            machine.disable(&ids).expect("registered");
            assert_eq!(text_of(&running, at), original);
            machine.enable(&ids).expect("registered");
        }
        hits += counted(&ids);
        machine.unregister(&ids).expect("registered");
        assert_eq!(text_of(&running, at), original, "round {round}");
    }
    assert!(hits >= 20 * rounds);
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert!(events.iter().any(|event| event.vcpu == 0));
    assert!(events.iter().any(|event| event.vcpu == 1));
}

#[test]
fn enabled_from_boot_to_end_hits_equal_the_calls_of_two_busy_vcpus() {
    if rig("exact count on 2 vCPUs").is_none() {
        return;
    }
    let mut config = guest(2, &["workload", "hammer", "2", "2"]);
    config.probes = vec![probe(&format!("p {FUNCTION}"))];
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    let counts = machine.probes()[0].counts;
    assert_eq!((counts.hits, counts.missed), (value(&printed, "calls"), 0));
}

#[test]
fn the_guests_own_kprobe_counts_every_call_beside_ours() {
    const CALLS: u64 = 300;
    if rig("the guest's own kprobe").is_none() {
        return;
    }
    // Our probe is on the caller. The guest's own probe is in the called function, after the entry nop. Ftrace
    // cannot be used there, so that probe is an int3.
    let inner = format!("do_getpgid+{}", names::behind_entry("do_getpgid"));
    let mut config = guest(1, &["workload", "kprobe-event", &inner, "300"]);
    config.probes = vec![probe(&format!("p {FUNCTION}"))];
    let mut running = Running::shared(&config);
    let machine = running.machine.clone();
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(value(&printed, "kprobe_profile"), CALLS, "{printed}");
    assert_eq!(machine.probes()[0].counts.hits, CALLS);
}

#[test]
fn a_refused_probe_leaves_nothing_of_its_batch() {
    if rig("all or nothing").is_none() {
        return;
    }
    let mut running = Running::shared(&guest(1, &["workload", "stdin-hold", "1"]));
    running.wait_for("ready");
    let at = address(&running);
    let original = text_of(&running, at);
    let machine = running.machine.clone();
    for bad in [
        "p no_such_function_anywhere",
        "p exc_int3",
        "p __x64_sys_getpgid+6",
        "p jiffies",
        "p 0xffffffff80000000",
        "p 0x10",
        "p start_kernel",
        "p __x64_sys_getpgid+0xffff",
    ] {
        let batch = [probe(&format!("p {FUNCTION}")), probe(bad)];
        let error = machine.register(&batch).expect_err(bad);
        let text = hvprobe_spec::chain(&error);
        assert!(text.contains("probe 1"), "{text}");
        assert_eq!(text_of(&running, at), original, "{text}");
        assert_eq!(machine.probes(), [], "{text}");
        eprintln!("{bad}: {text}");
    }
    machine.console_input(b"\n");
    let (ending, events, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    assert_eq!(events, []);
}

#[test]
fn hundreds_of_probes_all_over_the_kernel_leave_the_guest_sound() {
    const FUNCTIONS: usize = 150;
    if rig("probes all over the kernel").is_none() {
        return;
    }
    let script = "echo ready; read line; ls -lR /sys/kernel/mm >/tmp/list; \
        gzip -c /tmp/list | gunzip >/dev/null; workload reads 100; echo work done";
    let mut running = Running::shared(&guest(2, &["sh", "-c", script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let symbols = machine.image().symbols();
    let names: Vec<String> = symbols
        .iter()
        .filter(|symbol| symbol.kind == SymbolKind::Text && symbol.size > 64)
        .filter(|symbol| symbols.lookup(symbol.name).is_ok())
        .map(|symbol| symbol.name.to_owned())
        .collect();
    let (mut entries, mut inside) = (0, 0);
    let everywhere = names.iter().step_by(names.len() / FUNCTIONS);
    let chosen = everywhere.map(String::as_str).chain(HOT.map(names::own));
    for (number, name) in chosen.enumerate() {
        if number.is_multiple_of(50) {
            progress(&format!("{number} functions"));
        }
        let register = |offset: u64| machine.register(&[probe(&format!("p {name}+{offset}"))]);
        entries += usize::from(register(0).is_ok());
        // The first instruction that can be probed after the entry nop, 6 to 29 bytes into the function.
        inside += usize::from((6..30).any(|offset| register(offset).is_ok()));
    }
    assert!(
        entries > FUNCTIONS / 2 && inside > FUNCTIONS / 2,
        "{entries} {inside}"
    );
    machine.console_input(b"\n");
    progress("all are probed");
    running.wait_for("work done");
    let probes = machine.probes();
    let hit = probes.iter().filter(|probe| probe.counts.hits > 0).count();
    assert!(hit > HOT.len(), "{hit} of {} probes were hit", probes.len());
    assert_eq!(
        probes.iter().map(|probe| probe.counts.faults).sum::<u64>(),
        0
    );
    assert!(probes.iter().all(|probe| probe.state == ProbeState::Placed));
    let hits: u64 = probes.iter().map(|probe| probe.counts.hits).sum();
    eprintln!("{} probes, {hit} of them hit, {hits} hits", probes.len());
    let ids: Vec<_> = probes.iter().map(|probe| probe.id).collect();
    machine.unregister(&ids).expect("registered");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

#[test]
fn stopping_a_busy_guest_ends_it_without_probes() {
    if rig("stop").is_none() {
        return;
    }
    let mut running = Running::boot(guest(1, &["workload", "stdin-hold", "1"]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let at = address(&running);
    let original = text_of(&running, at);
    let ids = machine
        .register(&[
            probe(&format!("p {FUNCTION}+{}", names::behind_entry(FUNCTION))),
            probe(&format!("p {FUNCTION}")),
        ])
        .or_else(|_| machine.register(&[probe(&format!("p {FUNCTION}"))]))
        .expect("the function can be probed");
    assert!(
        machine
            .probes()
            .iter()
            .all(|p| p.state == ProbeState::Placed)
    );
    assert!(!ids.is_empty());
    machine.stop();
    assert_eq!(text_of(&running, at), original);
    assert_eq!(machine.probes(), []);
}
