//! Runs a given number of hits on a synthetic guest, so that their cost can be counted.
//!
//! ```text
//! cargo build --release --package hvprobe-engine --example hit_cost
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null \
//!     --collect-atstart=no --toggle-collect='*hit_cost::hits*' \
//!     target/release/examples/hit_cost emulated 1000
//! ```
//!
//! A third argument is the number of other probes, up to 500: the cost does not depend on it.
//!
//! The number after `Collected :` is the number of instructions that all the hits took in the engine: looking up
//! the probe, running the displaced instruction, reading the task and queueing the event. It is the same in every
//! run, because the collector, which is not counted, never has to be woken. For a return probe, a few dozen of
//! these instructions write and read the return address on the stack. A counter of whole processes
//! (`perf stat -e instructions:u`) includes the start-up; the difference between runs with 2N and N hits is the
//! cost of N hits.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::mpsc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_engine::{HiddenRegion, Refusals, Registry, Standing, StopError, WhileStopped, World};
use hvprobe_fixtures::{DATA, DATA_VIRT, Memory, STACK, probed};
use hvprobe_hit::event::Collector;
use hvprobe_hit::{HitHandler, Outcome, Surroundings};
use hvprobe_spec::definition::parse;
use hvprobe_spec::{
    Actions, Base, Fetched, Item, Mechanism as Planted, Memory as Of, Pointer, ProbeSpec, Read,
};
// The shared guest below uses this name as its own crate's.
use ::hvprobe_engine;

#[path = "../src/testing.rs"]
#[allow(dead_code, reason = "shared with the unit tests")]
mod testing;

use testing::{TestGuest, Ticks, regs};

/// Kind of hit, with the mechanism of the displaced instruction.
#[derive(Clone, Copy)]
enum Mechanism {
    /// `push rbp`, emulated by the host.
    Emulated,
    /// `push rbp`, emulated, with a post-handler.
    EmulatedPost,
    /// `push rbp`, emulated, with a read of four bytes of kernel memory.
    Read,
    /// `mov rax, [rdi+8]`, in a boosted slot.
    Boosted,
    /// `mov rax, [rdi+8]`, in a stepped slot, with a post-handler.
    Stepped,
    /// The entry of a return probe, emulated, whose calls return without an exit.
    Followed,
    /// A return probe: its entry, emulated, and the return.
    Returned,
    /// A return probe and a kprobe, on the same instruction.
    Both,
    /// An int3 that is not ours.
    Foreign,
}

impl Mechanism {
    const ALL: [(&str, Self); 9] = [
        ("emulated", Self::Emulated),
        ("emulated-post", Self::EmulatedPost),
        ("emulated-read", Self::Read),
        ("boosted", Self::Boosted),
        ("stepped", Self::Stepped),
        ("followed", Self::Followed),
        ("returned", Self::Returned),
        ("both", Self::Both),
        ("foreign", Self::Foreign),
    ];

    /// Returns the measured function: even ones begin with `push rbp`, odd ones with `mov`.
    fn function(self) -> &'static str {
        match self {
            Self::Emulated => "filler_000",
            Self::Boosted => "filler_001",
            Self::Foreign => "filler_002",
            Self::Stepped => "filler_003",
            Self::EmulatedPost => "filler_004",
            Self::Returned => "filler_006",
            Self::Both => "filler_008",
            Self::Read => "filler_010",
            Self::Followed => "filler_012",
        }
    }

    /// Returns the probes on the function.
    fn probes(self) -> Vec<ProbeSpec> {
        let kinds: &[&str] = match self {
            Self::Emulated | Self::EmulatedPost | Self::Read | Self::Boosted | Self::Stepped => {
                &["p"]
            }
            Self::Followed => &["r4096"],
            Self::Returned => &["r"],
            Self::Both => &["p", "r"],
            Self::Foreign => &[],
        };
        let spec = |kind: &&str| {
            let definition = format!("{kind} {}", self.function());
            let actions = Actions {
                post: matches!(self, Self::EmulatedPost | Self::Stepped),
                capture: match self {
                    Self::Read => vec![read()],
                    _ => Vec::new(),
                },
                ..Actions::default()
            };
            ProbeSpec {
                actions,
                mechanism: Some(match self {
                    Self::Boosted => Planted::Boosted,
                    Self::Stepped => Planted::Stepped,
                    _ => Planted::Emulated,
                }),
                // Instances that are added at a call have no stubs: the return is an exit.
                maxactive_auto: self.returns() && *kind == "r",
                ..ProbeSpec::from(parse(&definition).expect("a definition"))
            }
        };
        kinds.iter().map(spec).collect()
    }

    /// Returns whether a hit includes the return of the function.
    fn returns(self) -> bool {
        matches!(self, Self::Returned | Self::Both)
    }

    /// Returns the number of hits that the engine counts for `count` runs.
    fn counted(self, count: usize) -> usize {
        match self {
            // A call is counted when it returns, which is up to the guest.
            Self::Followed => 0,
            _ => count * self.probes().len(),
        }
    }
}

