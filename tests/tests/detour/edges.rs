//! Tests items that end at an edge: texts of every length at and near an absent page, memory up to the end of the
//! processes' addresses, and items of no bytes.

use super::world::{Found, PAGE, REAL_HALVES, ROW, found, halves, world};
use super::{assemble, no_registers, quiet};
use hvprobe_arch::detour::{CELL, Capture, Fetching, Layout, Member, Part, Span};
use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read};
use hvprobe_arch::regs::{Gpr, Regs};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::loads::Loads;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use iced_x86::code_asm::{dword_ptr, registers::*};
use std::sync::atomic::Ordering;

/// A probed nop. Its only probe reads `items`.
struct Probed<'a> {
    bench: &'a Bench<'a>,
    items: Vec<Fetched>,
    layout: Layout,
    reader: Reader<'a>,
    planted: Planted<'a>,
    state: State,
}

impl<'a> Probed<'a> {
    fn new(bench: &'a Bench<'a>, loads: &Loads<'_>, items: Vec<Fetched>) -> Self {
        let arena = bench.arena();
        let code = assemble(arena, arena.function(), |a| {
            a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
            a.jmp(bench.exit(0).0)
        });
        let span = Span::find(&code, arena.function(), arena.function()).unwrap();
        let capture = Capture {
            registers: no_registers(),
            fetching: Some(Fetching {
                readers: loads.readers(),
                items: items.clone(),
            }),
            ..Capture::default()
        };
        let member = Member {
            conditions: &[],
            vetoed: arena.counter(1),
            part: Part::Record {
                source: 5,
                capture: &capture,
                lost: arena.counter(0),
                waits: false,
            },
        };
        let ring = quiet(arena, 64);
        let detour = Room::new(arena).detour(&span, &ring, &[member]).unwrap();
        let state = State {
            regs: Regs {
                rsp: arena.stack().start.0 + 0x2000,
                ..Regs::default()
            },
            vectors: [[0; 4]; 16],
        };
        Self {
            bench,
            items,
            layout: Layout::new(&capture).unwrap(),
            reader: Reader::new(arena, ring),
            planted: Planted::new(arena, &span, &detour),
            state,
        }
    }

    /// Calls the function with `argument` in RDI; returns the results of the items.
    fn hit(&mut self, argument: u64) -> Vec<Found> {
        let arena = self.bench.arena();
        self.state.regs.rdi = argument;
        let left = self.bench.run(arena.function(), &self.state);
        assert_eq!(left.state.regs.rdi, argument);
        assert_eq!(self.planted.escapes(), 0);
        let (_, bytes) = self.reader.next_record().unwrap().expect("a record");
        found(&self.layout, &bytes, &self.items)
    }
}

/// Returns an item that reads at the address in RDI.
pub(crate) fn at_rdi(read: Read, memory: Memory) -> Fetched {
    Fetched {
        base: Base::Register(Gpr::Rdi),
        pointers: vec![Pointer { offset: 0, memory }],
        read,
    }
}

#[test]
fn texts_are_as_the_host_reads_them_wherever_they_end() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let (kernel_half, process_end) = REAL_HALVES;
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    let mut world = world(&arena, &loads, &mut Random::new(&[12]));
    let (row, hole) = (world.page(0), world.page(ROW));
    let [mut nothing, mut truncated, mut tried] = [0; 3];
    for most in [1, 7, 8, 9, 15, 16, 41, 55, 56, 57, 100, 200] {
        let item = at_rdi(Read::Text(most), Memory::Either);
        let mut probed = Probed::new(&bench, &loads, vec![item.clone()]);
        for len in 0..u64::from(most) + 10 {
            let text: Vec<u8> = (0..len).map(|n| b'a' + (n % 26) as u8).collect();
            let with_end = [&text[..], &[0]].concat();
            for (at, text) in [
                (hole - with_end.len() as u64, &with_end),
                (hole - len, &text),
                (hole - len - 1, &text),
                (row + 0x123, &with_end),
                (row + PAGE - len / 2, &with_end),
            ] {
                world.put(hole - 300, &[b'z'; 300]);
                world.put(at, text);
                let regs = Regs {
                    rdi: at,
                    ..Regs::default()
                };
                let expected = world.find(&item, &regs).unwrap();
                assert_eq!(
                    probed.hit(at),
                    std::slice::from_ref(&expected),
                    "{len} of {most} at {at:x}"
                );
                tried += 1;
                nothing += u64::from(expected == Found::Nothing);
                truncated += u64::from(matches!(
                    expected,
                    Found::Text {
                        truncated: true,
                        ..
                    }
                ));
            }
        }
    }
    println!("{tried} texts, {nothing} not to be read, {truncated} truncated");
    assert!(nothing > 500 && truncated > 300, "{nothing} {truncated}");
}

#[test]
fn memory_is_read_up_to_the_very_end_of_a_process() {
    // A process that is not randomized has its arguments and environment at the very end of its addresses.
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let [(kernel_half, process_end), ..] = halves(&arena);
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    let mut world = world(&arena, &loads, &mut Random::new(&[13]));
    let end = process_end.0;
    world.put(end - 5, b"last\0");
    let items = vec![
        at_rdi(Read::Text(64), Memory::User),
        at_rdi(Read::Bytes(5), Memory::Either),
        at_rdi(Read::Bytes(6), Memory::User),
        at_rdi(Read::Bytes(5), Memory::Kernel),
    ];
    let mut probed = Probed::new(&bench, &loads, items);
    let text = |bytes: &[u8]| Found::Text {
        bytes: bytes.to_vec(),
        truncated: false,
    };
    let bytes = Found::Bytes(b"last\0".to_vec());
    let found = probed.hit(end - 5);
    assert_eq!(
        found,
        [text(b"last"), bytes, Found::Nothing, Found::Nothing]
    );
    let before = loads.calls();
    assert_eq!(probed.hit(end), [const { Found::Nothing }; 4]);
    assert_eq!(loads.calls(), before, "beyond it nothing is tried");
}

#[test]
fn nothing_is_written_for_an_item_of_no_bytes() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let (kernel_half, process_end) = REAL_HALVES;
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    // A cell has room for seven words of a record: the time, the flags, the bits of unread items, and these four.
    let constant = |read| Fetched {
        base: Base::Constant(0x1122_3344_5566_7788),
        pointers: Vec::new(),
        read,
    };
    let items = vec![constant(Read::Bytes(32)), constant(Read::Bytes(0))];
    let mut probed = Probed::new(&bench, &loads, items);
    assert_eq!(probed.layout.size(), CELL);
    let ring = arena.ring(64, 63, 0);
    let next = arena.word(ring.head).load(Ordering::SeqCst) + 1;
    let next = ring.cells.wrapping_add(next % 64 * CELL as u64 + 8);
    arena.word(next).store(0x5555, Ordering::SeqCst);
    let mut first = 0x1122_3344_5566_7788_u64.to_le_bytes().to_vec();
    first.resize(32, 0);
    assert_eq!(
        probed.hit(0),
        [Found::Bytes(first), Found::Bytes(Vec::new())]
    );
    assert_eq!(arena.word(next).load(Ordering::SeqCst), 0x5555);
}
