//! Tests detours that read memory in a stock guest, at unmapped addresses and while NMIs arrive.
//!
//! `HVPROBE_STORM` sets the number of calls with bad pointers; the default is a few thousand.

use std::env;
use std::thread::{sleep, spawn};
use std::time::Duration;

use hvprobe_machine::{Event, Mechanism};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::rig::{
    Running, amid_nmis, assert_clean, info, optimizing_guest, probe, rig, rig_cpus, values,
};

const FUNCTION: &str = "__x64_sys_getpgid";
/// Reads the call's argument, which the system call entry has put into `pt_regs`, and the memory to which it
/// points. Reads that memory as the kernel's, as the process's, as a text of either, as more bytes than one load
/// reads, and through a further pointer.
const READS: &str = "at=+112(%di):u64 k=+0(+112(%di)):u64 u=+u0(+112(%di)):u32 t=+0(+112(%di)):string \
                     m=+0(+112(%di)):x8[24] far=+8(+0(+112(%di))):u16";
/// Number of leading items that can be read.
const READABLE: usize = 1;
const ITEMS: usize = 6;
/// Maximum time between two NMIs in microseconds.
const APART: u64 = 4000;

/// Returns the event as text if it is wrong. It is right if the pointer itself was read, and nothing else could be
/// read.
fn complaint(event: &Event) -> Option<String> {
    let unread: Vec<usize> = (0..ITEMS)
        .filter(|index| event.captured.is_unreadable(*index))
        .collect();
    let all: Vec<usize> = (READABLE..ITEMS).collect();
    let wrong = unread != all || event.captured.bytes()[8..].iter().any(|byte| *byte != 0);
    wrong.then(|| format!("{event:x?}"))
}

#[test]
fn pointers_that_lead_nowhere_are_faults_in_detours_that_nmis_interrupt() {
    if rig("pointers that lead nowhere").is_none() {
        return;
    }
    let calls: u64 = env::var("HVPROBE_STORM").map_or(6_000, |it| it.parse().expect("a number"));
    let cpus = u32::try_from(rig_cpus().clamp(1, 2)).expect("few");
    let both = format!("workload calls nowhere {calls} & workload calls nowhere {calls}; wait");
    let script = amid_nmis(&format!("echo ready; read line; {both}"));
    let mut running = Running::boot(optimizing_guest(cpus, &["sh", "-c", &script]));
    running.wait_for("ready");
    let machine = running.machine.clone();
    let before = running.text(FUNCTION);
    let id = running.register(probe(&format!("p {FUNCTION} {READS}")));
    assert_eq!(info(&machine, id).mechanism, Some(Mechanism::Optimized));
    let mut stream = machine.subscribe(vec![id], 1 << 16);
    let looked_at = spawn(move || {
        let (mut seen, mut dropped, mut wrong) = (0_u64, 0, Vec::new());
        while let Some(delivery) = stream.blocking_next() {
            seen += delivery.events.len() as u64;
            dropped += delivery.dropped;
            wrong.extend(delivery.events.iter().filter_map(complaint));
            wrong.truncate(3);
        }
        (seen, dropped, wrong)
    });
    machine.console_input(b"\n");
    let mut random = Random::new(&[7]);
    let mut nmis = 0_u64;
    while info(&machine, id).counts.hits < 2 * calls {
        machine.inject_nmi(None).expect("a running guest");
        nmis += 1;
        sleep(Duration::from_micros(random.below(APART)));
        if nmis.is_multiple_of(500) {
            let hits = info(&machine, id).counts.hits;
            running.wait_while_running(|machine| info(machine, id).counts.hits > hits);
        }
    }
    let printed = running.wait_for("end of log");
    assert_eq!(u64::try_from(values(&printed, "calls")[0]), Ok(calls));
    let log = printed.split_once("log:\r\n").expect("a log").1;
    assert!(log.starts_with("end of log"), "the kernel said:\n{log}");
    let counts = info(&machine, id).counts;
    assert_eq!((counts.hits, counts.missed), (2 * calls, 0));
    machine.unregister(&[id]).expect("registered");
    assert_eq!(running.text(FUNCTION), before);
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let (seen, dropped, wrong) = looked_at.join().expect("no panic");
    assert_eq!(seen + dropped, 2 * calls);
    assert!(seen > 0 && wrong.is_empty(), "{wrong:#?}");
    eprintln!("{seen} events, {dropped} dropped, {nmis} NMIs");
}
