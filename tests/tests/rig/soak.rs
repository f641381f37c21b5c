//! Tests in a long run that unregistered probes release all their resources.
//!
//! `HVPROBE_SOAK_MINUTES` sets the duration; the guest has 8 GiB then (`cargo lab soak` gives the machine
//! enough for that). `HVPROBE_SOAK_SEED` repeats a run.

use std::env;
use std::fs;
use std::time::{Duration, Instant};

use hvprobe_machine::{
    Machine, MachineConfig, Mechanism, ProbeId, ProbeSpec, ProbeState, Refusals, Usage,
};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::names;
use hvprobe_tests::progress::Progress;
use hvprobe_tests::rig::{
    Running, assert_clean, chain, infos, optimizing_guest, probe, rig, rounds,
};

/// Functions that the guest executes all the time, or sleeps in.
const FUNCTIONS: [&str; 12] = [
    "vfs_read",
    "vfs_write",
    "ksys_read",
    "pipe_read",
    "pipe_write",
    "do_nanosleep",
    "do_wait",
    "do_exit",
    "kmem_cache_free",
    "kmem_cache_alloc",
    "do_sys_poll",
    "handle_mm_fault",
];
/// Memory of the guest, in a short and in a long run: far more than its kernel and its processes touch, so most
/// of it is never allocated.
const MEMORY: [u64; 2] = [1 << 30, 8 << 30];
/// Maximum number of probes registered together.
const TOGETHER: u64 = 16;
/// Minimum number of rounds.
const ROUNDS: u32 = 40;

/// Processes start and exit, and others wake and sleep, until a line is read.
const LIFE: &str = "n=0; while [ $n -lt 2 ]; do \
    (while [ ! -e /tmp/over ]; do usleep 1000; /bin/true; echo; done | cat >/dev/null) & n=$((n+1)); done; \
    echo ready; read line; : >/tmp/over; wait; echo finished";

fn setting(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Returns a random probe of any kind.
fn any_probe(random: &mut Random, functions: &[&str]) -> ProbeSpec {
    let function = random.pick(functions);
    let mut spec = probe(&match random.below(6) {
        0 => format!("r4096 {function}"),
        1 | 2 => format!("r {function}"),
        3 => format!("r {function} value=$retval if value > 0"),
        4 => format!("p {function} $stack1"),
        _ => format!("p {function}"),
    });
    spec.mechanism = match random.below(6) {
        0 => Some(Mechanism::Emulated),
        1 => Some(Mechanism::Stepped),
        2 => Some(Mechanism::Boosted),
        _ => None,
    };
    spec.disabled = random.chance(10);
    spec
}

/// Resources that must not grow.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    usage: Usage,
    /// Private data of this process in KiB.
    private: u64,
    /// Number of file descriptors of this process.
    descriptors: u64,
    /// Number of threads of this process.
    threads: u64,
}

impl Held {
    fn now(machine: &Machine) -> Self {
        let status = fs::read_to_string("/proc/self/status").expect("a process");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            number.unwrap_or_else(|| panic!("no {name}"))
        };
        // Measures private data by `VmData`. The resident anonymous memory would include every page of the guest's
        // memory that the guest has ever touched.
        Self {
            usage: machine.usage(),
            private: field("VmData:"),
            descriptors: fs::read_dir("/proc/self/fd").expect("a process").count() as u64,
            threads: field("Threads:"),
        }
    }

    /// Returns the name and amount of each resource, and the tolerance of a comparison with an earlier amount.
    fn all(&self) -> [(&'static str, u64, u64); 8] {
        let usage = &self.usage;
        [
            ("slots", usage.slots, 256),
            ("bytes of code", usage.code, 512 << 10),
            ("bytes of counters", usage.counters, 64 << 10),
            // A return probe with 4096 instances takes 2 MiB. Until the next scan of the guest's memory, several
            // such probes may be left behind.
            ("bytes of instances", usage.instances, 6 << 20),
            ("things left behind", usage.left_behind, 2048),
            ("KiB of data", self.private, 64 << 10),
            ("descriptors", self.descriptors, 8),
            ("threads", self.threads, 4),
        ]
    }
}

