//! The ring that detours write and the host reads, and the records in it.
//!
//! A ring consists of:
//!
//! - `head`, a counter of reserved cells, which writers advance;
//! - `limit` and `bell`, on another cache line, which the reader sets;
//! - `capacity` cells, a power of two, and [`MAX_RECORD_CELLS`] spare ones after them, so that no record wraps.
//!
//! Counters only ever grow. The first word of each cell is its *mark*. Invariants:
//!
//! - A writer advances `head` by one atomic exchange, and never past `limit`. The cells between the old and the new
//!   head belong to that writer. The writer that advances `head` past `bell` rings the doorbell.
//! - A record of `n` cells at position `p` begins at cell `p % capacity`. Its mark is written last, and the half of
//!   the mark that is never zero comes after the other half. Then the record is *finished*.
//! - The marks of a record's other cells are never written. So a mark whose upper half is not zero is the mark of a
//!   finished record; captured values are never in the place of a mark. The reader finds finished records even
//!   after an unfinished one, whose length it does not know.
//! - The reader takes finished records, sets their marks to zero, and advances `limit`. The cells between `head`
//!   and `limit` are free: all records that were in them have been taken. So the cells of an unfinished record are
//!   never given to another writer, even if its own writer takes long.
//! - The reader may also advance `head`, as if it reserved cells without ever writing a record there. In this way
//!   it moves `head` past cells that are not free, so that writers continue after them.
//!
//! ```text
//!   each cell:  u64 mark, 7 words of the record
//!
//!   the mark    u32 position + cells, its lower half
//!   of a record u24 source, u8 cells
//!
//!   words       u64 TSC                       | of a return, after those:
//!               u32 flags, u32 CPU            |     u64 call id
//!               u32 pid, u32 tgid             |     u64 the real return address
//!               u8[16] comm                   |     u64 TSC at entry
//!               u64 each selected register,   |     u32 flags and u32 CPU at entry
//!                   by number                 |     u64 each selected register at entry
//!               u64 each selected stack word  |     u64 each selected stack word at entry
//!               u64 bits: not read            |
//!               u64 × each item of memory     |
//!               u64 the stack's end, u64 n    |
//!   n cells     the stack up to there         |
//! ```
//!
//! (pid, tgid and comm only if a task is captured; a CPU that is not captured is zero.)

use super::capture::{BY_HOST, EntryCapture, STACK_WORDS_MAX};
use super::cells::{
    CELL, MAX_RECORD_CELLS, Malformed, RECORD_CELLS, STACK_CELLS, Spread, array, word,
};
use super::error::BuildError;
use super::fetching::{Fetching, Rooms};
use super::stack::{CopyLayout, StackCopy, StackFields};
use crate::Gva;
use crate::fetch::TextHeader;
use crate::regs::{Gpr, RegisterSet, Regs};

/// Offsets of the halves of a record's mark: the position, and the half that shows that the record is finished.
pub(super) const END: u8 = 0;
pub(super) const IDENTITY: usize = 4;
/// Offsets of the words that every record begins with, and of the task.
pub(super) const TSC: u8 = 8;
const FLAGS: usize = 16;
const TASK: usize = 24;
/// Number of words that every record begins with, and number of the task's words.
const FIXED_WORDS: usize = 2;
const TASK_WORDS: usize = 3;
/// Number of words of a call before its flags.
const CALL_WORDS: usize = 3;
/// Number of bits of a record's identity that hold the source; the others hold the number of cells.
pub(super) const SOURCE_BITS: u32 = 24;
/// Length of a task's name (`TASK_COMM_LEN`).
const COMM: usize = 16;

/// A ring, as the guest addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Address of the counter of reserved cells (u64).
    pub head: Gva,
    /// Address of the value that the counter must not pass (u64).
    pub limit: Gva,
    /// Address of the value that makes the doorbell ring when the counter passes it (u64).
    pub bell: Gva,
    /// Address of the first cell.
    pub cells: Gva,
    /// Number of cells, without the spare ones: a power of two.
    pub capacity: u32,
    /// Number of used cells at which the doorbell rings.
    pub watermark: u32,
    /// Port that a detour writes to when a record passes the watermark.
    pub doorbell_port: u8,
}

