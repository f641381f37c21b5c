//! Tests detours that read memory. For any address they must read the same as a model, and have the same other
//! effects as the displaced instructions in place.

use super::compare::{After, Before, capture, condition, tsc};
use super::world::{
    BETWEEN, Found, Not, PAGE, PAGES, REAL_HALVES, ROW, World, found, halves, world,
};
use super::{assemble, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::Condition;
use hvprobe_arch::detour::{CELL, Capture, Fetching, Layout, Member, Part, Ring, Span};
use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read};
use hvprobe_arch::regs::{Gpr, rflags};
use hvprobe_fixtures::rounds;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::loads::Loads;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use iced_x86::code_asm::{dword_ptr, registers::*};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Generator of items, and of the memory they refer to.
struct Draft<'t, 'a> {
    random: &'t mut Random,
    world: &'t mut World<'a>,
    state: &'t mut State,
    /// Registers that items already use, and whose values must not change.
    given: HashSet<Gpr>,
    task: u64,
}

impl Draft<'_, '_> {
    fn hole(&mut self) -> u64 {
        let row = self.random.below(PAGES / (ROW + 1));
        self.world.page(row * (ROW + 1) + ROW)
    }

    /// Returns an address, usually one at which `len` bytes are accessible.
    fn place(&mut self, len: u64) -> u64 {
        match self.random.below(32) {
            0 => self.random.below(0x1000),
            1 => self.random.pick(&[1_u64, 2, 14, 4095]).wrapping_neg(),
            2 => 0x2008_u64
                .wrapping_neg()
                .wrapping_add(self.random.below(16)),
            3 => self.random.pick(&[1 << 63, 1 << 47, 0x1234_5678_9abc_def0]),
            4 => REAL_HALVES.0.0 + self.random.below(1 << 40),
            5 => self.hole() + self.random.below(PAGE),
            // Just before an absent page, where `len` bytes fit or do not quite fit.
            6..10 => self.hole() - len.saturating_sub(self.random.below(4)).max(1),
            10..13 => self.hole() - self.random.below(len + 10) - 1,
            // The next three: across two pages, in the last pages of processes, and in the kernel's first page.
            13..15 => self.hole() - PAGE - self.random.below(len.min(16)),
            15 => self.world.page(BETWEEN) - self.random.below(3 * PAGE) - 1,
            16 => self.world.page(BETWEEN + 1) + self.random.below(8),
            17 => self.state.regs.rsp + self.random.below(64),
            _ => self.hole() - ROW * PAGE + self.random.below(ROW * PAGE - 256),
        }
    }

    fn offset(&mut self) -> i64 {
        let small = self.random.below(4096).cast_signed();
        match self.random.below(8) {
            0..3 => 0,
            3 => small,
            4 => -small,
            5 => self.random.pick(&[0x7fff_ffff, -0x8000_0000]),
            6 => self.random.pick(&[0x8000_0000, -0x8000_0001, i64::MIN]),
            _ => self.random.next().cast_signed(),
        }
    }

    fn memory(&mut self) -> Memory {
        let all = [Memory::Kernel, Memory::User, Memory::Either];
        self.random.pick(&all)
    }

    /// Returns a base, and the offset from it to `to`.
    fn base(&mut self, to: u64) -> (Base, i64) {
        let register = self.random.pick(&Gpr::ALL);
        let offset = self.offset();
        let from = to.wrapping_sub(offset.cast_unsigned());
        match self.random.below(8) {
            0 => (Base::Constant(from), offset),
            1 => (Base::Task, to.wrapping_sub(self.task).cast_signed()),
            2 => {
                let top = self.state.regs.rsp;
                let near = self.random.below(64).cast_signed();
                let far = to.wrapping_sub(top).cast_signed();
                (Base::Register(Gpr::Rsp), self.random.pick(&[near, far]))
            }
            _ => {
                if register == Gpr::Rsp || !self.given.insert(register) {
                    let is = self.state.regs.get(register);
                    let offset = to.wrapping_sub(is).cast_signed();
                    return (Base::Register(register), offset);
                }
                self.state.regs.set(register, from);
                (Base::Register(register), offset)
            }
        }
    }

    /// Writes a text at `at`, and in most cases the zero that ends it. Without that zero the text often has no end,
    /// because zeros are rare in the pages.
    fn text(&mut self, at: u64, most: u64) {
        let len = self.random.below(most + 10);
        let mut text: Vec<u8> = (0..len).map(|n| b'a' + (n % 26) as u8).collect();
        // Bytes that a wrong test of a whole word could take for a zero, and their neighbours.
        if self.random.chance(50) {
            for byte in &mut text {
                if self.random.chance(20) {
                    *byte = self.random.pick(&[0x01, 0x7f, 0x80, 0x81, 0xff]);
                }
            }
        }
        self.world.put(at, &text);
        if self.random.chance(70) {
            self.world.put(at.wrapping_add(len), &[0]);
        }
    }

