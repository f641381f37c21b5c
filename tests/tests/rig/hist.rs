//! Compares histograms of events on a stock guest with those of the guest's own kernel, and with the calls that
//! were made.
//!
//! `HVPROBE_COUNTED` is the number of calls to count on four virtual CPUs. The default is a hundred thousand.

use std::collections::BTreeMap;
use std::env;
use std::process::{Command, Stdio};

use hvprobe_hit::aggregate::{KeyValue, Snapshot};
use hvprobe_machine::{Aggregation, Mechanism, ProbeSpec};
use hvprobe_spec::histogram::read_histogram;
use hvprobe_tests::rig::{
    Running, assert_clean, info, optimizing_guest, probe, progress, quickly, rig, rig_cpus, values,
};

/// Histograms of the calls of one program, which the kernel and hvprobe both count.
const HISTOGRAMS: [&str; 6] = [
    "keys=len:vals=len",
    "keys=len.log2:vals=len:sort=len",
    "keys=len.hex,common_pid.execname:vals=len",
    "keys=len.buckets=100:sort=hitcount.descending",
    "keys=low:vals=len,low",
    "keys=len:size=8 if len > 100",
];
/// Fields of the event; `low` is only a part of its register.
const FIELDS: &str = "len=%dx:u64 low=%dx:u8";
/// Modifier of keys that kernels before 5.14 do not have.
const NEWER: &str = "buckets";
/// Printed by a guest whose kernel has no histograms.
const NONE: &str = "no histograms here";

/// Part of the trigger of the only histogram whose order is defined, because its sort values are all different.
const SORTED: &str = ":sort=len:";

/// Entries of a histogram as printed, and the number of hits that it shows.
type Entries = (Vec<String>, String);

/// Returns the histograms in `printed` by their triggers: hvprobe's if `ours`, else the kernel's.
fn histograms(printed: &str, ours: bool) -> BTreeMap<String, Entries> {
    let mut found = BTreeMap::new();
    for section in printed.split("# event histogram").skip(1) {
        let trigger = section
            .lines()
            .find_map(|line| line.strip_prefix("# trigger info: "));
        let trigger = trigger.expect("a trigger").trim_end();
        let theirs = trigger.strip_suffix(" [active]");
        if theirs.is_none() != ours {
            continue;
        }
        let lines = section.lines().map(str::trim_end);
        let entries = lines.clone().filter(|line| line.starts_with('{'));
        let hits = lines
            .clone()
            .find_map(|line| line.trim_start().strip_prefix("Hits: "));
        let of = theirs.unwrap_or(trigger).to_owned();
        let mut entries: Vec<_> = entries.map(str::to_owned).collect();
        if !of.contains(SORTED) {
            entries.sort();
        }
        found.insert(of, (entries, hits.expect("totals").to_owned()));
    }
    found
}

#[test]
fn entries_are_those_of_the_guests_own_histograms() {
    if rig("histograms held against the kernel's").is_none() {
        return;
    }
    let wanted: Vec<String> = HISTOGRAMS
        .iter()
        .map(|histogram| match histogram.split_once(" if ") {
            Some((clauses, filter)) => format!("{clauses} if {filter} && comm == \"dd\""),
            None => format!("{histogram} if comm == \"dd\""),
        })
        .collect();
    let triggers: Vec<_> = wanted
        .iter()
        .map(|it| format!("echo 'hist:{it}' >> events/kprobes/e/trigger || echo refused"))
        .collect();
    // Our probe is on `ksys_read`, and the kernel's on `vfs_read`, which `ksys_read` calls with the same length.
    let script = format!(
        "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing; \
         grep -q hist:keys README || echo {NONE}; \
         echo 'p:e vfs_read {FIELDS}' > kprobe_events; {}; \
         for bs in 1 2 3 4 5 63 64 65 99 100 101 300 4096 5000; do \
         dd if=/dev/zero of=/dev/null bs=$bs count=$((bs % 5 + 2)) 2>/dev/null; done; \
         cat events/kprobes/e/hist; echo end of histograms",
        triggers.join("; ")
    );
    let mut command = Command::new("hvprobe");
    command.arg("run").args(quickly());
    command.args(["--console", "-p"]);
    command.arg(format!("p ksys_read {FIELDS}"));
    for histogram in &wanted {
        command.args(["--hist", histogram]);
    }
    command.args(["--", "sh", "-c", &script]);
    let output = command
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("end of histograms"),
        "{stderr}\n{printed}"
    );
    let (theirs, ours) = (histograms(&printed, false), histograms(&printed, true));
    assert_eq!(ours.len(), wanted.len(), "{printed}");
    if printed.contains(NONE) {
        eprintln!("skipped: the guest's kernel has no histograms to hold ours against");
        return;
    }
    for (of, expected) in &theirs {
        assert_eq!(ours.get(of), Some(expected), "{of}\n{printed}");
    }
    let newer = wanted.iter().filter(|it| it.contains(NEWER)).count();
    let least = wanted.len() - newer;
    assert!(theirs.len() >= least, "{printed}");
    let compared: usize = theirs.values().map(|(entries, _)| entries.len()).sum();
    eprintln!("{} histograms, {compared} entries", theirs.len());
    assert!(compared > 30, "{printed}");
}

