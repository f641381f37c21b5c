//! The instances of one return probe.
//!
//! Invariant: every record of a pool is either in its free list or in the list of exactly one task, and the pool's
//! head counts those in lists. The free list is a stack of record numbers whose head is one word:
//!
//! ```text
//!  63            34 33      17 16       0
//! [     tag        |  in use  |  newest  ]    newest: number of the first free record + 1, or 0
//! ```
//!
//! Every change increments the tag. So a head that was read and compares equal later is the same head, unless
//! exactly 2^30 changes happened between a load and the exchange that follows it.
//!
//! The records lie in segments that double in size and stay until the table of calls is dropped. A pool whose
//! probe has left is used again, for a later probe with the same data size, once its last call has ended.

use std::sync::{Arc, OnceLock, PoisonError};

use hvprobe_spec::ProbeId;

use super::record::{DATA_MAX, Record, words};
use crate::atomics::{AtomicU64, FIRST_LOG2, Mutex, MutexGuard, Ordering};

/// Maximum number of instances of an [`MaxActive::Auto`] pool.
pub const AUTO_MAX: u32 = 1 << 16;
/// Maximum number of instances that can be requested (`KRETPROBE_MAXACTIVE_MAX` in kernel/trace/trace_kprobe.c).
pub const FIXED_MAX: u32 = 4096;

/// Maximum number of calls of one function in flight; further calls are missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaxActive {
    /// This many, at most [`FIXED_MAX`]; 0 stands for the default.
    Fixed(u32),
    /// The default of kprobes: the larger of 10 and twice the number of vCPUs.
    #[default]
    Default,
    /// As many as are needed, up to [`AUTO_MAX`].
    Auto,
}

/// Locks `mutex`, even if a holder panicked. Such a holder has left nothing half done: what the locks of this
/// module guard is published by one store at the end.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Length of the first segment.
const FIRST: u32 = 1 << FIRST_LOG2;
/// Number of segments that hold `AUTO_MAX` elements together.
const SEGMENTS: usize = (AUTO_MAX.trailing_zeros() - FIRST_LOG2 + 1) as usize;

/// Returns the segment that holds element `index`, and the element's position in it.
fn locate(index: u32) -> (usize, usize) {
    let doublings = (index >> FIRST_LOG2).checked_ilog2().map_or(0, |n| n + 1);
    let start = if doublings == 0 {
        0
    } else {
        FIRST << (doublings - 1)
    };
    (doublings as usize, (index - start) as usize)
}

/// Returns the number of elements in the segments before `segment`.
fn start_of(segment: usize) -> u32 {
    if segment == 0 {
        0
    } else {
        FIRST << (segment - 1)
    }
}

/// Elements that are never moved nor freed, in segments that double in size.
#[derive(Debug)]
struct Segments<T>([OnceLock<Box<[T]>>; SEGMENTS]);

impl<T> Segments<T> {
    fn new() -> Self {
        Self(std::array::from_fn(|_| OnceLock::new()))
    }
}

const NEWEST_BITS: u32 = 17;
const FIELD: u64 = (1 << NEWEST_BITS) - 1;
const TAG_SHIFT: u32 = 2 * NEWEST_BITS;

/// The head word of a free list.
#[derive(Clone, Copy)]
struct Head(u64);

impl Head {
    /// Returns the number of the first free record + 1, or 0.
    fn newest(self) -> u64 {
        self.0 & FIELD
    }

    fn in_use(self) -> u64 {
        self.0 >> NEWEST_BITS & FIELD
    }

    /// Returns the head after this one, with the next tag.
    fn then(self, newest: u64, in_use: u64) -> Self {
        let tag = (self.0 >> TAG_SHIFT).wrapping_add(1);
        Self(tag << TAG_SHIFT | (in_use & FIELD) << NEWEST_BITS | newest & FIELD)
    }
}

/// State that a [`Pool`] and the records of calls in flight share.
#[derive(Debug)]
pub(super) struct PoolCell {
    head: AtomicU64,
    /// Probe id and limit of the current owner; 0 when the probe has left.
    terms: AtomicU64,
    data_words: usize,
    segments: Segments<AtomicU64>,
    /// Number of segments; locked while one is added.
    grown: Mutex<usize>,
}

impl PoolCell {
    fn new(data_words: usize) -> Self {
        Self {
            head: AtomicU64::new(0),
            terms: AtomicU64::new(0),
            data_words,
            segments: Segments::new(),
            grown: Mutex::new(0),
        }
    }

