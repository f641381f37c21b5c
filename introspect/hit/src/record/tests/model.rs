//! Writers that stop at any instruction, for any time, and the reader.
//!
//! A writer makes the same accesses to memory as a detour, one after the other. All words that it records look like
//! the mark of a record. Writers also continue between any two accesses of the reader.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use hvprobe_arch::mem::OutOfRange;
use hvprobe_arch::regs::Gpr;
use proptest::prelude::*;

use super::*;

/// Number of concurrent writers.
const WRITERS: usize = 6;
/// The sources: number, number of recorded words of registers and stack, and number of cells of a record.
const SOURCES: [(u32, usize, u64); 3] = [(7, 0, 1), (8, 8, 2), (9, 22, 4)];

fn word_at(position: u64, word: u64) -> Gpa {
    let cell = position & u64::from(CAPACITY - 1);
    CELLS.wrapping_add(cell * CELL as u64 + word * 8)
}

/// Returns the content of word number `word` of the record with the time `tsc`.
fn content(tsc: u64, word: u64) -> u64 {
    // The mark of a record of one cell, of an existing source, at some position.
    u64::from(7_u32 | 1 << 24) << 32 | (tsc.wrapping_mul(31) ^ word) & 0x3f
}

/// Progress of a writer: its next access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Head,
    Limit { head: u64 },
    Exchange { head: u64 },
    Word { position: u64, word: u64 },
    End { position: u64 },
    Identity { position: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Writer {
    tsc: u64,
    source: u32,
    words: usize,
    cells: u64,
    before: Before,
}

impl Writer {
    /// Returns the cells that the writer has reserved for a record that it has not finished.
    fn reserved(&self) -> Option<Range<u64>> {
        match self.before {
            Before::Word { position, .. }
            | Before::End { position }
            | Before::Identity { position } => Some(position..position.wrapping_add(self.cells)),
            Before::Head | Before::Limit { .. } | Before::Exchange { .. } => None,
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    /// A writer begins to record.
    Begin { writer: usize, source: usize },
    /// A writer continues.
    Go { writer: usize, accesses: u32 },
    /// The reader makes a pass. After each of its accesses, one of the writers begins or continues; see [`Shared`].
    Pass {
        after_ms: u64,
        most: usize,
        patient: bool,
        meanwhile: Vec<(usize, u32)>,
    },
    /// The guest writes what no detour writes.
    Forge { word: u64, value: u64 },
}

/// A finished record: its time and its cells.
type Finished = (u64, Range<u64>);

/// The guest's side.
struct Guest {
    mem: Memory,
    writers: [Option<Writer>; WRITERS],
    begun: u64,
    lost: u64,
    /// Records that the reader has not taken.
    finished: Vec<Finished>,
    /// Times of the records that the reader has taken, but not returned.
    taken: Vec<u64>,
    /// Times of all records, in the order of their reservation.
    order: Vec<u64>,
    /// Whether the guest has written nonsense.
    is_forged: bool,
}

impl Guest {
    fn load(&self, at: Gpa) -> u64 {
        self.mem.read_u64(at).expect("in memory")
    }

    fn store(&self, at: Gpa, value: u64) {
        self.mem.write_u64(at, value).expect("in memory");
    }

    fn begin(&mut self, writer: usize, source: usize) {
        let (source, words, cells) = SOURCES[source];
        if self.writers[writer].is_none() {
            self.begun += 1;
            self.writers[writer] = Some(Writer {
                tsc: self.begun,
                source,
                words,
                cells,
                before: Before::Head,
            });
        }
    }

    /// Makes one access. Returns `false` when the writer is done.
    fn step(&mut self, index: usize) -> bool {
        let Some(writer) = self.writers[index] else {
            return false;
        };
        let next = self.access(&writer);
        self.writers[index] = next.map(|before| Writer { before, ..writer });
        next.is_some()
    }

    fn access(&mut self, writer: &Writer) -> Option<Before> {
        let cells = writer.cells;
        match writer.before {
            Before::Head => Some(Before::Limit {
                head: self.load(HEAD),
            }),
            Before::Limit { head } => {
                if head.wrapping_add(cells) > self.load(LIMIT) {
                    self.lost += 1;
                    return None;
                }
                Some(Before::Exchange { head })
            }
            Before::Exchange { head } => {
                let now = self.load(HEAD);
                if now != head {
                    return Some(Before::Limit { head: now });
                }
                let end = head.wrapping_add(cells);
                self.store(HEAD, end);
                self.check_free(head..end);
                self.order.push(writer.tsc);
                Some(Before::Word {
                    position: head,
                    word: 0,
                })
            }
            Before::Word { position, word } => {
                // Time, CPU and flags, and then the captured words. None of them is in the place of a mark.
                let value = match word {
                    0 => writer.tsc,
                    1 => 0,
                    _ => content(writer.tsc, word),
                };
                self.store(word_at(position, 1 + word + word / 7), value);
                let word = word + 1;
                Some(match word < 2 + writer.words as u64 {
                    true => Before::Word { position, word },
                    false => Before::End { position },
                })
            }
            Before::End { position } => {
                let [a, b, c, d, ..] = position.wrapping_add(cells).to_le_bytes();
                self.mem.write(word_at(position, 0), &[a, b, c, d]).unwrap();
                Some(Before::Identity { position })
            }
            Before::Identity { position } => {
                let identity = writer.source | u32::try_from(cells).unwrap() << 24;
                let at = word_at(position, 0).wrapping_add(4);
                self.mem.write(at, &identity.to_le_bytes()).unwrap();
                let range = position..position.wrapping_add(cells);
                self.finished.push((writer.tsc, range));
                None
            }
        }
    }

    /// Checks that no cell of `range` belongs to another writer at work, or to a finished record that was not
    /// taken.
    fn check_free(&self, range: Range<u64>) {
        if self.is_forged {
            return;
        }
        let others = self.writers.iter().flatten().filter_map(Writer::reserved);
        let untaken = self.finished.iter().map(|(_, cells)| cells.clone());
        let cells =
            |range: Range<u64>| -> Vec<u64> { range.map(|at| at % u64::from(CAPACITY)).collect() };
        let mine = cells(range.clone());
        for other in others.chain(untaken) {
            let theirs = cells(other.clone());
            let is_shared = mine.iter().any(|cell| theirs.contains(cell));
            assert!(!is_shared, "{range:?} and {other:?}");
        }
    }

    /// Notes that the reader has cleared the mark at `at`.
    fn cleared(&mut self, at: Gpa) {
        let is_there = |finished: &Finished| word_at(finished.1.start, 0) == at;
        if let Some(index) = self.finished.iter().position(is_there) {
            self.taken.push(self.finished.remove(index).0);
        }
    }
}

/// The guest's memory as the reader accesses it, with the guest at work.
struct Shared<'a> {
    guest: &'a RefCell<Guest>,
    mem: Memory,
    /// What the guest does after each access by the reader: the index of a writer, and the number of accesses that
    /// the writer makes. If the writer has no record in progress, it begins one. The list is used cyclically.
    meanwhile: &'a [(usize, u32)],
    accesses: Cell<usize>,
}

impl Shared<'_> {
    fn meanwhile(&self) {
        let access = self.accesses.get();
        self.accesses.set(access + 1);
        let mut meanwhile = self.meanwhile.iter().cycle().skip(access);
        if let Some((writer, accesses)) = meanwhile.next() {
            let mut guest = self.guest.borrow_mut();
            guest.begin(*writer, access % SOURCES.len());
            for _ in 0..*accesses {
                guest.step(*writer);
            }
        }
    }
}

impl PhysMemory for Shared<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let result = self.mem.read(at, into);
        self.meanwhile();
        result
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        self.mem.write(at, bytes)?;
        if at >= CELLS {
            self.guest.borrow_mut().cleared(at);
        }
        self.meanwhile();
        Ok(())
    }

    fn exchange_u64(&self, at: Gpa, old: u64, new: u64) -> Result<bool, OutOfRange> {
        let result = self.mem.exchange_u64(at, old, new);
        self.meanwhile();
        result
    }
}

