//! What detours write and the host reads: the ring and the records in it.
//!
//! A ring is a counter of cells, `head`, which writers move on, the reader's `limit` and `bell`, on
//! another cache line, and `capacity` cells, a power of two, with [`MAX_RECORD_CELLS`] more past the
//! end so that no record wraps. The reader has a counter of its own, `tail`: the cells it has read.
//! Counters only ever grow. What is kept true:
//!
//! - `limit` is `tail + capacity`, and `bell` is `tail + watermark`.
//! - Writers move `head` on by one atomic exchange, and never past `limit`, so that the cells between
//!   belong to whoever moved it. Who moves it past `bell` rings the doorbell.
//! - A record of `n` cells at position `p` begins at cell `p % capacity`, and its first word becomes
//!   `p + n` only when the rest is there.
//! - The reader takes the record at `tail` when its first word is not zero any more, sets the first
//!   word of *each* of its cells to zero, since any of them may be the first of a later record, and
//!   moves `tail` on.
//!
//! ```text
//!   0   u64 position + cells      | of a return, after those:
//!   8   u24 source, u8 cells      |     u64 call id
//!   12  u32 CPU                   |     u64 the real return address
//!   16  u64 TSC                   |     u64 TSC at entry
//!                                 |     u64 RFLAGS at entry
//!   24  u32 pid, u32 tgid, u8[16] comm  u64 each selected register at entry
//!   ..  u64 RFLAGS                |     u64 each selected stack word at entry
//!   ..  u64 each selected register, by number
//!   ..  u64 each selected stack word
//! ```

use super::BuildError;
use crate::Gva;
use crate::regs::{Gpr, RegisterSet, Regs};

/// The size of a cell in bytes: a cache line.
pub const CELL: usize = 64;
/// The most cells a record has.
pub const MAX_RECORD_CELLS: u16 = 16;
/// The most stack words of one capture.
pub const STACK_WORDS_MAX: usize = 31;

/// Where the fields that every record begins with are.
pub(super) const SOURCE: usize = 8;
pub(super) const CPU: usize = 12;
pub(super) const TSC: u8 = 16;
/// How many bits of the word at [`SOURCE`] tell the source; the others tell the number of cells.
const SOURCE_BITS: u32 = 24;
const FIXED: usize = 24;
/// The size of pid, tgid and comm.
const TASK: usize = 24;
/// The length of a task's name (`TASK_COMM_LEN`).
const COMM: usize = 16;

/// A ring, as the guest addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The counter of cells reserved (u64).
    pub head: Gva,
    /// What the counter must not pass (u64).
    pub limit: Gva,
    /// What the counter passes when the doorbell rings (u64).
    pub bell: Gva,
    /// The first cell.
    pub cells: Gva,
    /// How many cells there are, without the spare ones: a power of two.
    pub capacity: u32,
    /// How many cells are in use when the doorbell rings.
    pub watermark: u32,
    /// The port that is written to when a record passes the watermark.
    pub doorbell_port: u8,
}

/// What a record holds beside source, time and flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// Registers, as they are at the probepoint.
    pub registers: RegisterSet,
    /// Words above the stack pointer, by their number (`$stackN`).
    pub stack: Vec<u16>,
    /// The current task.
    pub task: Option<TaskFields>,
    /// Displacement, relative to the base of GS and sign-extended, of the CPU's number (i32).
    pub cpu: Option<u32>,
}

/// Where the current task and what is recorded of it are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskFields {
    /// Displacement, relative to the base of GS and sign-extended, of the pointer to the current
    /// task.
    pub current: u32,
    /// Offset in the task of its pid (i32).
    pub pid: i32,
    /// Offset in the task of its thread group's id (i32).
    pub tgid: i32,
    /// Offset in the task of its name (16 bytes).
    pub comm: i32,
}

/// Where flags, registers and stack words are, in that order: in a record, or in an instance of a
/// return probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Values {
    at: usize,
    registers: RegisterSet,
    words: usize,
}

