//! Model of the memory that tests read. It follows pointers in that memory as the host does.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Layout, Readers};
use hvprobe_arch::fetch::{Base, Fetched, Memory, Read};
use hvprobe_arch::regs::Regs;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::loads::{Calls, Loads};
use hvprobe_tests::differential::random::Random;
use std::collections::HashSet;
use std::ops::Range;

pub(crate) const PAGE: u64 = 4096;
/// Absent page between the processes' part and the kernel's part, if the pages are in both parts.
pub(crate) const BETWEEN: u64 = 31;
pub(crate) const PAGES: u64 = 64;
/// Maximum number of consecutive pages that are present.
pub(crate) const ROW: u64 = 3;
/// Start of the kernel's half, and end of the processes' addresses, on real machines.
pub(crate) const REAL_HALVES: (Gva, Gva) = (Gva(0xffff_8000_0000_0000), Gva(0x7fff_ffff_f000));
/// Nothing is mapped below this address (`mmap_min_addr`).
const LOWEST: u64 = 0x1000;
/// The vsyscall page. It is in the kernel's half, but a process may have it mapped.
const VSYSCALL: Range<u64> = 0xffff_ffff_ff60_0000..0xffff_ffff_ff60_1000;
/// Last address of the kernel's half that may be read.
const LAST: u64 = 0x2000_u64.wrapping_neg();

/// Reason why a byte has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Not {
    /// No memory is mapped there.
    Mapped,
    /// There may be a byte, but the model does not know it.
    Known,
}

/// Result of reading an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    Bytes(Vec<u8>),
    Text { bytes: Vec<u8>, truncated: bool },
}

/// Pages that tests read. All writes to them must go through this value.
pub(crate) struct World<'a> {
    arena: &'a Arena,
    pages: Vec<u8>,
    holes: HashSet<u64>,
    readers: Readers,
    /// Memory outside the pages: start and content of each range.
    pub(crate) beside: Vec<(Gva, Vec<u8>)>,
    pub(crate) calls: Calls,
    pub(crate) faults: Calls,
}

impl<'a> World<'a> {
    pub(crate) fn new(arena: &'a Arena, readers: Readers) -> Self {
        let pages = arena.pages();
        let len = usize::try_from(pages.end.0 - pages.start.0).unwrap();
        Self {
            arena,
            pages: vec![0; len],
            holes: HashSet::new(),
            readers,
            beside: Vec::new(),
            calls: Calls::default(),
            faults: Calls::default(),
        }
    }

    /// Returns the start of page `number`.
    pub(crate) fn page(&self, number: u64) -> u64 {
        let pages = self.arena.pages();
        let at = pages.start.0 + PAGE * number;
        assert!(at < pages.end.0, "{number}");
        at
    }

    /// Makes page `number` inaccessible.
    pub(crate) fn take_away(&mut self, number: u64) {
        let at = self.page(number);
        if self.holes.insert(at) {
            self.arena.take_away(Gva(at)).unwrap();
        }
    }