    fn item(&mut self) -> Fetched {
        let count = self.random.below(6);
        let read = match self.random.chance(50) && count > 0 {
            true => Read::Text(u16::try_from(1 + self.random.below(200)).unwrap()),
            false => Read::Bytes(u16::try_from(1 + self.random.below(40)).unwrap()),
        };
        let len = match read {
            Read::Bytes(len) => len.into(),
            Read::Text(most) => most.into(),
        };
        let mut to = self.place(len);
        if let Read::Text(_) = read {
            self.text(to, len);
        }
        let mut pointers = Vec::new();
        // Chooses the pointers from the last to the first. Each is stored where the one before it points.
        for _ in 1..count {
            let (at, offset, memory) = (self.place(8), self.offset(), self.memory());
            let value = to.wrapping_sub(offset.cast_unsigned());
            self.world.put(at, &value.to_le_bytes());
            pointers.push(Pointer { offset, memory });
            to = at;
        }
        let (base, offset) = self.base(to);
        if count > 0 {
            let memory = self.memory();
            pointers.push(Pointer { offset, memory });
        }
        // Chains get further if their pointers are not restricted to one kind of memory.
        if self.random.chance(70) {
            for pointer in &mut pointers {
                pointer.memory = Memory::Either;
            }
        }
        pointers.reverse();
        Fetched {
            base,
            pointers,
            read,
        }
    }
}

/// Returns the bytes of all cells of a ring, and of the cells after its end into which a record can extend.
pub(crate) fn cells(arena: &Arena, ring: &Ring) -> Vec<u8> {
    arena.read(ring.cells, CELL * (ring.capacity as usize + 16))
}

/// Makes all cells of a ring free, with arbitrary content.
fn litter(arena: &Arena, ring: &Ring, random: &mut Random) {
    let mut cells = cells(arena, ring);
    for cell in cells.chunks_mut(CELL) {
        cell[..8].fill(0);
        let [byte, ..] = random.next().to_le_bytes();
        cell[8..].fill(byte);
    }
    arena.write(ring.cells, &cells);
}

/// Totals of all comparisons.
#[derive(Debug, Default)]
struct Seen {
    skipped: u64,
    escapes: u64,
    vetoed: u64,
    nothing: u64,
    values: u64,
    bytes: u64,
    whole: u64,
    truncated: u64,
    faults: u64,
}

impl Seen {
    fn note(&mut self, item: &Fetched, found: &Found) {
        let counter = match found {
            Found::Nothing => &mut self.nothing,
            Found::Bytes(_) if item.pointers.is_empty() => &mut self.values,
            Found::Bytes(_) => &mut self.bytes,
            Found::Text { truncated, .. } => match truncated {
                true => &mut self.truncated,
                false => &mut self.whole,
            },
        };
        *counter += 1;
    }
}