impl Values {
    pub(super) fn new(
        at: usize,
        registers: RegisterSet,
        stack: &[u16],
    ) -> Result<Self, BuildError> {
        let words = stack.len();
        if words > STACK_WORDS_MAX {
            return Err(BuildError::TooManyWords { count: words });
        }
        Ok(Self {
            at,
            registers,
            words,
        })
    }

    /// Offset of the flags.
    pub(super) fn flags(&self) -> usize {
        self.at
    }

    /// The registers with the offset of each.
    pub(super) fn registers(&self) -> impl Iterator<Item = (Gpr, usize)> {
        let first = self.at + 8;
        self.registers
            .iter()
            .zip((0..).map(move |index| first + 8 * index))
    }

    /// Offsets of the stack words.
    pub(super) fn words(&self) -> impl Iterator<Item = usize> {
        let first = self.at + 8 + 8 * self.registers.iter().count();
        (0..self.words).map(move |index| first + 8 * index)
    }

    /// Offset of what follows.
    pub(super) fn end(&self) -> usize {
        self.at + 8 * (1 + self.registers.iter().count() + self.words)
    }

    /// Gives `put` the place and the value of the flags and of each register.
    pub(super) fn write(&self, regs: &Regs, mut put: impl FnMut(usize, u64)) {
        put(self.flags(), regs.rflags);
        for (register, at) in self.registers() {
            put(at, regs.get(register));
        }
    }

    pub(super) fn read(&self, bytes: &[u8]) -> Result<(Regs, StackWords), Malformed> {
        let mut regs = Regs {
            rflags: word(bytes, self.flags())?,
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

/// What follows the values of a return's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallLayout {
    pub(super) id: usize,
    pub(super) return_address: usize,
    pub(super) entry_tsc: usize,
    /// As at entry.
    pub(super) values: Values,
}

/// Where everything is in the records of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    has_cpu: bool,
    /// Offset of the pid.
    task: Option<usize>,
    values: Values,
    call: Option<CallLayout>,
    size: usize,
}

/// What every record begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The record's position, in cells since the ring began.
    pub position: u64,
    /// What made it.
    pub source: u32,
    /// How many cells it takes: from 1 to [`MAX_RECORD_CELLS`].
    pub cells: u16,
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its position, in cells since the ring began.
    pub position: u64,
    /// What made it.
    pub source: u32,
    /// The CPU's number, if it was captured.
    pub cpu: Option<u32>,
    /// The guest's time stamp counter.
    pub tsc: u64,
    /// The current task, if it was captured.
    pub task: Option<Task>,
    /// Flags, and the registers that were captured; the others, and RIP, are zero. A return's RSP is
    /// that after the return.
    pub regs: Regs,
    /// The stack words that were captured, in the order they were asked for.
    pub stack: StackWords,
    /// For a return: the call it ends.
    pub call: Option<Call>,
}

/// A task at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its pid.
    pub pid: u32,
    /// Its thread group's id.
    pub tgid: u32,
    /// Its name, up to the first zero.
    pub comm: [u8; COMM],
}

/// The call that a return ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Names the call: bit 63 set, the stub's number from bit 40 on, and how often the instance was
    /// used (modulo 2^40).
    pub id: u64,
    /// Where the function returns to: what was found on the stack at entry, which is another stub if
    /// another return probe had come first.
    pub return_address: Gva,
    /// The time stamp counter at entry.
    pub tsc: u64,
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
    /// The words, in the order they were asked for.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

/// Why bytes are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They end too early.
    #[error("{have} bytes where at least {want} belong")]
    Short {
        /// How many there are.
        have: usize,
        /// How many are needed.
        want: usize,
    },
    /// Not published.
    #[error("the record at this place is not complete")]
    Unpublished,
    /// A size that no record, or no record of this source, has.
    #[error("a record of {found} cells where one of {want} belongs")]
    Cells {
        /// What the record says.
        found: u16,
        /// What is possible.
        want: u16,
    },
}