    /// Returns the probe that the pool belongs to; `None` once it has left.
    pub(super) fn probe(&self) -> Option<ProbeId> {
        let terms = self.terms.load(Ordering::Acquire);
        (terms != 0).then(|| ProbeId(high(terms)))
    }

    fn in_use(&self) -> u32 {
        low(Head(self.head.load(Ordering::Acquire)).in_use())
    }

    /// Returns the record `index`, which must have come from this pool.
    pub(super) fn record(&self, index: u32) -> Option<Record<'_>> {
        let (segment, offset) = locate(index);
        let stride = words(self.data_words);
        let start = offset.checked_mul(stride)?;
        let words = self.segments.0.get(segment)?.get()?;
        Record::new(words.get(start..start + stride)?)
    }

    /// Takes a free record. Hot path: no lock and no allocation, unless the pool has to grow.
    pub(super) fn take(&self) -> Option<(u32, Record<'_>)> {
        let limit = u64::from(low(self.terms.load(Ordering::Acquire)));
        let mut head = Head(self.head.load(Ordering::Acquire));
        loop {
            if head.in_use() >= limit {
                return None;
            }
            let Some(index) = head.newest().checked_sub(1).map(low) else {
                if !self.grow(true) {
                    return None;
                }
                head = Head(self.head.load(Ordering::Acquire));
                continue;
            };
            let record = self.record(index)?;
            // The link is wrong if the record was taken meanwhile, but then the exchange fails.
            let then = head.then(record.next(), head.in_use() + 1);
            match self.head.compare_exchange_weak(
                head.0,
                then.0,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some((index, record)),
                Err(now) => head = Head(now),
            }
        }
    }

    /// Releases a record that [`PoolCell::take`] returned.
    pub(super) fn release(&self, index: u32, record: Record<'_>) {
        let mut head = Head(self.head.load(Ordering::Relaxed));
        loop {
            record.set_next(head.newest());
            let then = head.then(u64::from(index) + 1, head.in_use().saturating_sub(1));
            match self.head.compare_exchange_weak(
                head.0,
                then.0,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => head = Head(now),
            }
        }
    }

    /// Adds a segment. Returns `false` if the pool has its maximum size. If `if_empty` is set, adds no segment if
    /// there are free records again, because another thread has added a segment meanwhile.
    fn grow(&self, if_empty: bool) -> bool {
        let mut grown = lock(&self.grown);
        if if_empty && Head(self.head.load(Ordering::Acquire)).newest() != 0 {
            return true;
        }
        let Some(place) = self.segments.0.get(*grown) else {
            return false;
        };
        let first = start_of(*grown);
        let count = start_of(*grown + 1) - first;
        let stride = words(self.data_words);
        let segment: Box<[_]> = (0..count as usize * stride)
            .map(|_| AtomicU64::new(0))
            .collect();
        // Only the holder of the lock sets a segment, so this one is empty.
        place.get_or_init(|| segment);
        *grown += 1;
        let last = first + count - 1;
        for index in first..last {
            if let Some(record) = self.record(index) {
                record.set_next(u64::from(index) + 2);
            }
        }
        let Some(last) = self.record(last) else {
            return false;
        };
        let mut head = Head(self.head.load(Ordering::Relaxed));
        loop {
            last.set_next(head.newest());
            let then = head.then(u64::from(first) + 1, head.in_use());
            match self.head.compare_exchange_weak(
                head.0,
                then.0,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => head = Head(now),
            }
        }
    }

    fn capacity(&self) -> u32 {
        start_of(*lock(&self.grown))
    }
}

fn high(word: u64) -> u32 {
    low(word >> 32)
}

/// Returns the low half of `word`.
#[allow(clippy::cast_possible_truncation, reason = "the mask leaves 32 bits")]
fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

/// Position of a record: pool number and record number + 1; 0 is the end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link(pub(super) u64);

impl Link {
    pub(super) const END: Self = Self(0);

    pub(super) fn new(pool: u32, record: u32) -> Self {
        Self(u64::from(pool) << 32 | (u64::from(record) + 1))
    }

    pub(super) fn pool(self) -> u32 {
        high(self.0)
    }

    /// Returns the record's number; `None` at the end of a list.
    pub(super) fn record(self) -> Option<u32> {
        low(self.0).checked_sub(1)
    }
}