struct World {
    rig: Rig,
    guest: RefCell<Guest>,
    read: u64,
    nonsense: u64,
}

impl World {
    fn new() -> Self {
        let rig = Rig::new();
        for (probe, words, cells) in SOURCES {
            // Registers first, then stack words.
            let registers = Gpr::ALL.into_iter().take(words.min(16));
            let capture = Capture {
                registers: registers.collect(),
                stack: (0..31).take(words.saturating_sub(16)).collect(),
                ..Capture::default()
            };
            let source = source(ProbeId(probe), capture, &rig.counters);
            assert_eq!(u64::from(source.layout.cells()), cells);
            rig.reader.sources.add(source);
        }
        let guest = Guest {
            mem: rig.mem.clone(),
            writers: [None; WRITERS],
            begun: 0,
            lost: 0,
            finished: Vec::new(),
            taken: Vec::new(),
            order: Vec::new(),
            is_forged: false,
        };
        Self {
            rig,
            guest: RefCell::new(guest),
            read: 0,
            nonsense: 0,
        }
    }

    fn load(&self, at: Gpa) -> u64 {
        self.guest.borrow().load(at)
    }

    fn pass(&mut self, look: Look, meanwhile: &[(usize, u32)]) -> Vec<u64> {
        let mut events = Vec::new();
        let mem = Shared {
            guest: &self.guest,
            mem: self.rig.mem.clone(),
            meanwhile,
            accesses: Cell::new(0),
        };
        let read = self
            .rig
            .reader
            .read(&mem, |at: Stamp| When::At(at.tsc), look, &mut events);
        self.nonsense += read.lost;
        assert!(events.len() <= CAPACITY as usize);
        self.read += events.len() as u64;
        let times: Vec<u64> = events.iter().map(|event| event.guest_tsc).collect();
        let mut guest = self.guest.borrow_mut();
        let taken = std::mem::take(&mut guest.taken);
        if !guest.is_forged {
            assert_eq!(times, taken);
            assert_eq!(self.nonsense, 0);
            events.iter().for_each(check_content);
        }
        times
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Begin { writer, source } => self.guest.get_mut().begin(*writer, *source),
            Action::Go { writer, accesses } => {
                for _ in 0..*accesses {
                    self.guest.get_mut().step(*writer);
                }
            }
            Action::Pass {
                after_ms,
                most,
                patient,
                meanwhile,
            } => {
                self.rig.pass_ms(*after_ms);
                let look = match patient {
                    true => Look::patient(*most, self.rig.now),
                    false => Look::at_all(*most),
                };
                self.pass(look, meanwhile);
            }
            Action::Forge { word, value } => {
                let guest = self.guest.get_mut();
                guest.is_forged = true;
                let cells = u64::from(CAPACITY) * 8;
                let at = match *word < cells {
                    true => CELLS.wrapping_add(word * 8),
                    false => HEAD,
                };
                guest.store(at, *value);
            }
        }
    }

    /// Lets one writer record from the beginning to the end. Returns whether there was room.
    fn record(&mut self, writer: usize, source: usize) -> bool {
        let guest = self.guest.get_mut();
        let lost = guest.lost;
        guest.begin(writer, source);
        while guest.step(writer) {}
        guest.lost == lost
    }

    /// Reads all finished records. Checks that none is left, unless the guest has forged the ring.
    fn read_all(&mut self) {
        self.pass(Look::at_all(CAPACITY as usize), &[]);
        let guest = self.guest.borrow();
        assert!(guest.is_forged || guest.finished.is_empty());
    }

    fn finish(&mut self) {
        for writer in 0..WRITERS {
            while self.guest.get_mut().step(writer) {}
        }
        self.read_all();
        self.read_all();
    }
}