/// Compares a detour that reads memory with the instructions that it displaces, and its results with those of the
/// model.
fn compare(
    bench: &Bench<'_>,
    span: &Span,
    loads: &Loads<'_>,
    world: &mut World<'_>,
    random: &mut Random,
    seen: &mut Seen,
) {
    let arena = bench.arena();
    let mut before = Before::random(random, arena);
    if random.chance(90) {
        before.state.regs.rflags &= !rflags::AC;
    }
    let mut draft = Draft {
        random,
        world,
        state: &mut before.state,
        given: HashSet::new(),
        task: arena.current().0,
    };
    let fetches: Vec<Vec<Fetched>> = (0..=draft.random.below(2))
        .map(|_| (0..=draft.random.below(6)).map(|_| draft.item()).collect())
        .collect();
    let rsp_is = Gva(before.state.regs.rsp);
    world.beside = vec![(rsp_is, before.above(arena).to_vec())];
    let mut captures: Vec<Capture> = fetches
        .into_iter()
        .map(|items| Capture {
            stack: Vec::new(),
            fetching: Some(Fetching {
                readers: loads.readers(),
                items,
            }),
            ..capture(random, arena)
        })
        .collect();
    if random.chance(25) {
        captures.push(capture(random, arena));
    }
    for capture in &mut captures {
        while Layout::new(capture).is_err() {
            let fetching = capture.fetching.as_mut().unwrap();
            fetching.items.pop().unwrap();
        }
    }
    let conditions: Vec<Vec<Condition>> = captures
        .iter()
        .map(|_| match random.chance(25) {
            true => vec![condition(random, &before.state)],
            false => Vec::new(),
        })
        .collect();
    let disabled = match random.chance(85) {
        true => random.pick(&[0, 1]),
        false => random.pick(&[2, 3, -1, i32::MIN, i32::MAX]),
    };

    // Expected results.
    let regs = before.state.regs;
    let escapes = regs.rflags & rflags::AC != 0
        || !(0..2).contains(&disabled)
        || before.leaves_page(&captures);
    let holds =
        |conditions: &Vec<Condition>| conditions.iter().all(|it| it.holds(regs.get(it.register)));
    let hit: Vec<bool> = conditions.iter().map(|it| !escapes && holds(it)).collect();
    (world.calls, world.faults) = (loads.calls(), loads.faults());
    let expected = captures.iter().zip(&hit).map(|(capture, is_hit)| {
        let items = capture.fetching.iter().flat_map(|it| &it.items);
        let found = items.map(|item| match is_hit {
            true => world.find(item, &regs),
            false => Ok(Found::Nothing),
        });
        found.collect()
    });
    let expected: Result<Vec<Vec<Found>>, Not> = expected.collect();
    let Ok(expected) = expected else {
        seen.skipped += 1;
        return;
    };

    let (lost, vetoed) = (arena.counter(0), arena.counter(1));
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
    litter(arena, &ring, random);
    let mut reader = Reader::new(arena, ring);
    let detour = Room::new(arena).detour(span, &ring, &members).unwrap();
    let what = format!("{captures:x?} with {regs:x?}, {disabled} deep");
    let in_place = before.run(bench);
    let planted = Planted::new(arena, span, &detour);
    let vetoed_before = arena.word(vetoed).load(Ordering::SeqCst);
    loads.set_disabled(disabled);
    let (disabled, mut cells_before) = (loads.disabled(), cells(arena, &ring));
    let began = tsc();
    let detoured: After = before.run(bench);
    let ended = tsc();
    detoured.is_as(&in_place, &before, arena, &what);
    assert_eq!(loads.disabled(), disabled, "{what}");
    assert_eq!(planted.escapes(), u64::from(escapes), "{what}");
    assert_eq!(loads.calls(), world.calls, "{what}");
    assert_eq!(loads.faults(), world.faults, "{what}");
    let vetoes = arena.word(vetoed).load(Ordering::SeqCst) - vetoed_before;
    let prevented = hit.iter().filter(|is_hit| !escapes && !**is_hit);
    assert_eq!(vetoes, prevented.count() as u64, "{what}");
    let cells_after = cells(arena, &ring);

    for (index, capture) in captures.iter().enumerate().filter(|(index, _)| hit[*index]) {
        let layout = Layout::new(capture).unwrap();
        let at = arena.tail(&ring) % u64::from(ring.capacity);
        let at = CELL * usize::try_from(at).unwrap();
        let (header, bytes) = reader.next_record().unwrap().expect("a record");
        let record = layout.decode(&bytes).unwrap();
        assert_eq!(
            (header.source as usize, header.cells),
            (77 + index, layout.cells())
        );
        before.check(arena, capture, &record);
        assert!((began..ended).contains(&record.tsc), "{what}");
        let items = capture.fetching.as_ref().map_or(&[][..], |it| &it.items);
        let found = found(&layout, &bytes, items);
        assert_eq!(found, expected[index], "{what}");
        for (item, found) in items.iter().zip(&found) {
            seen.note(item, found);
        }
        // Only the record's words and the mark of its first cell may have changed.
        for (cell, (before, after)) in (0..).zip(
            cells_before[at..at + layout.size()]
                .chunks_mut(CELL)
                .zip(cells_after[at..at + layout.size()].chunks(CELL)),
        ) {
            let from = if cell == 0 { 0 } else { 8 };
            before[from..].copy_from_slice(&after[from..]);
        }
    }
    assert_eq!(reader.next_record(), Ok(None), "no more records");
    assert!(cells_before == cells_after, "written elsewhere: {what}");
    assert_eq!(arena.word(lost).load(Ordering::SeqCst), 0);
    seen.escapes += u64::from(escapes);
    seen.vetoed += vetoes;
    seen.faults = loads.faults().iter().flatten().sum();
}

#[test]
fn what_is_found_is_what_the_host_would_find() {
    /// Minimum of each count except `skipped`, for each division of the addresses between the kernel and processes.
    const ENOUGH: u64 = 100;
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let mut random = Random::new(&[11]);
    for (kernel_half, process_end) in halves(&arena) {
        let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
        let mut world = world(&arena, &loads, &mut random);
        let mut seen = Seen::default();
        for is_nop in [true, false] {
            let code = assemble(&arena, arena.function(), |a| {
                if is_nop {
                    a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
                } else {
                    a.push(rbp)?;
                    a.mov(rbp, rsp)?;
                    a.push(r15)?;
                }
                a.jmp(bench.exit(0).0)
            });
            let span = Span::find(&code, arena.function(), arena.function()).unwrap();
            for _ in 0..rounds(1500) {
                compare(&bench, &span, &loads, &mut world, &mut random, &mut seen);
            }
        }
        println!("the kernel from {kernel_half}, processes up to {process_end}: {seen:?}");
        assert!(seen.skipped < rounds(150), "{seen:?}");
        let Seen {
            escapes,
            vetoed,
            nothing,
            values,
            bytes,
            whole,
            truncated,
            faults,
            ..
        } = seen;
        let all = [
            escapes, vetoed, nothing, values, bytes, whole, truncated, faults,
        ];
        assert!(all.iter().all(|count| *count >= rounds(ENOUGH)), "{seen:?}");
    }
}
