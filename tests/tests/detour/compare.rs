//! Compares a detour with the instructions that it displaces. After both, the registers, flags, vector registers
//! and memory must be the same, and so must the stack from the stack pointer up. The records must contain exactly
//! the state before the run.

use super::{no_registers, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::detour::{Capture, Layout, Member, Part, Record, Span};
use hvprobe_arch::regs::{Gpr, RegisterSet, rflags};
use hvprobe_tests::detour::arena::{Arena, COMM_TEXT, CPU, PID_AND_TGID};
use hvprobe_tests::detour::bench::{Bench, Left, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use std::arch::x86_64::_rdtsc;
use std::sync::atomic::Ordering;

/// Bytes of stack that instructions may use below the stack pointer, and above it.
const AROUND: u64 = 0x3000;

pub(crate) fn tsc() -> u64 {
    // SAFETY: RDTSC only reads the counter.
    unsafe { _rdtsc() }
}

/// Returns a stack pointer anywhere in a page, or so near the page's end that captured stack words lie in the next
/// page. It is sometimes not aligned.
pub(crate) fn stack_pointer(random: &mut Random, arena: &Arena) -> Gva {
    let stack = arena.stack();
    let pages = (stack.end.0 - stack.start.0 - 2 * AROUND) / 4096;
    let page = stack.start.0 + AROUND + 4096 * random.below(pages);
    let offset = match random.below(3) {
        0 => 4096 - 8 * (1 + random.below(8)),
        _ => 8 * random.below(512),
    };
    let odd = if random.chance(10) {
        random.below(8)
    } else {
        0
    };
    Gva(page + offset + odd)
}

pub(crate) fn capture(random: &mut Random, arena: &Arena) -> Capture {
    let registers = match random.below(3) {
        0 => RegisterSet::default(),
        1 => no_registers(),
        _ => Gpr::ALL.into_iter().filter(|_| random.chance(40)).collect(),
    };
    let words = random.below(6);
    Capture {
        registers,
        stack: (0..words)
            .map(|_| u16::try_from(random.below(8)).unwrap())
            .collect(),
        task: random.chance(50).then(|| arena.task()),
        cpu: random.chance(50).then(|| arena.cpu()),
        fetching: None,
        stack_copy: None,
    }
}

pub(crate) fn condition(random: &mut Random, state: &State) -> Condition {
    let register = random.pick(&Gpr::ALL);
    let own = state.regs.get(register);
    Condition {
        register,
        comparison: random.pick(&[
            Comparison::Equal,
            Comparison::NotEqual,
            Comparison::Less,
            Comparison::LessOrEqual,
            Comparison::Greater,
            Comparison::GreaterOrEqual,
            Comparison::AnyBit,
        ]),
        value: match random.below(4) {
            0 => own,
            1 => own.wrapping_add(1),
            2 => own.wrapping_sub(1),
            _ => random.value(),
        },
    }
}

/// State before the code runs.
pub(crate) struct Before {
    pub(crate) state: State,
    /// Content of the whole stack.
    pub(crate) stack: Vec<u8>,
    /// Content of the data page.
    pub(crate) data: Vec<u8>,
}

/// State after the code has run.
pub(crate) struct After {
    left: Left,
    /// Content of the whole stack.
    stack: Vec<u8>,
    data: Vec<u8>,
}

impl Before {
    pub(crate) fn random(random: &mut Random, arena: &Arena) -> Self {
        let rsp_is = stack_pointer(random, arena);
        let state = State::random(random, rsp_is);
        let len =
            |range: std::ops::Range<Gva>| usize::try_from(range.end.0 - range.start.0).unwrap();
        let mut bytes = |len: usize| -> Vec<u8> {
            let words = (0..len / 8).flat_map(|_| random.next().to_le_bytes());
            words.collect()
        };
        let (stack, data) = (bytes(len(arena.stack())), bytes(len(arena.data())));
        Self { state, stack, data }
    }

    /// Runs the function from this state.
    pub(crate) fn run(&self, bench: &Bench<'_>) -> After {
        let arena = bench.arena();
        arena.write(arena.stack().start, &self.stack);
        arena.write(arena.data().start, &self.data);
        let left = bench.run(arena.function(), &self.state);
        After {
            stack: arena.read(arena.stack().start, self.stack.len()),
            data: arena.read(arena.data().start, self.data.len()),
            left,
        }
    }

    /// Returns the stack's bytes from the stack pointer on.
    pub(crate) fn above(&self, arena: &Arena) -> &[u8] {
        let from = self.state.regs.rsp - arena.stack().start.0;
        &self.stack[usize::try_from(from).unwrap()..]
    }

    /// Returns whether a captured stack word is outside the stack pointer's page.
    pub(crate) fn leaves_page(&self, captures: &[Capture]) -> bool {
        let highest = captures.iter().flat_map(|capture| &capture.stack).max();
        highest.is_some_and(|index| self.state.regs.rsp % 4096 + 8 * u64::from(*index) + 8 > 4096)
    }

    /// Checks that `record` contains the part of this state that `capture` asks for. Does not check the record's
    /// time and the memory that it read.
    pub(crate) fn check(&self, arena: &Arena, capture: &Capture, record: &Record) {
        let mut regs = self.state.regs;
        regs.rflags |= rflags::FIXED | rflags::IF;
        for register in Gpr::ALL {
            if !capture.registers.contains(register) {
                regs.set(register, 0);
            }
        }
        assert_eq!(record.regs, regs);
        let word = |index: &u16| {
            let at = 8 * usize::from(*index);
            u64::from_le_bytes(self.above(arena)[at..at + 8].try_into().unwrap())
        };
        let words: Vec<u64> = capture.stack.iter().map(word).collect();
        assert_eq!(record.stack.as_slice(), words);
        assert_eq!(record.cpu, capture.cpu.map(|_| CPU));
        assert_eq!(record.task.is_some(), capture.task.is_some());
        if let Some(task) = record.task {
            assert_eq!((task.pid, task.tgid), PID_AND_TGID);
            assert_eq!(&task.comm, COMM_TEXT);
        }
    }
}

impl After {
    /// Returns whether `other` left the same stack as this run. Compares the words at and above `top`, the stack
    /// pointer before the run, and the words below `top` that this run pushed. `before` is the content of the stack
    /// before the run, and `start` its address.
    fn has_stack_of(&self, other: &Self, before: &[u8], start: Gva, top: u64) -> bool {
        (start.0..)
            .zip(self.stack.iter().zip(&other.stack).zip(before))
            .filter(|(at, _)| *at >= self.left.state.regs.rsp)
            .all(|(at, ((one, two), before))| one == two || at < top && one == before)
    }

    /// Checks that this run, of the detour, had the same effects as `in_place`, the run of the displaced
    /// instructions.
    pub(crate) fn is_as(&self, in_place: &Self, before: &Before, arena: &Arena, what: &str) {
        assert!(
            in_place.left == self.left,
            "{what}\n{:x?}\n{:x?}",
            in_place.left,
            self.left
        );
        let (start, top) = (arena.stack().start, before.state.regs.rsp);
        let is_same = in_place.has_stack_of(self, &before.stack, start, top);
        assert!(is_same, "stack after {what}");
        assert!(in_place.data == self.data, "memory after {what}");
    }
}

/// Totals of all comparisons.
#[derive(Default)]
pub(crate) struct Seen {
    /// Runs that left the detour at its escape.
    pub(crate) escapes: u64,
    /// Correct records.
    pub(crate) records: u64,
    /// Hits prevented by a condition.
    pub(crate) vetoed: u64,
}

/// Runs the instructions of `span` in place, and then their detour, which has one to three random members. Both
/// runs begin in the same random state. Compares the two runs.
pub(crate) fn compare(
    bench: &Bench<'_>,
    span: &Span,
    name: &str,
    random: &mut Random,
    setup: impl Fn(&mut State, &mut [u8], &mut [u8]),
    seen: &mut Seen,
) {
    let arena = bench.arena();
    let (lost, vetoed) = (arena.counter(0), arena.counter(1));
    let mut before = Before::random(random, arena);
    setup(&mut before.state, &mut before.stack, &mut before.data);
    let in_place = before.run(bench);
    let state = &before.state;

    let captures: Vec<Capture> = (0..=random.below(3))
        .map(|_| capture(random, arena))
        .collect();
    let conditions: Vec<Vec<Condition>> = captures
        .iter()
        .map(|_| {
            (0..random.below(3))
                .map(|_| condition(random, state))
                .collect()
        })
        .collect();
    let members: Vec<Member<'_>> = (77..)
        .zip(captures.iter().zip(&conditions))
        .map(|(source, (capture, conditions))| Member {
            conditions,
            vetoed,
            part: Part::Record {
                source,
                capture,
                lost,
                waits: false,
            },
        })
        .collect();
    let ring = quiet(arena, 64);
    let mut room = Room::new(arena);
    let detour = room.detour(span, &ring, &members).unwrap();
    let planted = Planted::new(arena, span, &detour);
    let vetoed_before = arena.word(vetoed).load(Ordering::SeqCst);
    let mut reader = Reader::new(arena, ring);
    let began = tsc();
    let detoured = before.run(bench);
    let ended = tsc();
    let what = format!("{name}: {:02x?} with {state:x?}", span.bytes());
    detoured.is_as(&in_place, &before, arena, &what);

    let leaves_page = before.leaves_page(&captures);
    assert_eq!(planted.escapes(), u64::from(leaves_page), "{what}");
    seen.escapes += planted.escapes();
    let mut vetoes = 0;
    let mut time = began;
    for ((source, capture), conditions) in (77..).zip(&captures).zip(&conditions) {
        let holds = |condition: &Condition| condition.holds(state.regs.get(condition.register));
        if leaves_page {
            continue;
        }
        if !conditions.iter().all(holds) {
            vetoes += 1;
            continue;
        }
        let layout = Layout::new(capture).unwrap();
        let (header, bytes) = reader.next_record().unwrap().expect("a record");
        let record = layout.decode(&bytes).unwrap();
        assert_eq!((header.source, header.cells), (source, layout.cells()));
        before.check(arena, capture, &record);
        assert!((time..ended).contains(&record.tsc));
        time = record.tsc;
        seen.records += 1;
    }
    assert_eq!(reader.next_record(), Ok(None), "no more records");
    let vetoed_after = arena.word(vetoed).load(Ordering::SeqCst);
    assert_eq!(vetoed_after - vetoed_before, vetoes);
    seen.vetoed += vetoes;
    assert_eq!(arena.word(lost).load(Ordering::SeqCst), 0);
}
