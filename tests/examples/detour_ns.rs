//! Measures natively the time that detours add to a call of a function.
//!
//! ```text
//! cargo run --release --package hvprobe-tests --example detour_ns
//! ```
//!
//! Each row shows the minimum of many batches; the row with a *reader* shows the median. Batches of all kinds
//! alternate, so that other activity of the machine affects all kinds alike; those with a *reader* run afterwards.
//! The function adds one and returns. The loop that calls it is generated as well, so the compilation of this
//! program does not matter. The ring fits into the cache, and is emptied between batches. With a *reader*, another
//! thread empties it all the time, so each cell's cache line comes from that thread's processor.

use anyhow::{Context as _, ensure};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::detour::{
    Capture, EntryCapture, Exit, InstanceLayout, Instances, Member, Part, Ring, Span,
};
use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::detour::traps;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, qword_ptr, registers::*};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Number of calls of one batch.
const CALLS: u32 = 400;
/// Number of batches of each kind.
const BATCHES: usize = 4000;

/// A kind of call.
struct Kind<'a> {
    name: &'a str,
    arena: Arena,
    ring: Ring,
    members: Members,
    least: Duration,
}

/// Probe on the function.
enum Members {
    None,
    Record(Capture, Vec<Condition>),
    Return(Box<(EntryCapture, Capture)>),
}

impl<'a> Kind<'a> {
    fn new(name: &'a str, members: impl FnOnce(&Arena) -> Members) -> anyhow::Result<Self> {
        let arena = Arena::new()?;
        let members = members(&arena);
        Ok(Self {
            name,
            ring: arena.ring(4096, 4095, 0),
            arena,
            members,
            least: Duration::MAX,
        })
    }

    /// Writes the function and the loop that calls it, and plants the probe.
    fn plant(&self) -> anyhow::Result<(Option<Planted<'_>>, Gva)> {
        let (arena, at) = (&self.arena, self.arena.function());
        let mut a = CodeAssembler::new(64)?;
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        a.lea(rax, qword_ptr(rdi + 1))?;
        a.ret()?;
        let function = a.assemble(at.0)?;
        arena.write(at, &function);
        let calls = at.wrapping_add(0x100);
        let mut a = CodeAssembler::new(64)?;
        let mut again = a.create_label();
        a.push(rbx)?;
        a.mov(ebx, CALLS)?;
        a.set_label(&mut again)?;
        a.call(at.0)?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.pop(rbx)?;
        a.ret()?;
        arena.write(calls, &a.assemble(calls.0)?);

        let span = Span::find(&function, at, at)?;
        let mut room = Room::new(arena);
        let [lost, vetoed, missed, free] = [0, 1, 2, 3].map(|index| arena.counter(index));
        let with = |member: Member<'_>, room: &mut Room<'_>| {
            let detour = room.detour(&span, &self.ring, &[member])?;
            anyhow::Ok(Some(Planted::new(arena, &span, &detour)))
        };
        let planted = match &self.members {
            Members::None => None,
            Members::Record(capture, conditions) => {
                let part = Part::Record {
                    source: 1,
                    capture,
                    lost,
                    waits: false,
                };
                let member = Member {
                    conditions,
                    vetoed,
                    part,
                };
                with(member, &mut room)?
            }
            Members::Return(captures) => {
                let (entry, capture) = &**captures;
                let instances = &Instances {
                    at: arena.instances(),
                    count: 10,
                    free,
                };
                let (bytes, first) = InstanceLayout::new(entry)?.initial(10, 0);
                arena.write(instances.at, &bytes);
                arena.word(free).store(first, Ordering::SeqCst);
                let exit = Exit {
                    source: 1,
                    capture,
                    instances,
                    entry,
                    lost,
                    waits: false,
                    first_stub: 0,
                };
                let stubs = room.returns(&self.ring, &exit)?;
                let part = Part::Return {
                    instances,
                    capture: entry,
                    stubs,
                    missed,
                };
                let member = Member {
                    conditions: &[],
                    vetoed,
                    part,
                };
                with(member, &mut room)?
            }
        };
        Ok((planted, calls))
    }

    fn empty(&self) {
        let head = self.arena.word(self.ring.head).load(Ordering::SeqCst);
        self.arena.publish_tail(&self.ring, head);
    }

    /// Runs one batch. Returns the time that it took.
    fn time(&self, calls: Gva) -> Duration {
        // SAFETY: the code that `plant` wrote follows the C calling convention, with any detour.
        let calls: extern "C" fn() = unsafe { std::mem::transmute(self.arena.code(calls)) };
        let began = Instant::now();
        calls();
        began.elapsed()
    }