/// Makes two programs call each of two system calls, one of which is probed without exits and the other with exits.
/// Counts the calls in enough histograms that the guest makes calls faster than hvprobe counts them. Returns the
/// number of hits in one histogram, of lost hits, and of calls.
fn count_calls(running: &mut Running, wait_for_room: bool) -> (u64, u64, u64) {
    const CALLS: [u64; 2] = [60_000, 15_000];
    const HISTOGRAMS: usize = 12;
    let machine = running.machine.clone();
    let spec = |definition, mechanism| {
        let mut spec = probe(definition);
        spec.actions.wait_for_room = wait_for_room;
        ProbeSpec {
            mechanism: Some(mechanism),
            ..spec
        }
    };
    let optimized = running.register(spec("p __x64_sys_getpgid", Mechanism::Optimized));
    let emulated = running.register(spec("p __x64_sys_getsid", Mechanism::Emulated));
    let histogram = "keys=probe,comm:vals=common_timestamp.max,common_pid.min";
    let histogram = read_histogram(histogram).expect("a histogram");
    let counted: Vec<_> = (0..HISTOGRAMS)
        .map(|_| machine.aggregate(&[optimized, emulated], histogram.clone()))
        .map(|counted| counted.expect("it can be counted"))
        .collect();
    let [many, few] = CALLS;
    machine.console_input(format!("{many} {few}\n").as_bytes());
    let printed = running.wait_for(&format!("finished {wait_for_room}"));
    let made = values(&printed, "calls");
    let expected = [many, many, few, few].map(u64::cast_signed);
    assert!(made.ends_with(&expected), "{made:?}");
    assert!(machine.flush_events());
    let snapshot = read(&counted[0]);
    assert_eq!(
        (snapshot.dropped, snapshot.rows.len()),
        (0, 2),
        "{snapshot:?}"
    );
    for (id, calls) in [(optimized, many), (emulated, few)] {
        let key = KeyValue::Number(id.0.into());
        let row = snapshot.rows.iter().find(|row| row.keys[0] == key);
        let row = row.expect("an entry of each");
        assert!(2 * calls - row.hits <= snapshot.lost, "{snapshot:?}");
        assert_eq!(info(&machine, id).counts.hits, 2 * calls);
        assert_eq!(row.keys[1], KeyValue::Text(b"workload".as_slice().into()));
        assert_eq!(row.sums[0].count, row.hits);
        assert!(row.sums[1].least > 1, "{row:?}");
    }
    for other in &counted[1..] {
        let other = read(other);
        assert_eq!((other.hits, other.lost), (snapshot.hits, snapshot.lost));
    }
    counted[0].clear();
    assert_eq!(read(&counted[0]).hits, 0);
    machine
        .unregister(&[optimized, emulated])
        .expect("registered");
    (snapshot.hits, snapshot.lost, 2 * (many + few))
}