fn check_content(event: &Event) {
    let (_, words, _) = SOURCES
        .into_iter()
        .find(|(source, ..)| *source == event.probe.0)
        .expect("a source");
    let registers = Gpr::ALL.into_iter().take(words.min(16));
    let mut captured: Vec<u64> = registers.map(|it| event.regs.get(it)).collect();
    let stack = event.captured.bytes().chunks(8);
    captured.extend(stack.map(|word| u64::from_le_bytes(word.try_into().unwrap())));
    let wanted: Vec<u64> = (0..words as u64)
        .map(|word| content(event.guest_tsc, word + 2))
        .collect();
    assert_eq!(captured, wanted);
}

fn action() -> impl Strategy<Value = Action> {
    let go = || (0..WRITERS, prop_oneof![1..6_u32, Just(40)]);
    let most = prop_oneof![0..4_usize, Just(99)];
    let meanwhile = prop::collection::vec(go(), 0..12);
    prop_oneof![
        3 => (0..WRITERS, 0..SOURCES.len())
            .prop_map(|(writer, source)| Action::Begin { writer, source }),
        6 => go().prop_map(|(writer, accesses)| Action::Go { writer, accesses }),
        2 => (0..30_u64, most, any::<bool>(), meanwhile).prop_map(
            |(after_ms, most, patient, meanwhile)| Action::Pass {
                after_ms,
                most,
                patient,
                meanwhile,
            }
        ),
    ]
}