/// Why a return probe got no instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// More than [`FIXED_MAX`] instances were requested.
    #[error("maxactive of {0} is more than {FIXED_MAX}; ask for less, or for `auto`")]
    TooManyInstances(u32),
    /// More private data than an instance holds.
    #[error("{0} bytes of private data are more than an instance holds ({DATA_MAX})")]
    TooMuchData(usize),
    /// The maximum number of return probes exists.
    #[error("{AUTO_MAX} return probes exist; remove some before registering more")]
    TooManyPools,
}

/// The instances of one return probe. Dropping the pool ends the probe's claim on them. Calls in flight still
/// return after that, but are not reported.
#[derive(Debug)]
pub struct Pool {
    pub(super) cell: Arc<PoolCell>,
    pub(crate) index: u32,
    left: Arc<Mutex<Vec<u32>>>,
}

impl Pool {
    /// Returns the number of calls in flight.
    #[must_use]
    pub fn active(&self) -> u32 {
        self.cell.in_use()
    }

    /// Returns the maximum number of calls in flight; further calls are missed.
    #[must_use]
    pub fn limit(&self) -> u32 {
        low(self.cell.terms.load(Ordering::Relaxed))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.cell.terms.store(0, Ordering::Release);
        lock(&self.left).push(self.index);
    }
}

/// All pools of a machine.
#[derive(Debug)]
pub(super) struct Pools {
    segments: Segments<OnceLock<Arc<PoolCell>>>,
    /// Number of pools; locked while one is added or gets another owner.
    count: Mutex<u32>,
    /// Pools whose probe has left.
    left: Arc<Mutex<Vec<u32>>>,
}

impl Pools {
    pub(super) fn new() -> Self {
        Self {
            segments: Segments::new(),
            count: Mutex::new(0),
            left: Arc::new(Mutex::new(Vec::new())),
        }
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Arc<PoolCell>> {
        let (segment, offset) = locate(index);
        self.segments.0.get(segment)?.get()?.get(offset)?.get()
    }

    /// Returns the record that `link` leads to, and its pool.
    #[inline]
    pub(super) fn record(&self, link: Link) -> Option<(&PoolCell, Record<'_>)> {
        let index = link.record()?;
        let pool = self.get(link.pool())?;
        Some((pool, pool.record(index)?))
    }

    /// Returns a pool of instances for `probe`. Allocates.
    pub(super) fn open(
        &self,
        probe: ProbeId,
        maxactive: MaxActive,
        vcpus: u32,
        data_size: usize,
    ) -> Result<Pool, PoolError> {
        let (limit, ready) = match maxactive {
            MaxActive::Default | MaxActive::Fixed(0) => {
                let limit = vcpus.saturating_mul(2).clamp(10, FIXED_MAX);
                (limit, limit)
            }
            MaxActive::Fixed(n) if n > FIXED_MAX => return Err(PoolError::TooManyInstances(n)),
            MaxActive::Fixed(n) => (n, n),
            MaxActive::Auto => (AUTO_MAX, 1),
        };
        if data_size > DATA_MAX {
            return Err(PoolError::TooMuchData(data_size));
        }
        // Only a few sizes, so that a pool whose probe has left is likely to suit another.
        let data_words = match data_size {
            0 => 0,
            1..=64 => 8,
            _ => DATA_MAX / 8,
        };
        let mut count = lock(&self.count);
        let (index, cell) = self.unowned(data_words).map_or_else(
            || {
                let index = *count;
                let (segment, offset) = locate(index);
                let place = self
                    .segments
                    .0
                    .get(segment)
                    .ok_or(PoolError::TooManyPools)?;
                let len = start_of(segment + 1) - start_of(segment);
                let segment = place.get_or_init(|| (0..len).map(|_| OnceLock::new()).collect());
                *count += 1;
                let cell = segment[offset].get_or_init(|| Arc::new(PoolCell::new(data_words)));
                Ok((index, cell))
            },
            Ok,
        )?;
        while cell.capacity() < ready && cell.grow(false) {}
        let terms = u64::from(probe.0) << 32 | u64::from(limit);
        cell.terms.store(terms, Ordering::Release);
        Ok(Pool {
            cell: Arc::clone(cell),
            index,
            left: Arc::clone(&self.left),
        })
    }

    /// Takes a pool whose probe has left and that has no call in flight.
    fn unowned(&self, data_words: usize) -> Option<(u32, &Arc<PoolCell>)> {
        let mut left = lock(&self.left);
        let (at, index, cell) = left
            .iter()
            .enumerate()
            .filter_map(|(at, &index)| Some((at, index, self.get(index)?)))
            .find(|(.., cell)| cell.data_words == data_words && cell.in_use() == 0)?;
        left.swap_remove(at);
        Some((index, cell))
    }
}