#[test]
fn every_hit_is_counted_with_and_without_exits() {
    if rig("exact histograms").is_none() {
        return;
    }
    let cpus = u32::try_from(rig_cpus().clamp(1, 2)).expect("few");
    let script = "echo ready; for round in false true; do read many few; \
                  workload calls getpgid $many & workload calls getpgid $many; wait; \
                  workload calls getsid $few & workload calls getsid $few; wait; \
                  echo finished $round; done; read line";
    let mut running = Running::shared(&optimizing_guest(cpus, &["sh", "-c", script]));
    running.wait_for("ready");
    // In the first round, a hit that finds the ring full is lost and counted as lost. In the second, it waits.
    let (hits, lost, calls) = count_calls(&mut running, false);
    eprintln!("{calls} calls, {hits} hits counted and {lost} lost, as none waits");
    assert_eq!(hits + lost, calls);
    assert!(lost > 0, "the guest is too slow to show anything");
    let (hits, lost, calls) = count_calls(&mut running, true);
    eprintln!("{calls} calls, {hits} hits counted and {lost} lost, as each waits");
    assert_eq!((hits, lost), (calls, 0));
    running.machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

/// Number of calls that one process makes.
const CALLS: u64 = 25_000;

#[test]
fn sums_are_those_of_the_calls_of_four_virtual_cpus() {
    const CPUS: u32 = 4;
    if rig("sums on four virtual CPUs").is_none() {
        return;
    }
    let wanted: u64 =
        env::var("HVPROBE_COUNTED").map_or(100_000, |it| it.parse().expect("a number"));
    let rounds = wanted.div_ceil(u64::from(CPUS) * CALLS);
    let processes = usize::try_from(u64::from(CPUS) * rounds).expect("few");
    let one = format!(
        "i=0; while [ $i -lt {rounds} ]; do workload calls getpgid {CALLS}; i=$((i+1)); done"
    );
    let script =
        format!("echo ready; read line; for n in 1 2 3 4; do ({one}) & done; wait; read line");
    let mut running = Running::shared(&optimizing_guest(CPUS, &["sh", "-c", &script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let mut spec = probe("p __x64_sys_getpgid");
    spec.mechanism = Some(Mechanism::Optimized);
    spec.actions.wait_for_room = true;
    let id = running.register(spec);
    let count = |histogram: &str| {
        let histogram = read_histogram(histogram).expect("a histogram");
        machine
            .aggregate(&[id], histogram)
            .expect("it can be counted")
    };
    let (by_process, by_cpu) = (count("keys=common_pid"), count("keys=common_cpu"));
    machine.console_input(b"\n");
    for done in 1..=processes {
        let printed = running.wait_printed(|printed| values(printed, "calls").len() >= done);
        assert!(
            values(&printed, "calls")
                .iter()
                .all(|made| u64::try_from(*made) == Ok(CALLS))
        );
        progress(&format!("{done} of {processes} processes are done"));
    }
    assert!(machine.flush_events());
    let calls = u64::from(CPUS) * rounds * CALLS;
    assert_eq!(info(&machine, id).counts.hits, calls);
    let (by_process, by_cpu) = (read(&by_process), read(&by_cpu));
    for snapshot in [&by_process, &by_cpu] {
        assert_eq!(
            (snapshot.hits, snapshot.lost, snapshot.dropped),
            (calls, 0, 0)
        );
        assert_eq!(snapshot.rows.iter().map(|row| row.hits).sum::<u64>(), calls);
    }
    assert_eq!(by_process.rows.len(), processes);
    assert!(
        by_process.rows.iter().all(|row| row.hits == CALLS),
        "{by_process:?}"
    );
    let cpus = by_cpu.rows.len();
    assert!(cpus > 1, "{by_cpu:?}");
    eprintln!("{calls} calls of {processes} processes on {cpus} virtual CPUs");
    machine.unregister(&[id]).expect("registered");
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

/// Reads the histogram that `counted` holds.
fn read(counted: &Aggregation) -> Snapshot {
    counted.read().expect("the probes have what is asked for")
}
