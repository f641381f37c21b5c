//! The instances of a return probe: what is kept of each call in flight, in memory that the guest's
//! code and the host share.
//!
//! ```text
//!   free ──▶ taken ──▶ in flight ──▶ free
//!       pop       slot set     slot zero, push
//! ```
//!
//! Kept true: an instance is on the free list or belongs to one call; while its *slot* is not zero,
//! the function was entered and has not returned, and the word at the slot is the instance's stub,
//! but for the few instructions of the detour that are about to put it there. The *generation*
//! counts the uses, and is never reset.
//!
//! Its first word is used for both states: while it is free, the lower half is the index of the next free one; while
//! a call is in flight, it is where the function really returns to, whatever stubs it was found behind.
//!
//! The free list is a word, the index of the first free instance and, above, a tag that changes
//! whenever an instance is put back. One that was taken is first again only after it was put back, so
//! an exchange that was overtaken fails. Each free instance holds the index of the next.

use super::capture::EntryCapture;
use super::cells::{CELL, Malformed, Spread, word};
use super::error::BuildError;
use super::record::{StackWords, Values};
use crate::Gva;
use crate::regs::Regs;

/// The end of the free list.
pub(super) const NIL: u32 = u32::MAX;
/// Offsets in an instance.
pub(super) const NEXT: u8 = 0;
pub(super) const CALLER: u8 = NEXT;
pub(super) const GENERATION: usize = 8;
pub(super) const RETURN: usize = 16;
pub(super) const SLOT: usize = 24;
pub(super) const TASK: usize = 32;
pub(super) const ENTRY_TSC: u8 = 40;
/// The word of the flags, in whose upper half the CPU is.
const VALUES: usize = 6;
pub(super) const ENTRY_CPU: usize = 8 * VALUES + 4;
/// The end of the flags and of all registers.
const VALUES_END: usize = 8 * (VALUES + 1 + 16);
/// The most bytes that an instance without stack words has behind its first word.
pub const ENTERED_MAX: usize = VALUES_END - GENERATION;

/// The instances of one probe, as the guest addresses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instances {
    /// The first of them.
    pub at: Gva,
    /// How many there are.
    pub count: u32,
    /// The free list's word.
    pub free: Gva,
}

/// Where everything is in an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceLayout {
    values: Values,
    has_cpu: bool,
    stride: usize,
}

/// An instance, as the host reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Where the function really returns to, unless what was found at the slot was the stub of a probe of another
    /// function: then that.
    pub caller: Gva,
    /// How often it was used.
    pub generation: u64,
    /// Where the call returns to: what was found at the slot.
    pub return_address: Gva,
    /// Where on the stack the return address belongs; zero while no call is in flight.
    pub slot: Gva,
    /// The pointer to the task that made the call.
    pub task: Gva,
    /// The time stamp counter at entry.
    pub tsc: u64,
    /// The number of the CPU at entry, whose counter that is, or [`BY_HOST`](super::BY_HOST).
    pub cpu: Option<u32>,
    /// Flags and captured registers at entry; the others, and RIP, are zero.
    pub regs: Regs,
    /// Stack words captured at entry.
    pub stack: StackWords,
}

impl InstanceLayout {
    /// Where the next free instance's index is: the lower half of a word.
    pub const NEXT: u64 = NEXT as u64;
    /// Where it is, in its place, whither the function of a call in flight returns.
    pub const CALLER: u64 = CALLER as u64;
    /// Where the count of its uses is.
    pub const GENERATION: u64 = GENERATION as u64;
    /// Where the return address is that was found at the slot.
    pub const RETURN: u64 = RETURN as u64;
    /// Where the slot's address is.
    pub const SLOT: u64 = SLOT as u64;
    /// Where the task is.
    pub const TASK: u64 = TASK as u64;
    /// Where the time of the entry is, which is written before the return address.
    pub const ENTRY_TSC: u64 = ENTRY_TSC as u64;
    /// Where the number of the CPU is, or [`BY_HOST`](super::BY_HOST): the upper half of a word.
    pub const ENTRY_CPU: u64 = 8 * VALUES as u64;

    /// The layout of instances with this content.
    ///
    /// # Errors
    /// When more was asked for than an instance holds.
    pub fn new(capture: &EntryCapture) -> Result<Self, BuildError> {
        let values = Values::new(Spread::Dense, VALUES, capture.registers, &capture.stack)?;
        let size = Spread::Dense.offset(values.end());
        Ok(Self {
            values,
            has_cpu: capture.cpu.is_some(),
            stride: size.next_power_of_two().max(CELL),
        })
    }

    /// How many bytes an instance has.
    fn size(&self) -> usize {
        Spread::Dense.offset(self.values.end())
    }

    /// The distance between instances in bytes: a power of two, at least a cache line.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    /// What `count` instances are before the first call, which were used `generation` times, and the word of their
    /// free list.
    #[must_use]
    pub fn initial(&self, count: u32, generation: u64) -> (Vec<u8>, u64) {
        let mut bytes = Vec::new();
        for index in 0..count {
            let next = if index + 1 < count { index + 1 } else { NIL };
            let end = bytes.len() + self.stride();
            bytes.extend(u64::from(next).to_le_bytes());
            bytes.extend(generation.to_le_bytes());
            bytes.resize(end, 0);
        }
        (bytes, if count == 0 { u64::from(NIL) } else { 0 })
    }

    /// What an instance whose call begins holds from [`Self::GENERATION`] on, and how many bytes that
    /// is. The caller comes before. Without stack words, and with a slot that is zero: it is set last.
    #[must_use]
    pub fn entered(&self, instance: &Instance) -> ([u8; ENTERED_MAX], usize) {
        let mut bytes = [0; ENTERED_MAX];
        let mut put = |at: usize, word: u64| {
            let at = at - GENERATION;
            if let Some(into) = bytes.get_mut(at..at + 8) {
                into.copy_from_slice(&word.to_le_bytes());
            }
        };
        put(GENERATION, instance.generation);
        put(RETURN, instance.return_address.0);
        put(TASK, instance.task.0);
        put(usize::from(ENTRY_TSC), instance.tsc);
        self.values.write(&instance.regs, &mut put);
        let flags = instance.regs.rflags & u64::from(u32::MAX);
        let cpu = u64::from(instance.cpu.unwrap_or(0));
        put(self.values.flags(), cpu << 32 | flags);
        (bytes, self.size().min(VALUES_END) - GENERATION)
    }

    /// Reads an instance, which `bytes` begins with.
    ///
    /// # Errors
    /// When there are too few bytes.
    pub fn read(&self, bytes: &[u8]) -> Result<Instance, Malformed> {
        let (regs, stack) = self.values.read(bytes)?;
        Ok(Instance {
            caller: Gva(word(bytes, usize::from(CALLER))?),
            generation: word(bytes, GENERATION)?,
            return_address: Gva(word(bytes, RETURN)?),
            slot: Gva(word(bytes, SLOT)?),
            task: Gva(word(bytes, TASK)?),
            tsc: word(bytes, usize::from(ENTRY_TSC))?,
            cpu: self.values.cpu(bytes, self.has_cpu)?,
            regs,
            stack,
        })
    }
}