/// Content of a record, besides source, time and flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// Registers, as they are at the probepoint.
    pub registers: RegisterSet,
    /// Numbers of the stack words, counted from the stack pointer up (the N of `$stackN`).
    pub stack: Vec<u16>,
    /// The current task.
    pub task: Option<TaskFields>,
    /// Where the CPU's number (i32) is: an offset from the base of GS, sign-extended. If `None`, it is not
    /// captured.
    pub cpu: Option<u32>,
    /// Items that are read from memory.
    pub fetching: Option<Fetching>,
    /// The whole stack, from the stack pointer to its end.
    pub stack_copy: Option<StackFields>,
}

/// Location of the current task, and of its fields that are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskFields {
    /// Where the pointer to the current task is: an offset from the base of GS, sign-extended.
    pub current: u32,
    /// Offset in the task of its pid (i32).
    pub pid: i32,
    /// Offset in the task of its thread group's id (i32).
    pub tgid: i32,
    /// Offset in the task of its name (16 bytes).
    pub comm: i32,
}

/// Positions of flags, registers and stack words in a record, or in an instance of a return probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Values {
    spread: Spread,
    /// Offset of the flags.
    flags: usize,
    /// Number of the first register's word. The stack words come after the registers.
    first: usize,
    registers: RegisterSet,
    words: usize,
}

impl Values {
    /// Places the flags at the offset `flags`, and all other values from the word `first` on.
    fn at(
        spread: Spread,
        flags: usize,
        first: usize,
        registers: RegisterSet,
        stack: &[u16],
    ) -> Result<Self, BuildError> {
        let words = stack.len();
        if words > STACK_WORDS_MAX {
            return Err(BuildError::TooManyWords { count: words });
        }
        Ok(Self {
            spread,
            flags,
            first,
            registers,
            words,
        })
    }

    /// Places all values from the word `flags` on.
    pub(super) fn new(
        spread: Spread,
        flags: usize,
        registers: RegisterSet,
        stack: &[u16],
    ) -> Result<Self, BuildError> {
        Self::at(spread, spread.offset(flags), flags + 1, registers, stack)
    }

    /// Returns the offset of the word that holds the flags. They need only its lower half, so its upper half holds
    /// the CPU's number.
    pub(super) fn flags(&self) -> usize {
        self.flags
    }

    /// Returns the CPU's number from the upper half of the flags' word; `None` if `was_captured` is false and the
    /// number is not [`BY_HOST`].
    pub(super) fn cpu(&self, bytes: &[u8], was_captured: bool) -> Result<Option<u32>, Malformed> {
        let cpu = array(bytes, self.flags() + 4).map(u32::from_le_bytes)?;
        Ok((was_captured || cpu == BY_HOST).then_some(cpu))
    }

    /// Iterates over the registers and their offsets.
    pub(super) fn registers(&self) -> impl Iterator<Item = (Gpr, usize)> {
        let offsets = (self.first..).map(|word| self.spread.offset(word));
        self.registers.iter().zip(offsets)
    }

    /// Returns the set of registers. Their words are in the order of the registers' numbers.
    pub(super) fn set(&self) -> RegisterSet {
        self.registers
    }

    /// Iterates over the offsets of the stack words.
    pub(super) fn words(&self) -> impl Iterator<Item = usize> {
        let end = self.end();
        (end - self.words..end).map(|word| self.spread.offset(word))
    }

    /// Returns the number of the word after the values.
    pub(super) fn end(&self) -> usize {
        self.first + self.registers.count() + self.words
    }