    fn per_call(&self) -> f64 {
        self.least.as_secs_f64() * 1e9 / f64::from(CALLS)
    }
}

fn main() -> anyhow::Result<()> {
    traps::install();
    let none = || RegisterSet::from_iter([]);
    let all = |arena: &Arena| Capture {
        task: Some(arena.task()),
        cpu: Some(arena.cpu()),
        ..Capture::default()
    };
    let entry = |registers| EntryCapture {
        registers,
        stack: Vec::new(),
        current: None,
        cpu: Some(0),
    };
    let never = Condition {
        register: Gpr::Rsp,
        comparison: Comparison::Equal,
        value: 0,
    };
    let mut kinds = vec![
        Kind::new("no probe", |_| Members::None)?,
        Kind::new("time and flags", |_| {
            let capture = Capture {
                registers: none(),
                ..Capture::default()
            };
            Members::Record(capture, Vec::new())
        })?,
        Kind::new("all registers, task, CPU, time", |arena| {
            Members::Record(all(arena), Vec::new())
        })?,
        Kind::new("a condition that does not hold", |arena| {
            Members::Record(all(arena), vec![never])
        })?,
        Kind::new("return: result, argument, duration", |_| {
            let capture = Capture {
                registers: RegisterSet::from_iter([Gpr::Rax]),
                ..Capture::default()
            };
            let argument = RegisterSet::from_iter([Gpr::Rdi]);
            Members::Return(Box::new((entry(argument), capture)))
        })?,
        Kind::new("return: all registers, task, CPU, duration", |arena| {
            Members::Return(Box::new((entry(none()), all(arena))))
        })?,
    ];
    let planted = kinds
        .iter()
        .map(Kind::plant)
        .collect::<anyhow::Result<Vec<_>>>()?;
    let calls: Vec<Gva> = planted.iter().map(|(_, calls)| *calls).collect();
    let mut least = vec![Duration::MAX; kinds.len()];
    for _ in 0..BATCHES {
        for ((kind, calls), least) in kinds.iter().zip(&calls).zip(&mut least) {
            kind.arena.enter();
            kind.empty();
            *least = kind.time(*calls).min(*least);
        }
    }
    let read = with_reader(&kinds[2], calls[2])?;
    for kind in &kinds {
        let lost = kind
            .arena
            .word(kind.arena.counter(0))
            .load(Ordering::SeqCst);
        let missed = kind
            .arena
            .word(kind.arena.counter(2))
            .load(Ordering::SeqCst);
        ensure!(missed == 0, "{}: {missed} calls were missed", kind.name);
        ensure!(
            lost == 0 || kind.name == kinds[2].name,
            "{}: {lost} lost",
            kind.name
        );
    }
    drop(planted);
    for (kind, least) in kinds.iter_mut().zip(least) {
        kind.least = least;
    }
    let base = kinds.first().context("a kind")?.per_call();
    println!("{:<44} {:>8} {:>8}", "", "ns/call", "added");
    let row = |name: &str, time: f64| println!("{name:<44} {time:>8.1} {:>8.1}", time - base);
    for kind in &kinds {
        row(kind.name, kind.per_call());
    }
    let read = read.as_secs_f64() * 1e9 / f64::from(CALLS);
    row("all registers, task, CPU, time; reader", read);
    Ok(())
}

/// Returns the median time of a batch while another thread empties the ring.
fn with_reader(kind: &Kind<'_>, calls: Gva) -> anyhow::Result<Duration> {
    let is_over = AtomicBool::new(false);
    kind.arena.enter();
    kind.empty();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reader = Reader::new(&kind.arena, kind.ring);
            let mut seen = 0_u64;
            while !is_over.load(Ordering::SeqCst) {
                while reader.next_record()?.is_some() {
                    seen += 1;
                }
                std::hint::spin_loop();
            }
            anyhow::Ok(seen)
        });
        let mut times: Vec<Duration> = (0..BATCHES / 4)
            .map(|_| {
                let head = kind.arena.word(kind.ring.head).load(Ordering::SeqCst);
                // A batch begins with an empty ring.
                while kind.arena.tail(&kind.ring) != head {
                    std::thread::yield_now();
                }
                kind.time(calls)
            })
            .collect();
        is_over.store(true, Ordering::SeqCst);
        let seen = reader.join().ok().context("the reader failed")??;
        ensure!(seen > 0, "the reader read nothing");
        times.sort();
        Ok(times[times.len() / 2])
    })
}