    /// Writes `bytes` to the addresses from `at` on, except to those outside accessible pages.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        let pages = self.arena.pages();
        for (at, byte) in (0..).map(|n| at.wrapping_add(n)).zip(bytes) {
            if pages.contains(&Gva(at)) && !self.holes.contains(&(at & !(PAGE - 1))) {
                self.pages[usize::try_from(at - pages.start.0).unwrap()] = *byte;
                self.arena.write(Gva(at), &[*byte]);
            }
        }
    }

    /// Returns the byte at `at`.
    fn byte(&self, at: u64) -> Result<u8, Not> {
        let within = |start: Gva, bytes: &[u8]| {
            let offset = usize::try_from(Gva(at).offset_from(start)?).ok()?;
            bytes.get(offset).copied()
        };
        if let Some(byte) = within(self.arena.pages().start, &self.pages) {
            let is_there = !self.holes.contains(&(at & !(PAGE - 1)));
            return is_there.then_some(byte).ok_or(Not::Mapped);
        }
        let mut beside = self.beside.iter();
        if let Some(byte) = beside.find_map(|(start, bytes)| within(*start, bytes)) {
            return Ok(byte);
        }
        let is_a_process_s = (LOWEST..1 << 47).contains(&at) || VSYSCALL.contains(&at);
        Err(match is_a_process_s {
            true => Not::Known,
            false => Not::Mapped,
        })
    }

    /// Returns `len` bytes at `at`, or `None` if one of them is absent.
    fn bytes(&self, at: u64, len: usize) -> Result<Option<Vec<u8>>, Not> {
        let bytes = (0..len as u64).map(|n| self.byte(at.wrapping_add(n)));
        match bytes.collect() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Not::Mapped) => Ok(None),
            Err(not) => Err(not),
        }
    }

    /// Returns the half that contains `at`, if `memory` allows it: 0 for the kernel's, 1 for the processes'.
    fn half(&self, at: u64, memory: Memory) -> Option<usize> {
        let is_kernel = (self.readers.kernel_half.0..=LAST).contains(&at);
        let is_process = at < self.readers.process_end.0;
        match memory {
            Memory::Kernel => is_kernel.then_some(0),
            Memory::User => is_process.then_some(1),
            Memory::Either if is_kernel => Some(0),
            Memory::Either => is_process.then_some(1),
        }
    }

    /// Loads `len` bytes at `at`, and counts the load and its fault, if it faults. Returns `None` at a fault.
    fn load(&mut self, half: usize, at: u64, len: usize) -> Result<Option<Vec<u8>>, Not> {
        let size = usize::try_from(len.trailing_zeros()).unwrap();
        self.calls[half][size] += 1;
        let bytes = self.bytes(at, len)?;
        self.faults[half][size] += u64::from(bytes.is_none());
        Ok(bytes)
    }

    /// Returns what `item` reads with these registers, and counts the loads.
    pub(crate) fn find(&mut self, item: &Fetched, regs: &Regs) -> Result<Found, Not> {
        let mut value = match item.base {
            Base::Register(register) => regs.get(register),
            Base::Constant(value) => value,
            Base::Task => self.arena.current().0,
            Base::Entry(_) => panic!("not at an entry"),
        };
        let Some((last, before)) = item.pointers.split_last() else {
            let Read::Bytes(len) = item.read else {
                panic!("a text of nothing");
            };
            let mut bytes = value.to_le_bytes().to_vec();
            bytes.resize(len.into(), 0);
            return Ok(Found::Bytes(bytes));
        };
        for pointer in before {
            let at = value.wrapping_add_signed(pointer.offset);
            let Some(half) = self.half(at, pointer.memory) else {
                return Ok(Found::Nothing);
            };
            let Some(bytes) = self.load(half, at, 8)? else {
                return Ok(Found::Nothing);
            };
            value = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        let at = value.wrapping_add_signed(last.offset);
        let Some(half) = self.half(at, last.memory) else {
            return Ok(Found::Nothing);
        };
        match item.read {
            Read::Bytes(len) => self.find_bytes(half, at, len.into()),
            Read::Text(most) => {
                self.load_text(half, at, most.into())?;
                self.find_text(at, most.into())
            }
        }
    }

    fn find_bytes(&mut self, half: usize, at: u64, len: usize) -> Result<Found, Not> {
        let mut found = Vec::new();
        while found.len() < len {
            let left = len - found.len();
            let size = [8, 4, 2, 1].into_iter().find(|size| *size <= left).unwrap();
            match self.load(half, at + found.len() as u64, size)? {
                Some(bytes) => found.extend(bytes),
                None => return Ok(Found::Nothing),
            }
        }
        Ok(Found::Bytes(found))
    }

    /// Makes the loads for a text at `at`: eight bytes at a time, or the eight bytes one by one where such a load
    /// faults.
    fn load_text(&mut self, half: usize, at: u64, most: usize) -> Result<(), Not> {
        for word in 0..=most as u64 / 8 {
            let at = at + 8 * word;
            let ends = match self.load(half, at, 8)? {
                Some(bytes) => bytes.contains(&0),
                None => self.load_slowly(half, at)?,
            };
            if ends {
                break;
            }
        }
        Ok(())
    }

    /// Loads the eight bytes at `at` one by one. Returns whether the text, or its readable part, ends in them.
    fn load_slowly(&mut self, half: usize, at: u64) -> Result<bool, Not> {
        for at in at..at + 8 {
            if self
                .load(half, at, 1)?
                .is_none_or(|bytes| bytes.contains(&0))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the text as the host reads it.
    fn find_text(&self, at: u64, most: usize) -> Result<Found, Not> {
        let mut found = Vec::new();
        for at in at..at + most as u64 {
            match self.byte(at) {
                Ok(0) => {
                    return Ok(Found::Text {
                        bytes: found,
                        truncated: false,
                    });
                }
                Ok(byte) => found.push(byte),
                Err(Not::Mapped) => return Ok(Found::Nothing),
                Err(not) => return Err(not),
            }
        }
        // A text of the maximum length is complete if the zero after it can be read.
        let next = self.bytes(at + most as u64, 1)?;
        Ok(Found::Text {
            bytes: found,
            truncated: next.is_none_or(|next| next != [0]),
        })
    }
}

/// Returns pairs of a start of the kernel's half and an end of the processes' addresses. The boundary between the
/// two is in the middle of the pages, before them, or after them.
pub(crate) fn halves(arena: &Arena) -> [(Gva, Gva); 3] {
    let page = |number| arena.pages().start.wrapping_add(PAGE * number);
    [
        (page(BETWEEN + 1), page(BETWEEN)),
        (arena.entry(), Gva(0x1_0000)),
        REAL_HALVES,
    ]
}

/// Returns a world whose bytes are not zero, and of which every fourth page is inaccessible.
pub(crate) fn world<'a>(arena: &'a Arena, loads: &Loads<'_>, random: &mut Random) -> World<'a> {
    let mut world = World::new(arena, loads.readers());
    for page in 0..PAGES {
        let at = world.page(page);
        if page % (ROW + 1) == ROW {
            world.take_away(page);
            continue;
        }
        for word in 0..PAGE / 8 {
            let bytes = (random.next() | 0x0101_0101_0101_0101).to_le_bytes();
            world.put(at + 8 * word, &bytes);
        }
    }
    world
}

/// Returns the results of all items in a record.
pub(crate) fn found(layout: &Layout, record: &[u8], items: &[Fetched]) -> Vec<Found> {
    let found = items.iter().enumerate().map(|(index, item)| {
        let mut bytes = vec![0xee; 300];
        match item.read {
            Read::Bytes(len) => {
                bytes.truncate(len.into());
                let is_there = layout.fetched(record, index, &mut bytes).unwrap();
                is_there.then_some(Found::Bytes(bytes))
            }
            Read::Text(most) => {
                bytes.truncate(most.into());
                layout.text(record, index, &mut bytes).unwrap().map(|it| {
                    bytes.truncate(it.len.into());
                    let truncated = it.truncated;
                    Found::Text { bytes, truncated }
                })
            }
        }
    });
    found.map(|found| found.unwrap_or(Found::Nothing)).collect()
}
