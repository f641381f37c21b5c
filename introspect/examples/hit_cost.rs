//! Carries out as many hits as asked for on a synthetic guest, so that their cost can be counted.
//!
//! ```text
//! cargo build --release --package hvprobe-introspect --example hit_cost
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null \
//!     --collect-atstart=no --toggle-collect='*hit_cost::hits*' \
//!     target/release/examples/hit_cost emulated 1000
//! ```
//!
//! A third argument is how many other probes there are, up to 500: the cost does not depend on it.
//!
//! The number after `Collected :` is the instructions that all the hits took in the engine: looking
//! the probe up, carrying the instruction out, reading the task and queueing the event. It is the
//! same in every run, as the collector, whose part is not counted, never gets to wake anybody. What
//! a counter of whole processes shows (`perf stat -e instructions:u`) is that and the start; the
//! difference between twice as many hits and so many is the hits' own.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::mpsc;

use hvprobe_arch::Gva;
use hvprobe_introspect::definition::parse;
use hvprobe_introspect::event::Collector;
use hvprobe_introspect::probe::hit::{HitHandler, Outcome, Surroundings};
use hvprobe_introspect::probe::registry::Registry;
use hvprobe_introspect::probe::spec::Actions;
use hvprobe_introspect::probe::{ProbeSpec, Refusals};
// The shared guest below names these as its own crate's.
use hvprobe_introspect::{hidden, image, probe, world};

#[path = "../src/image/fixture.rs"]
#[allow(dead_code, clippy::unwrap_used, reason = "shared with the unit tests")]
mod fixture;
#[path = "../src/testing.rs"]
#[allow(dead_code, reason = "shared with the unit tests")]
mod testing;

use testing::{Guest, Ticks, regs};

/// How a hit is carried out.
#[derive(Clone, Copy)]
enum Mechanism {
    /// `push rbp`, by the host.
    Emulated,
    /// `mov rax, [rdi+8]`, in a slot that jumps back.
    Boosted,
    /// The same, in a slot that ends in an int3, with a post-handler.
    Stepped,
    /// An int3 that is not ours.
    Foreign,
}

impl Mechanism {
    const ALL: [(&str, Self); 4] = [
        ("emulated", Self::Emulated),
        ("boosted", Self::Boosted),
        ("stepped", Self::Stepped),
        ("foreign", Self::Foreign),
    ];

    /// The probed function, whose first instruction is carried out so.
    fn function(self) -> &'static str {
        match self {
            Self::Emulated => "filler_000",
            Self::Boosted => "filler_001",
            Self::Stepped => "filler_003",
            Self::Foreign => "filler_002",
        }
    }
}

/// Bytes after the start of the slot at which the copy ends: of `mov rax, [rdi+8]`.
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

    let guest = Guest::boot(&fixture::probed());
    let mut registry = Registry::new(guest.image.clone(), 1, testing::hidden());
    registry
        .go_live(guest.view(), None, &guest)
        .expect("the guest stops");
    // Each kind is planted, so that the table is the same whichever is hit.
    let specs = [Mechanism::Emulated, Mechanism::Boosted, Mechanism::Stepped].map(|mechanism| {
        let definition = format!("p {}", mechanism.function());
        let post = matches!(mechanism, Mechanism::Stepped);
        let actions = Actions {
            post,
            ..Actions::default()
        };
        ProbeSpec {
            actions,
            ..ProbeSpec::from(parse(&definition).expect("a definition"))
        }
    });
    registry.register(&specs, &guest).expect("legal");
    let other = |n| ProbeSpec::from(parse(&format!("p filler_{n:03}")).expect("a definition"));
    let others: Vec<_> = (10..10 + others).map(other).collect();
    // What takes a slot when there is none left is left out.
    let others = registry.register_batch(&others, Refusals::Skip, &guest);
    others.expect("the guest stops");

    // The ring takes all events, and its collector is kept busy with the first one.
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
    };
    let at = |mechanism: Mechanism| {
        let symbols = guest.image.symbols();
        symbols.address_of(mechanism.function()).expect("there")
    };
    let first = handler.hit(at(Mechanism::Emulated), &mut regs(), &around);
    assert_eq!(first, Outcome::Resume { shadow: false });
    is_busy.recv().expect("the collector is there");

    hits(&mut handler, &around, at(mechanism), count);

    drop(handler);
    drop(go_on);
    collector.finish();
    let counted: u64 = registry
        .list(&guest.mem)
        .iter()
        .map(|probe| probe.counts.hits)
        .sum();
    let expected = match mechanism {
        Mechanism::Foreign => 1,
        _ => 1 + count as u64,
    };
    assert_eq!(counted, expected, "hits were lost");
    ExitCode::SUCCESS
}

type Around<'a> = Surroundings<'a, testing::Memory, Ticks>;

/// What a virtual CPU's thread does for hits, but for entering the guest.
#[inline(never)]
fn hits(handler: &mut HitHandler, around: &Around<'_>, at: Gva, count: usize) {
    for _ in 0..count {
        let mut regs = black_box(regs());
        black_box(handler.hit(black_box(at), &mut regs, around));
        if handler.is_stepping() {
            let end = Gva(regs.rip + COPY_LEN);
            black_box(handler.hit(end, &mut regs, around));
            assert!(!handler.is_stepping());
        }
        black_box(&regs);
    }
}