    pub(super) fn read(&self, bytes: &[u8]) -> Result<(Regs, StackWords), Malformed> {
        let mut regs = Regs {
            rflags: u32::from_le_bytes(array(bytes, self.flags())?).into(),
            ..Regs::default()
        };
        for (register, at) in self.registers() {
            regs.set(register, word(bytes, at)?);
        }
        let mut stack = StackWords::default();
        for (to, at) in stack.words.iter_mut().zip(self.words()) {
            *to = word(bytes, at)?;
            stack.len += 1;
        }
        Ok((regs, stack))
    }
}

/// Layout of the words after the values in a return's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallLayout {
    /// Number of the word of the call's id; the return address and the time at entry follow it.
    first: usize,
    /// Values at entry.
    values: Values,
    has_cpu: bool,
}

impl CallLayout {
    pub(super) fn id(&self) -> usize {
        Spread::Cells.offset(self.first)
    }

    pub(super) fn return_address(&self) -> usize {
        Spread::Cells.offset(self.first + 1)
    }

    fn entry_tsc(&self) -> usize {
        Spread::Cells.offset(self.first + 2)
    }

    /// Iterates over the offsets of the words that are copied from the instance. They are in the instance's order,
    /// and begin with the time at entry.
    pub(super) fn copied(&self) -> impl Iterator<Item = usize> {
        (self.first + 2..self.values.end()).map(|word| Spread::Cells.offset(word))
    }
}

/// Layout of the records of one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    has_cpu: bool,
    /// Offset of the pid, with which the task's words begin; `None` if the task is not captured.
    task: Option<usize>,
    values: Values,
    rooms: Option<Rooms>,
    copy: Option<CopyLayout>,
    call: Option<CallLayout>,
}

/// Content of a record's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Lower half of the position after the record, in cells since the ring began.
    pub end: u32,
    /// Number of the source that made the record.
    pub source: u32,
    /// Number of cells of the record: from 1 to [`MAX_RECORD_CELLS`].
    pub cells: u16,
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Number of the source that made the record.
    pub source: u32,
    /// The CPU's number, if it was captured.
    pub cpu: Option<u32>,
    /// The guest's time stamp counter.
    pub tsc: u64,
    /// The current task, if it was captured.
    pub task: Option<Task>,
    /// Flags, and the registers that were captured; the others, and RIP, are zero. In the record of a return, RSP
    /// is its value after the return.
    pub regs: Regs,
    /// The stack words that were captured, in the order they were asked for.
    pub stack: StackWords,
    /// In the record of a return: the call that ends.
    pub call: Option<Call>,
}

/// A task at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// The pid.
    pub pid: u32,
    /// The thread group's id.
    pub tgid: u32,
    /// The name, up to the first zero.
    pub comm: [u8; COMM],
}

/// The call that a return ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Identifies the call: bit 63 is set, bits 40 to 62 are the stub's number, and bits 0 to 39 are the number of
    /// uses of the instance (modulo 2^40).
    pub id: u64,
    /// The address to which the function returns: the instance's [`caller`](super::Instance::caller).
    pub return_address: Gva,
    /// The time stamp counter at entry.
    pub tsc: u64,
    /// Number of the CPU at entry, if it was captured; `tsc` is that CPU's counter. [`BY_HOST`] if the host served
    /// the entry.
    pub cpu: Option<u32>,
    /// Flags and captured registers at entry; the others, and RIP, are zero.
    pub regs: Regs,
    /// Stack words captured at entry.
    pub stack: StackWords,
}

/// Words captured from the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackWords {
    words: [u64; STACK_WORDS_MAX],
    len: usize,
}

impl StackWords {
    /// Returns the words, in the order they were asked for.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

impl Header {
    /// Decodes the mark of a record's first cell.
    ///
    /// # Errors
    /// When `mark` is not the mark of a finished record.
    pub fn of_mark(mark: u64) -> Result<Self, Malformed> {
        let [end @ .., a, b, c, cells] = mark.to_le_bytes();
        if mark >> u32::BITS == 0 {
            return Err(Malformed::Unfinished);
        }
        let cells = u16::from(cells);
        if cells == 0 || cells > MAX_RECORD_CELLS {
            return Err(Malformed::Cells {
                found: cells,
                want: MAX_RECORD_CELLS,
            });
        }
        Ok(Self {
            end: u32::from_le_bytes(end),
            source: u32::from_le_bytes([a, b, c, 0]),
            cells,
        })
    }

