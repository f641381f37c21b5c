//! Tests NMIs to guests with probes. An NMI may arrive anywhere: inside a detour, before a stepped copy has run, or
//! between an int3 and its exit. The NMI's handler hits probes itself, also in the very detour that the NMI
//! interrupted.
//!
//! A seed decides when the NMIs are sent. The test prints it, and `HVPROBE_STRESS_SEED` sets it, which repeats the
//! test as far as possible.

use std::env;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use hvprobe_arch::regs::{Gpr, rflags};
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_machine::{Event, Machine, MachineConfig, Mechanism, ProbeId, ProbeSpec, Refusals};
use hvprobe_spec::Item;
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::names;
use hvprobe_tests::progress::Progress;
use hvprobe_tests::rig::{
    Running, amid_nmis, assert_clean, chain, guest, info, probe, rig, rig_cpus, rounds, values,
};

/// Log lines of kernels that find their emulated time stamp counter unstable.
const OF_THE_COUNTER: [&str; 2] = ["clocksource: ", "tsc: Marking TSC unstable"];
/// Function that the kernel calls once for each NMI without a known reason, on the NMI's own stack. The probe on it
/// is called the witness.
const WITNESS: &str = "default_get_nmi_reason";
/// Further functions that the kernel calls for such an NMI and that can be probed.
const NMI_PATH: [&str; 3] = ["vprintk_store", "irq_work_queue", "nmi_handle.part.0"];
/// Distance in bytes from the witness's stack pointer to the bytes that it captures.
const SKIPPED: i64 = 64;
const CAPTURED: u16 = 240;

/// State that an NMI interrupted, from the frame that the processor pushed (SDM vol. 3, 6.14.2).
#[derive(Clone, Copy, Debug)]
struct Interrupted {
    rip: u64,
    rflags: u64,
}

impl Interrupted {
    /// Finds the frame in the bytes that the witness captured of its stack.
    fn of(event: &Event) -> Option<Self> {
        const KERNEL: [u64; 2] = [0x10, 0x18];
        const USER: [u64; 2] = [0x33, 0x2b];
        let words: Vec<u64> = event
            .captured
            .bytes()
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .collect();
        words.windows(5).find_map(|words| match *words {
            [rip, cs, rflags, _, ss] if [KERNEL, USER].contains(&[cs, ss]) => {
                Some(Self { rip, rflags })
            }
            _ => None,
        })
    }
}

/// Sender of NMIs to a busy guest.
struct Storm {
    random: Random,
    /// Number of NMIs sent to each CPU.
    sent: Vec<u64>,
}

impl Storm {
    /// Sends `count` NMIs at random times. After every 500 of them, waits until the probe `busy` is hit again.
    fn send(&mut self, running: &mut Running, count: u64, busy: ProbeId) {
        let mut progress = Progress::start();
        let machine = running.machine.clone();
        let hits = |machine: &Machine| info(machine, busy).counts.hits;
        for number in 0..count {
            let cpu = usize::try_from(self.random.below(self.sent.len() as u64)).expect("few");
            let all = self.random.chance(20);
            let sent = machine.inject_nmi((!all).then(|| u32::try_from(cpu).expect("few")));
            if let Err(error) = sent {
                panic!("{}: {:#?}", chain(&error), machine.status());
            }
            for (index, sent) in self.sent.iter_mut().enumerate() {
                *sent += u64::from(all || index == cpu);
            }
            // The NMI may arrive anywhere in the guest. The sleep leaves this CPU to the guest's virtual CPUs.
            sleep(Duration::from_micros(self.random.below(4000)));
            if number % 500 == 0 {
                let seen = hits(&machine);
                progress.print(format_args!("{number} NMIs, {seen} hits"));
                running.wait_while_running(|machine| hits(machine) > seen);
            }
        }
    }
}