/// Returns an action that forges a word: something like a mark or a head, or anything.
fn forged() -> impl Strategy<Value = Action> {
    let cells = u64::from(CAPACITY);
    let word = prop_oneof![(0..cells).prop_map(|cell| cell * 8), 0..cells * 8 + 8];
    let mark = (0..64_u32, 6..11_u32, 0..20_u32)
        .prop_map(|(end, source, cells)| u64::from(source | cells << 24) << 32 | u64::from(end));
    let value = prop_oneof![mark, 0..99_u64, any::<u64>()];
    (word, value).prop_map(|(word, value)| Action::Forge { word, value })
}

proptest! {
    #[test]
    fn every_finished_record_is_read_once_wherever_writers_stop(
        actions in prop::collection::vec(action(), 1..300),
    ) {
        let mut world = World::new();
        for action in &actions {
            world.act(action);
        }
        // Writers that stopped in the middle stay there, but the ring can still be used.
        world.read_all();
        let free = world.guest.borrow().writers.iter().position(Option::is_none);
        if let Some(free) = free {
            for round in 0..200 {
                prop_assert!(world.record(free, round % SOURCES.len()), "round {round}");
                world.read_all();
                let [head, limit, bell] = [HEAD, LIMIT, BELL].map(|at| world.load(at));
                prop_assert!((head + 1..=limit).contains(&bell), "{head} {limit} {bell}");
            }
        }
        // The stopped writers may continue after all.
        world.finish();
        let guest = world.guest.borrow();
        prop_assert_eq!(world.read + guest.lost, guest.begun);
        prop_assert_eq!(world.rig.counters.sum().hits, world.read);
        prop_assert!(!world.rig.reader.awaits());
        let head = guest.load(HEAD);
        prop_assert_eq!(guest.load(LIMIT), head + u64::from(CAPACITY));
        prop_assert_eq!(guest.load(BELL), head + u64::from(WATERMARK));
    }

    #[test]
    fn in_turn_records_come_in_the_order_they_were_reserved_in(
        actions in prop::collection::vec(action(), 1..300),
    ) {
        let mut world = World::new();
        let mut read = Vec::new();
        for action in &actions {
            match action {
                // Only while so little is unread that the reader steps over nothing.
                Action::Pass { most, .. } => {
                    let unread = world.load(HEAD) - world.rig.reader.next;
                    if unread <= u64::from(WATERMARK) {
                        let look = Look::patient(*most, world.rig.now);
                        read.extend(world.pass(look, &[]));
                    }
                }
                action => world.act(action),
            }
        }
        prop_assert_eq!(&read[..], &world.guest.borrow().order[..read.len()]);
    }

    #[test]
    fn nothing_a_guest_writes_harms_more_than_its_own_events(
        actions in prop::collection::vec(prop_oneof![3 => action(), 1 => forged()], 1..200),
    ) {
        survives(&actions);
    }
}

/// Checks that the ring works as before after a guest has carried out these `actions`.
fn survives(actions: &[Action]) {
    let mut world = World::new();
    for action in actions {
        world.act(action);
    }
    // Records that were begun before may be finished in cells that are not theirs any more. After that the ring is
    // as it was.
    world.finish();
    world.finish();
    let guest = world.guest.get_mut();
    guest.is_forged = false;
    guest.finished.clear();
    world.nonsense = 0;
    let hits = world.rig.counters.sum().hits;
    for round in 0..100 {
        assert!(world.record(0, round % SOURCES.len()), "round {round}");
        world.read_all();
    }
    assert_eq!(world.rig.counters.sum().hits, hits + 100);
}

#[test]
fn a_head_that_leaves_no_room_for_a_record_does_not_stay_there() {
    for head in 0..=u64::from(CAPACITY) {
        let word = u64::from(CAPACITY) * 8;
        survives(&[Action::Forge { word, value: head }]);
    }
}