#[test]
fn what_probes_take_is_there_again_when_they_have_gone() {
    if rig("a long life").is_none() {
        return;
    }
    let seed = setting("HVPROBE_SOAK_SEED").unwrap_or(1);
    let minutes = setting("HVPROBE_SOAK_MINUTES").unwrap_or(0);
    let time = Duration::from_secs(60 * minutes);
    eprintln!("HVPROBE_SOAK_SEED={seed}");
    let mut random = Random::new(&[seed]);
    let mut running = Running::boot(MachineConfig {
        memory: MEMORY[usize::from(minutes > 0)],
        ..optimizing_guest(2, &["sh", "-c", LIFE])
    });
    running.wait_for("ready");
    let machine = running.machine.clone();
    let functions: Vec<&str> = names::known(&FUNCTIONS)
        .into_iter()
        .map(names::own)
        .collect();
    let original: Vec<Vec<u8>> = functions.iter().map(|name| running.text(name)).collect();
    let (started, mut progress) = (Instant::now(), Progress::start());
    let (mut round, mut probes, mut hits) = (0_u32, 0, 0);
    // Set after a third of the time, when all resources have been used and reclaimed several times.
    let mut settled: Option<Held> = None;
    while round < rounds(ROUNDS) || started.elapsed() < time {
        round += 1;
        let specs: Vec<_> = (0..=random.below(TOGETHER))
            .map(|_| any_probe(&mut random, &functions))
            .collect();
        let ids = match machine.register_batch(&specs, Refusals::Skip) {
            Ok(registered) => registered.ids(),
            Err(error) => panic!("round {round}: {}", chain(&error)),
        };
        for _ in 0..random.below(3) {
            let some: Vec<ProbeId> = ids.iter().copied().filter(|_| random.chance(30)).collect();
            let change = match random.below(3) {
                0 => machine.disable(&some),
                1 => machine.enable(&some),
                _ => machine.set_optimization(random.chance(70)),
            };
            if let Err(error) = change {
                panic!("round {round}: {}", chain(&error));
            }
        }
        probes += ids.len();
        hits += infos(&machine, &ids)
            .iter()
            .map(|probe| probe.counts.hits)
            .sum::<u64>();
        if let Err(error) = machine.unregister(&ids) {
            panic!("round {round}: {}", chain(&error));
        }
        let held = Held::now(&machine);
        if started.elapsed() * 3 >= time && round * 3 >= rounds(ROUNDS) {
            let then = settled.get_or_insert(held);
            for ((name, now, slack), (_, before, _)) in held.all().into_iter().zip(then.all()) {
                assert!(
                    now <= 2 * before + slack,
                    "{now} {name} after {round} rounds, {before} before: {held:?}"
                );
            }
        }
        progress.print(format_args!(
            "{round} rounds, {probes} probes, {hits} hits: {:?}",
            held.usage
        ));
    }
    eprintln!(
        "{round} rounds of {probes} probes, {hits} hits, {:?}",
        Held::now(&machine)
    );
    assert!(hits > 0);
    // There is as much room as for the first probes.
    machine.set_optimization(true).expect("it runs");
    let last = ["r4096 vfs_read", "r vfs_write", "p vfs_read"].map(probe);
    let ids = machine.register(&last);
    let ids = ids.unwrap_or_else(|error| panic!("{}", chain(&error)));
    running.wait_while_running(|machine| {
        infos(machine, &ids).iter().all(|probe| {
            probe.mechanism == Some(Mechanism::Optimized) && probe.state == ProbeState::Placed
        })
    });
    machine.unregister(&ids).expect("registered");
    for (name, original) in functions.iter().zip(&original) {
        assert_eq!(&running.text(name), original, "{name}");
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert!(printed.contains("finished"), "{printed}");
    assert_clean(&ending, &printed, 0);
}