/// Returns a read of the stack that is made like a read through any other pointer.
fn read() -> Item {
    Item::Fetched(Box::new(Fetched {
        base: Base::Register(Gpr::Rsp),
        pointers: vec![Pointer {
            offset: 8,
            memory: Of::Kernel,
        }],
        read: Read::Bytes(4),
    }))
}

/// Physical address of the return address at a function's entry.
const STACK_PHYS: Gpa = Gpa(DATA.0 + (STACK.0 - DATA_VIRT.0));

/// Length of the copy of `mov rax, [rdi+8]` in its slot.
const COPY_LEN: u64 = 4;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let parsed = || {
        let [mechanism, hits, others @ ..] = arguments.as_slice() else {
            return None;
        };
        let others = match others {
            [] => 0,
            [others] => others.parse().ok().filter(|others| *others <= 500)?,
            _ => return None,
        };
        let (_, mechanism) = Mechanism::ALL.iter().find(|(name, _)| name == mechanism)?;
        let hits = hits.parse().ok().filter(|hits| *hits > 0)?;
        Some((*mechanism, hits, others))
    };
    let Some((mechanism, count, others)) = parsed() else {
        let names = Mechanism::ALL.map(|(name, _)| name).join("|");
        eprintln!("usage: hit_cost {names} HITS [OTHERS]");
        return ExitCode::from(2);
    };

    let guest = TestGuest::boot_whole(&probed::vmlinux());
    let mut registry = Registry::new(guest.image.clone(), 1, testing::whole_hidden());
    registry
        .go_live(guest.view(), None, &guest)
        .expect("the guest stops");
    // All kinds are planted, so that the table is the same for each measured kind.
    let specs: Vec<_> = Mechanism::ALL
        .iter()
        .flat_map(|(_, mechanism)| mechanism.probes())
        .collect();
    registry.register(&specs, &guest).expect("legal");
    let other = |n| ProbeSpec {
        mechanism: Some(Planted::Emulated),
        ..ProbeSpec::from(parse(&format!("p filler_{n:03}")).expect("a definition"))
    };
    let others: Vec<_> = (13..13 + others).map(other).collect();
    // Probes that find no slot left are skipped.
    let others = registry.register_batch(&others, Refusals::Skip, &guest);
    others.expect("the guest stops");

    // The ring has room for all events, and the first one keeps its collector busy.
    let (go_on, wait) = mpsc::channel::<()>();
    let (busy, is_busy) = mpsc::channel();
    let sink = move |_: &[_], _| {
        let _ = busy.send(());
        let _ = wait.recv();
    };
    let (collector, mut producers) =
        Collector::start(1, 2 * count + 1, Box::new(sink)).expect("a thread can be started");
    let mut handler = HitHandler::new(0, producers.pop().expect("one"));
    handler.adopt(guest.table(), Some(guest.view()));
    let clock = Ticks::default();
    let around = Surroundings {
        mem: &guest.mem,
        clock: &clock,
        gs_base: guest.gs_base(),
        cr3: None,
    };
    let at = |mechanism: Mechanism| {
        let symbols = guest.image.symbols();
        symbols.address_of(mechanism.function()).expect("there")
    };
    let first = handler.hit(at(Mechanism::Emulated), &mut regs(), &around);
    assert_eq!(first, Outcome::Resume { shadow: false });
    is_busy.recv().expect("the collector is there");

    let ret = mechanism.returns().then(|| at(Mechanism::Foreign));
    hits(&mut handler, &around, at(mechanism), ret, count);

    drop(handler);
    drop(go_on);
    collector.finish();
    let counted: u64 = registry
        .list(&guest.mem)
        .iter()
        .map(|probe| probe.counts.hits)
        .sum();
    let expected = 1 + mechanism.counted(count) as u64;
    assert_eq!(counted, expected, "hits were lost");
    let missed: u64 = registry
        .list(&guest.mem)
        .iter()
        .map(|probe| probe.counts.missed)
        .sum();
    assert_eq!(missed, 0, "calls were missed");
    ExitCode::SUCCESS
}

type Around<'a> = Surroundings<'a, Memory, Ticks>;

/// Does the work of a virtual CPU's thread for hits, without entering the guest. With `ret`, each hit is the
/// call of a function that returns to `ret`.
#[inline(never)]
fn hits(handler: &mut HitHandler, around: &Around<'_>, at: Gva, ret: Option<Gva>, count: usize) {
    for _ in 0..count {
        let mut regs = black_box(regs());
        if let Some(ret) = ret {
            let written = around.mem.write(STACK_PHYS, &ret.0.to_le_bytes());
            written.expect("mapped");
        }
        black_box(handler.hit(black_box(at), &mut regs, around));
        if handler.is_stepping() {
            let end = Gva(regs.rip + COPY_LEN);
            black_box(handler.hit(end, &mut regs, around));
            assert!(!handler.is_stepping());
        }
        if let Some(ret) = ret {
            let mut found = [0; 8];
            around.mem.read(STACK_PHYS, &mut found).expect("mapped");
            regs.rsp = STACK.0 + 8;
            black_box(handler.hit(Gva(u64::from_le_bytes(found)), &mut regs, around));
            assert_eq!(regs.rip, ret.0);
        }
        black_box(&regs);
    }
}