    /// Number of possible sources, which are numbered from 0.
    pub const SOURCES: u32 = 1 << SOURCE_BITS;

    /// Returns whether the record may be the one at `position`. A mark holds only the lower half of a position.
    #[must_use]
    pub fn is_at(&self, position: u64) -> bool {
        let [a, b, c, d, ..] = position.wrapping_add(self.cells.into()).to_le_bytes();
        self.end == u32::from_le_bytes([a, b, c, d])
    }

    /// Returns the half of the mark that holds source and cells; never zero.
    ///
    /// # Errors
    /// When the source's number is too large for a record.
    pub(super) fn identity(source: u32, cells: u16) -> Result<u32, BuildError> {
        if source >= Self::SOURCES {
            return Err(BuildError::Source { number: source });
        }
        Ok(source | u32::from(cells) << SOURCE_BITS)
    }
}

impl Layout {
    /// Computes the layout of records with this content.
    ///
    /// # Errors
    /// When more was asked for than a record holds.
    pub fn new(capture: &Capture) -> Result<Self, BuildError> {
        let task = capture.task.is_some();
        let first = FIXED_WORDS + if task { TASK_WORDS } else { 0 };
        let (registers, stack) = (capture.registers, &capture.stack);
        let values = Values::at(Spread::Cells, FLAGS, first, registers, stack)?;
        let fetching = capture.fetching.as_ref();
        let rooms = fetching.map(|fetching| Rooms::new(values.end(), &fetching.items));
        let rooms = rooms.transpose()?;
        let copied = rooms.as_ref().map_or(values.end(), Rooms::end);
        let layout = Self {
            has_cpu: capture.cpu.is_some(),
            task: task.then_some(TASK),
            values,
            rooms,
            copy: capture.stack_copy.map(|_| CopyLayout::new(copied)),
            call: None,
        };
        if layout.size() > usize::from(RECORD_CELLS) * CELL {
            let words = layout.end();
            return Err(BuildError::TooLarge { words });
        }
        Ok(layout)
    }

    /// Computes the layout of the records of returns. They hold what `capture` selects at the return, and what
    /// `entry` selected at the entry, which the instance has kept.
    ///
    /// # Errors
    /// When more was asked for than a record holds, or something that is not available at a return.
    pub fn of_return(capture: &Capture, entry: &EntryCapture) -> Result<Self, BuildError> {
        if !capture.stack.is_empty() {
            return Err(BuildError::StackAtReturn);
        }
        if capture.fetching.is_some() || capture.stack_copy.is_some() {
            return Err(BuildError::FetchAtReturn);
        }
        let plain = Self::new(capture)?;
        let first = plain.values.end();
        let flags = first + CALL_WORDS;
        let values = Values::new(Spread::Cells, flags, entry.registers, &entry.stack)?;
        Ok(Self {
            call: Some(CallLayout {
                first,
                values,
                has_cpu: entry.cpu.is_some(),
            }),
            ..plain
        })
    }

    /// Returns the number of the word after the record.
    fn end(&self) -> usize {
        match (&self.call, &self.copy, &self.rooms) {
            (Some(call), ..) => call.values.end(),
            (None, Some(copy), _) => copy.end(),
            (None, None, Some(rooms)) => rooms.end(),
            (None, None, None) => self.values.end(),
        }
    }

    /// Returns the size of a record in bytes, without a copy of the stack.
    #[must_use]
    pub fn size(&self) -> usize {
        Spread::Cells.offset(self.end() - 1) + 8
    }