impl Header {
    /// Reads what `bytes`, the first cell of a record, begins with.
    ///
    /// # Errors
    /// When that is no published record.
    pub fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        let end = word(bytes, 0)?;
        if end == 0 {
            return Err(Malformed::Unpublished);
        }
        let [source @ .., cells] = array::<4>(bytes, SOURCE)?;
        let cells = u16::from(cells);
        if cells == 0 || cells > MAX_RECORD_CELLS {
            return Err(Malformed::Cells {
                found: cells,
                want: MAX_RECORD_CELLS,
            });
        }
        let [a, b, c] = source;
        Ok(Self {
            position: end.wrapping_sub(cells.into()),
            source: u32::from_le_bytes([a, b, c, 0]),
            cells,
        })
    }

    /// The word that tells both, of a record with so many cells.
    ///
    /// # Errors
    /// When no record can name the source.
    pub(super) fn identity(source: u32, cells: u16) -> Result<u32, BuildError> {
        if source >> SOURCE_BITS != 0 {
            return Err(BuildError::Source { number: source });
        }
        Ok(source | u32::from(cells) << SOURCE_BITS)
    }
}

impl Layout {
    /// The layout of records with this content.
    ///
    /// # Errors
    /// When more was asked for than a record holds.
    pub fn new(capture: &Capture) -> Result<Self, BuildError> {
        let task = capture.task.is_some().then_some(FIXED);
        let at = FIXED + task.map_or(0, |_| TASK);
        let values = Values::new(at, capture.registers, &capture.stack)?;
        Ok(Self {
            has_cpu: capture.cpu.is_some(),
            task,
            values,
            call: None,
            size: values.end(),
        })
    }

    /// The layout of the records of returns: `capture` at the return, and what was kept at entry.
    ///
    /// # Errors
    /// When more was asked for than a record holds, or what cannot be had.
    pub fn of_return(capture: &Capture, entry: &super::EntryCapture) -> Result<Self, BuildError> {
        if !capture.stack.is_empty() {
            return Err(BuildError::StackAtReturn);
        }
        let plain = Self::new(capture)?;
        let id = plain.size;
        let values = Values::new(id + 24, entry.registers, &entry.stack)?;
        Ok(Self {
            call: Some(CallLayout {
                id,
                return_address: id + 8,
                entry_tsc: id + 16,
                values,
            }),
            size: values.end(),
            ..plain
        })
    }

    /// The size of a record in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// How many cells a record takes.
    #[must_use]
    pub fn cells(&self) -> u16 {
        // At most 592 bytes: of a return, with all registers twice and all stack words.
        u16::try_from(self.size.div_ceil(CELL)).unwrap_or(MAX_RECORD_CELLS)
    }

    pub(super) fn task(&self) -> Option<usize> {
        self.task
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    pub(super) fn call(&self) -> Option<&CallLayout> {
        self.call.as_ref()
    }

    /// Reads a record, which `bytes` begins with. Hit path: no allocation.
    ///
    /// # Errors
    /// When `bytes` is no published record of this layout.
    pub fn decode(&self, bytes: &[u8]) -> Result<Record, Malformed> {
        let header = Header::read(bytes)?;
        if header.cells != self.cells() {
            return Err(Malformed::Cells {
                found: header.cells,
                want: self.cells(),
            });
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
                id: word(bytes, call.id)?,
                return_address: Gva(word(bytes, call.return_address)?),
                tsc: word(bytes, call.entry_tsc)?,
                regs,
                stack,
            })
        });
        let (regs, stack) = self.values.read(bytes)?;
        let cpu = u32::from_le_bytes(array(bytes, CPU)?);
        Ok(Record {
            position: header.position,
            source: header.source,
            cpu: self.has_cpu.then_some(cpu),
            tsc: word(bytes, usize::from(TSC))?,
            task: task.transpose()?,
            regs,
            stack,
            call: call.transpose()?,
        })
    }
}

/// The `N` bytes at `at`.
fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Malformed> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .ok_or(Malformed::Short {
            have: bytes.len(),
            want: at + N,
        })
}

/// The word at `at`.
pub(super) fn word(bytes: &[u8], at: usize) -> Result<u64, Malformed> {
    array(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests;
