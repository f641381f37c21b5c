//! The record of one call in flight: a run of 64-bit words.
//!
//! Invariant: a record is either free, and then belongs to its pool, or in the list of one task, and then only
//! the thread that has that task open accesses it. Its words are therefore read and written with `Relaxed`; the
//! task's cell or the pool's head orders the next holder after the last one. The one exception is
//! [`Record::next`], which a thread that is about to lose the race for a free record may read at any time; it
//! discards what it read.

use hvprobe_arch::{Gva, Regs};

use crate::atomics::{AtomicU64, Ordering};

/// Maximum size of an instance's private data, in bytes.
pub const DATA_MAX: usize = 256;

/// Data that is remembered of a call: the arguments of [`TaskCalls::push`](super::TaskCalls::push).
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Identifies the call; entry and return event carry it.
    pub id: u64,
    /// Address of the return address on the stack.
    pub slot: Gva,
    /// The real return address, from [`TaskCalls::enter`](super::TaskCalls::enter).
    pub ret: Gva,
    /// Host time of the entry, nanoseconds of `CLOCK_MONOTONIC`.
    pub host_ns: u64,
    /// The guest's time-stamp counter at the entry.
    pub guest_tsc: u64,
    /// The registers at the entry.
    pub regs: &'a Regs,
    /// Private data; what exceeds the pool's data size is not kept.
    pub data: &'a [u8],
}

const NEXT: usize = 0;
const SLOT: usize = 1;
const RET: usize = 2;
const ID: usize = 3;
const HOST_NS: usize = 4;
const GUEST_TSC: usize = 5;
/// Length of the data, and [`MUTED`].
const META: usize = 6;
const REGS: usize = 7;
const DATA: usize = REGS + Regs::COUNT;

const MUTED: u64 = 1 << 63;

/// Returns the number of words of a record with `data_words` words of private data.
pub(super) const fn words(data_words: usize) -> usize {
    DATA + data_words
}

/// The words of one record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record<'a> {
    head: &'a [AtomicU64; DATA],
    data: &'a [AtomicU64],
}

impl<'a> Record<'a> {
    /// Returns the record in `words`, which must be as many words as the function [`words`] returns.
    pub(super) fn new(words: &'a [AtomicU64]) -> Option<Self> {
        let (head, data) = words.split_first_chunk()?;
        Some(Self { head, data })
    }

    fn get(self, word: usize) -> u64 {
        self.head[word].load(Ordering::Relaxed)
    }

    fn put(self, word: usize, value: u64) {
        self.head[word].store(value, Ordering::Relaxed);
    }

    /// Returns the link to the next record of the list that this one is in.
    pub(super) fn next(self) -> u64 {
        self.get(NEXT)
    }

    pub(super) fn set_next(self, next: u64) {
        self.put(NEXT, next);
    }

    pub(super) fn slot(self) -> Gva {
        Gva(self.get(SLOT))
    }

    pub(super) fn ret(self) -> Gva {
        Gva(self.get(RET))
    }

    pub(super) fn id(self) -> u64 {
        self.get(ID)
    }

    pub(super) fn host_ns(self) -> u64 {
        self.get(HOST_NS)
    }

    pub(super) fn guest_tsc(self) -> u64 {
        self.get(GUEST_TSC)
    }

    /// Returns whether the probe has left, so that this call is not reported.
    pub(super) fn muted(self) -> bool {
        self.get(META) & MUTED != 0
    }

    pub(super) fn mute(self) {
        self.put(META, self.get(META) | MUTED);
    }

    #[inline]
    pub(super) fn write(self, entry: &Entry<'_>) {
        self.put(SLOT, entry.slot.0);
        self.put(RET, entry.ret.0);
        self.put(ID, entry.id);
        self.put(HOST_NS, entry.host_ns);
        self.put(GUEST_TSC, entry.guest_tsc);
        for (word, value) in (REGS..).zip(entry.regs.words()) {
            self.put(word, *value);
        }
        let kept = entry.data.len().min(self.data.len() * 8);
        self.put(META, kept as u64);
        for (word, chunk) in self.data.iter().zip(entry.data[..kept].chunks(8)) {
            let mut raw = [0; 8];
            raw[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(raw), Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn regs(self) -> Regs {
        let mut words = [0; Regs::COUNT];
        for (word, at) in words.iter_mut().zip(REGS..) {
            *word = self.get(at);
        }
        Regs::from_words(words)
    }

    pub(super) fn data(self, into: &mut [u8; DATA_MAX]) -> &[u8] {
        let room = self.data.len() * 8;
        let len =
            usize::try_from(self.get(META) & !MUTED).map_or(0, |len| len.min(room).min(DATA_MAX));
        for (word, chunk) in self.data.iter().zip(into[..len].chunks_mut(8)) {
            let word = word.load(Ordering::Relaxed);
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
        &into[..len]
    }
}