    /// Returns the number of cells of a record, without a copy of the stack, which has cells of its own.
    #[must_use]
    pub fn cells(&self) -> u16 {
        u16::try_from(self.size().div_ceil(CELL)).unwrap_or(RECORD_CELLS)
    }

    pub(super) fn copy(&self) -> Option<CopyLayout> {
        self.copy
    }

    /// Returns the copy of the stack in the record with which `bytes` begins; `None` if this layout has none.
    /// [`Self::decode`] must accept the record.
    ///
    /// # Errors
    /// When the bytes end before the copy does.
    pub fn stack_copy<'a>(&self, bytes: &'a [u8]) -> Result<Option<StackCopy<'a>>, Malformed> {
        let Some(copy) = self.copy else {
            return Ok(None);
        };
        let header = Header::of_mark(word(bytes, 0)?)?;
        copy.of(bytes, self.cells()..header.cells).map(Some)
    }

    pub(super) fn task(&self) -> Option<usize> {
        self.task
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    pub(super) fn rooms(&self) -> Option<&Rooms> {
        self.rooms.as_ref()
    }

    pub(super) fn call(&self) -> Option<&CallLayout> {
        self.call.as_ref()
    }

    /// Fills `into` with what was read from memory for the item `index`. Returns whether the item could be read.
    /// [`Self::decode`] must accept the record with which `bytes` begins.
    ///
    /// # Errors
    /// When the bytes end before the item does.
    pub fn fetched(&self, bytes: &[u8], index: usize, into: &mut [u8]) -> Result<bool, Malformed> {
        match &self.rooms {
            Some(rooms) => rooms.bytes(bytes, index, into),
            None => Ok(false),
        }
    }

    /// Copies the text of the item `index` to the front of `into`. Returns `None` if the text could not be read.
    ///
    /// # Errors
    /// When the bytes end before the item does.
    pub fn text(
        &self,
        bytes: &[u8],
        index: usize,
        into: &mut [u8],
    ) -> Result<Option<TextHeader>, Malformed> {
        match &self.rooms {
            Some(rooms) => rooms.text(bytes, index, into),
            None => Ok(None),
        }
    }

    /// Decodes the record at the beginning of `bytes`. Hit path: no allocation.
    ///
    /// # Errors
    /// When `bytes` does not begin with a finished record of this layout.
    pub fn decode(&self, bytes: &[u8]) -> Result<Record, Malformed> {
        let header = Header::of_mark(word(bytes, 0)?)?;
        let (fewest, most) = match self.copy {
            None => (self.cells(), self.cells()),
            Some(_) => (self.cells() + 1, self.cells() + STACK_CELLS),
        };
        if !(fewest..=most).contains(&header.cells) {
            return Err(Malformed::Cells {
                found: header.cells,
                want: most,
            });
        }
        if let Some(copy) = self.copy {
            // Only `stack_copy` uses these words, but every record has them.
            word(bytes, copy.cells())?;
        }
        let task = self.task.map(|at| {
            Ok(Task {
                pid: u32::from_le_bytes(array(bytes, at)?),
                tgid: u32::from_le_bytes(array(bytes, at + 4)?),
                comm: array(bytes, at + 8)?,
            })
        });
        let call = self.call.map(|call| {
            let (regs, stack) = call.values.read(bytes)?;
            Ok(Call {
                id: word(bytes, call.id())?,
                return_address: Gva(word(bytes, call.return_address())?),
                tsc: word(bytes, call.entry_tsc())?,
                cpu: call.values.cpu(bytes, call.has_cpu)?,
                regs,
                stack,
            })
        });
        let (regs, stack) = self.values.read(bytes)?;
        Ok(Record {
            source: header.source,
            cpu: self.values.cpu(bytes, self.has_cpu)?,
            tsc: word(bytes, usize::from(TSC))?,
            task: task.transpose()?,
            regs,
            stack,
            call: call.transpose()?,
        })
    }
}

#[cfg(test)]
mod tests;
