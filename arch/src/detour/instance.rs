//! Instances of a return probe: the data of each call in flight, in memory that the guest's code and the host
//! share.
//!
//! ```text
//!   free ──▶ taken ──▶ in flight ──▶ free
//!       pop       slot set     slot zero, push
//! ```
//!
//! Invariants: an instance is on the free list or belongs to one call. While its *slot* is not zero, the function
//! was entered and has not returned. Then the stack word at the slot is the address of the instance's stub, or of
//! the stub of another probe that found the instance's stub there. (The detour sets the slot first, and writes that
//! stack word a few instructions later.) The *generation* counts the uses of the instance and is never reset.
//!
//! The first word has two uses. While the instance is free, its lower half is the index of the next free instance.
//! While a call is in flight, it is the address to which the function really returns, even if the stub of another
//! probe was found in place of that address ([`Instance::caller`]).
//!
//! The free list is one word: the index of the first free instance in the lower half, and in the upper half a tag
//! that changes whenever an instance is put back. Each free instance holds the index of the next. An instance that
//! was taken can only be first again after it was put back, and that changes the tag. So an exchange fails if the
//! list has changed since its word was read.

use super::capture::EntryCapture;
use super::cells::{CELL, Malformed, Spread, word};
use super::error::BuildError;
use super::record::{StackWords, Values};
use crate::Gva;
use crate::regs::Regs;

/// Index that ends the free list.
pub(super) const NIL: u32 = u32::MAX;
/// Offsets in an instance.
pub(super) const NEXT: u8 = 0;
pub(super) const CALLER: u8 = NEXT;
pub(super) const GENERATION: usize = 8;
pub(super) const RETURN: usize = 16;
pub(super) const SLOT: usize = 24;
pub(super) const TASK: usize = 32;
pub(super) const ENTRY_TSC: u8 = 40;
/// Number of the word that holds the flags and, in its upper half, the CPU's number.
const VALUES: usize = 6;
/// Offset of the first register.
const REGISTERS: usize = 8 * (VALUES + 1);
/// Offset of the end of the flags and registers, if all registers are captured.
const VALUES_END: usize = 8 * (VALUES + 1 + 16);
/// Maximum number of bytes of an instance without stack words.
pub const ENTERED_MAX: usize = VALUES_END;

/// Instances of one probe, at their guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instances {
    /// Address of the first instance.
    pub at: Gva,
    /// Number of instances.
    pub count: u32,
    /// Address of the free list's word.
    pub free: Gva,
}

/// Layout of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceLayout {
    values: Values,
    has_cpu: bool,
    stride: usize,
}

/// An instance, as the host reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The address to which the function really returns. If the stub of another function's probe was found at the
    /// slot, as after a tail call, this may be the address of that stub.
    pub caller: Gva,
    /// Number of times the instance was used, including this call.
    pub generation: u64,
    /// The return address that was found at the slot.
    pub return_address: Gva,
    /// Address of the return address on the stack; zero while no call is in flight.
    pub slot: Gva,
    /// The pointer to the task that made the call.
    pub task: Gva,
    /// The time stamp counter at entry.
    pub tsc: u64,
    /// Number of the CPU at entry, if it was captured; `tsc` is that CPU's counter. [`BY_HOST`](super::BY_HOST) if
    /// the host served the entry.
    pub cpu: Option<u32>,
    /// Flags and captured registers at entry; the others, and RIP, are zero.
    pub regs: Regs,
    /// Stack words captured at entry.
    pub stack: StackWords,
}

impl InstanceLayout {
    /// Offset of the index of the next free instance, in the lower half of a word.
    pub const NEXT: u64 = NEXT as u64;
    /// Offset of the address to which a call in flight really returns. It is in the same word as [`Self::NEXT`].
    pub const CALLER: u64 = CALLER as u64;
    /// Offset of the count of uses.
    pub const GENERATION: u64 = GENERATION as u64;
    /// Offset of the return address that was found at the slot.
    pub const RETURN: u64 = RETURN as u64;
    /// Offset of the slot's address.
    pub const SLOT: u64 = SLOT as u64;
    /// Offset of the task.
    pub const TASK: u64 = TASK as u64;
    /// Offset of the time at entry. It is written before the return address.
    pub const ENTRY_TSC: u64 = ENTRY_TSC as u64;
    /// Offset of the word whose upper half is the CPU's number, or [`BY_HOST`](super::BY_HOST).
    pub const ENTRY_CPU: u64 = 8 * VALUES as u64;

    /// Computes the layout of instances that hold `capture`.
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

    /// Returns the size of an instance in bytes.
    fn size(&self) -> usize {
        Spread::Dense.offset(self.values.end())
    }

    /// Returns the distance between instances in bytes: a power of two, at least a cache line.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    /// Returns the initial bytes of `count` instances, all of them free, and the word of their free list.
    /// `generation` is the number of uses that each instance had before.
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

    /// Returns the content of an instance for a call that begins, and its length in bytes, without stack words. The
    /// call is the `generation`th use of the instance. The return address and the slot are zero, because they are
    /// written last.
    #[must_use]
    pub fn entered(&self, instance: &Instance, generation: u64) -> ([u8; ENTERED_MAX], usize) {
        let mut bytes = [0; ENTERED_MAX];
        let mut put = |at: usize, word: u64| {
            if let Some(into) = bytes.get_mut(at..at + 8) {
                into.copy_from_slice(&word.to_le_bytes());
            }
        };
        put(usize::from(CALLER), instance.caller.0);
        put(GENERATION, generation);
        put(TASK, instance.task.0);
        put(usize::from(ENTRY_TSC), instance.tsc);
        let flags = instance.regs.rflags & u64::from(u32::MAX);
        let cpu = u64::from(instance.cpu.unwrap_or(0));
        put(self.values.flags(), cpu << 32 | flags);
        let words = bytes[REGISTERS..].chunks_exact_mut(8);
        for (register, into) in self.values.set().iter().zip(words) {
            into.copy_from_slice(&instance.regs.get(register).to_le_bytes());
        }
        (bytes, self.size().min(VALUES_END))
    }

    /// Reads the instance at the beginning of `bytes`.
    ///
    /// # Errors
    /// When `bytes` is too short.
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