/// Sends `count` NMIs to a guest in which the probes returned by `exact` must count each call of getpgid.
/// Returns what the NMIs interrupted.
fn every_call_is_counted(
    optimize: bool,
    count: u64,
    exact: impl FnOnce(&Running) -> Vec<(ProbeSpec, Mechanism)>,
) -> Seen {
    let seed = env::var("HVPROBE_STRESS_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    eprintln!("HVPROBE_STRESS_SEED={seed}");
    let cpus = rig_cpus().clamp(1, 2);
    let mut running = Running::boot(MachineConfig {
        optimize,
        ..guest(
            u32::try_from(cpus).expect("few"),
            &["sh", "-c", &amid_nmis("workload held stdin-hold")],
        )
    });
    running.wait_for("ready");
    let machine = running.machine.clone();
    // Some kernels lack some of these functions.
    let is_there = |name: &&&str| machine.image().symbols().lookup(name).is_ok();
    let nmi_path: Vec<&str> = NMI_PATH.iter().filter(is_there).copied().collect();
    let probed = [&["__x64_sys_getpgid", "do_getpgid", WITNESS][..], &nmi_path].concat();
    let original: Vec<_> = probed.iter().map(|name| running.text(name)).collect();

    let (exact, mechanisms): (Vec<_>, Vec<_>) = exact(&running).into_iter().unzip();
    let exact = machine
        .register(&exact)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    for (id, mechanism) in exact.iter().zip(mechanisms) {
        let probe = info(&machine, *id);
        assert_eq!(probe.mechanism, Some(mechanism), "{}", probe.definition);
    }
    let mut witness = probe(&format!("p {WITNESS}"));
    witness.actions.capture = vec![Item::Memory {
        base: Gpr::Rsp,
        offset: SKIPPED,
        len: CAPTURED,
    }];
    let witness = running.register(witness);
    let witnessed = follow(&machine, witness);
    let kinds = ["p", "r64"].into_iter();
    let path: Vec<_> = kinds
        .flat_map(|kind| {
            let of_kind = |name: &&str| probe(&format!("{kind} {name}"));
            nmi_path.iter().map(of_kind).collect::<Vec<_>>()
        })
        .collect();
    let path = machine
        .register_batch(&path, Refusals::Skip)
        .unwrap_or_else(|error| panic!("{}", chain(&error)))
        .ids();

    machine.console_input(b"\n");
    let mut storm = Storm {
        random: Random::new(&[seed]),
        sent: vec![0; cpus],
    };
    storm.send(&mut running, count, exact[0]);
    // Every virtual CPU takes the NMIs sent to it before it stops.
    machine.pause().expect("running");
    machine.resume().expect("paused");
    machine.console_input(b"\n");
    running.wait_for("over");
    machine.console_input(b"\n");
    let printed = running.wait_for("end of log");

    let calls = u64::try_from(values(&printed, "calls")[0]).expect("a count");
    let probes = machine.probes();
    let of = |ids: &[ProbeId]| -> Vec<_> {
        let these = probes.iter().filter(|probe| ids.contains(&probe.id));
        these.cloned().collect()
    };
    for probe in of(&exact) {
        let counts = probe.counts;
        let all = (counts.hits, counts.missed, counts.orphans);
        assert_eq!(all, (calls, 0, 0), "{} of seed {seed}", probe.definition);
    }
    let taken = taken(&printed);
    for (sent, taken) in storm.sent.iter().zip(&taken) {
        assert!((1..=*sent).contains(taken), "{taken} of {sent}");
    }
    // If an NMI arrives before a stepped copy has run, that hit is not over yet, so hits in the NMI's handler are
    // missed.
    let counts = info(&machine, witness).counts;
    let (hits, missed) = (counts.hits, counts.missed);
    assert_eq!(hits + missed, taken.iter().sum::<u64>(), "{printed}");
    let log = printed.split_once("log:\r\n").expect("a log").1;
    let log = log
        .lines()
        .take_while(|line| !line.starts_with("end of log"));
    let log: Vec<_> = log
        .filter(|line| !OF_THE_COUNTER.iter().any(|its| line.contains(its)))
        .collect();
    assert!(log.is_empty(), "the kernel said:\n{log:#?}");
    eprintln!("{calls} calls; NMIs sent {:?}, taken {taken:?}", storm.sent);
    for probe in of(&path) {
        eprintln!(
            "{}: {:?}, {} hits, {} missed",
            probe.definition, probe.mechanism, probe.counts.hits, probe.counts.missed
        );
        assert!(probe.counts.hits > 0, "{}", probe.definition);
    }
    assert!(path.len() >= 4, "{:?}", of(&path));

    let all: Vec<_> = probes.iter().map(|probe| probe.id).collect();
    machine.unregister(&all).expect("registered");
    for (name, original) in probed.iter().zip(&original) {
        assert_eq!(&running.text(name), original, "{name}");
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
    let witnessed = witnessed.join().expect("no panic");
    let interrupted: Vec<_> = witnessed.iter().filter_map(Interrupted::of).collect();
    assert!(
        interrupted.len() * 2 > witnessed.len(),
        "{} frames in {} events, such as {:x?}",
        interrupted.len(),
        witnessed.len(),
        witnessed.first()
    );
    Seen {
        interrupted,
        missed,
    }
}

/// Results of the witness.
struct Seen {
    /// State that each NMI interrupted.
    interrupted: Vec<Interrupted>,
    /// Number of NMIs that arrived before a stepped copy ran.
    missed: u64,
}

/// Returns the number of NMIs of each CPU, as the guest counts them.
fn taken(printed: &str) -> Vec<u64> {
    let line = printed.lines().find(|line| line.trim().starts_with("NMI:"));
    let words = line.expect("a row of NMIs").split_whitespace().skip(1);
    words.map_while(|word| word.parse().ok()).collect()
}

/// Starts a thread that collects the events of a probe until the machine ends.
fn follow(machine: &Machine, id: ProbeId) -> JoinHandle<Vec<Event>> {
    let mut stream = machine.subscribe(vec![id], 1 << 16);
    spawn(move || {
        let mut events = Vec::new();
        while let Some(delivery) = stream.blocking_next() {
            events.extend(delivery.events);
        }
        events
    })
}

#[test]
fn every_call_is_counted_by_detours_that_nmis_interrupt() {
    if rig("NMIs into detours").is_none() {
        return;
    }
    let Seen {
        interrupted,
        missed,
    } = every_call_is_counted(true, rounds(3000), |_| {
        let definitions = [
            "p __x64_sys_getpgid",
            "r64 __x64_sys_getpgid",
            "p do_getpgid",
            "r64 do_getpgid",
        ];
        let optimized = definitions.map(|text| (probe(text), Mechanism::Optimized));
        optimized.into()
    });
    let window = KERNEL_WINDOW.start.0..KERNEL_WINDOW.end.0;
    let inside = interrupted
        .iter()
        .filter(|it| window.contains(&it.rip))
        .count();
    eprintln!("{inside} of {} NMIs came in detours", interrupted.len());
    assert!(inside > 0);
    assert_eq!(missed, 0, "nothing is stepped");
}

#[test]
fn every_call_is_counted_by_breakpoints_that_nmis_interrupt() {
    if rig("NMIs into breakpoints").is_none() {
        return;
    }
    let mut stepped_at = 0;
    let Seen {
        interrupted,
        missed,
    } = every_call_is_counted(false, 2000, |running| {
        let with = |definition: &str, mechanism| ProbeSpec {
            mechanism: Some(mechanism),
            ..probe(definition)
        };
        stepped_at = running.address("do_getpgid").0 + names::entry("do_getpgid");
        // The first instruction that can be boosted is one that every call executes.
        let boosted = (1..32)
            .map(|offset| with(&format!("p do_getpgid+{offset}"), Mechanism::Boosted))
            .find(|spec| {
                let ids = running.machine.register(std::slice::from_ref(spec));
                ids.is_ok_and(|ids| running.machine.unregister(&ids).is_ok())
            });
        vec![
            (probe("p __x64_sys_getpgid"), Mechanism::Emulated),
            (with("p do_getpgid", Mechanism::Stepped), Mechanism::Stepped),
            (boosted.expect("one of them"), Mechanism::Boosted),
            (probe("r64 __x64_sys_getpgid"), Mechanism::Emulated),
        ]
    });
    // Interrupts are on in this function, and off while a copy is stepped. So an event of the witness with
    // interrupts off at this address would be of an NMI that arrived before the copy ran. But the witness's hits
    // for such NMIs are missed.
    let stepping = interrupted
        .iter()
        .filter(|it| it.rip == stepped_at && it.rflags & rflags::IF == 0)
        .count();
    let window = KERNEL_WINDOW.start.0..KERNEL_WINDOW.end.0;
    let inside = interrupted
        .iter()
        .filter(|it| window.contains(&it.rip))
        .count();
    eprintln!(
        "of {} NMIs, {missed} came before a stepped copy ran, {inside} in other copies",
        interrupted.len()
    );
    assert_eq!(stepping, 0);
    assert!(missed > 0);
}
