//! Relation between the time-stamp counters of the vCPUs and the host's.
//!
//! A vCPU's counter is the host's plus an *offset* of its own. There are two kinds of host:
//!
//! - On most hosts the offset stays constant unless the guest sets its counter. It is learned by reading both
//!   counters whenever the vCPU has parked, and from KVM's samples when they show another offset.
//! - KVM does not trust the counters of some hosts (`kvm_arch_vcpu_load` in arch/x86/kvm/x86.c). There the
//!   guest's counter *stalls* while the vCPU is not in the guest, and KVM advances it when it falls behind
//!   KVM's estimate. So the offset changes at every entry, and any reading by an ioctl is out of date before
//!   the guest runs. But at each change, KVM writes a sample for the guest's kvmclock: a value of the counter
//!   and the moment of that value. The sample is read here, without an ioctl.
//!
//! Invariants: a vCPU that notes an offset never waits. An offset is used only for counter readings for which it
//! may be right. A reading for which no offset is known gets no time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::record::{Stamp, When};
use hvprobe_vm::memory::GuestRam;

use super::kvm_sample::KvmSample;
use super::marks::Marks;
use super::times::{Moment, Times, rdtsc};

/// Number of a vCPU's offsets to keep in each level. The first level has the newest ones, the second level every
/// second of the older ones, the third level every fourth of those that are older still, and so on.
const KEPT: usize = 256;
/// Maximum number of levels.
const LEVELS: usize = 24;
/// How far a computed time may be ahead of the present, in nanoseconds. Times have errors of this size where
/// counters cannot be trusted: KVM reads its two clocks one after the other, and may be interrupted in between.
const AHEAD: u64 = 200_000;
/// Maximum difference, in ticks, of offsets that count as equal: tens of microseconds.
const APART: u64 = 1 << 16;
/// Minimum interval between readings of kvmclock and the host's counter, in ticks: tens of milliseconds.
const RENEW: u64 = 1 << 27;

/// Relation of the VM's kvmclock to the host's counter.
#[derive(Clone)]
pub(crate) struct Kvmclock {
    /// Reads kvmclock, in nanoseconds.
    read: Arc<dyn Fn() -> Option<u64> + Send + Sync>,
    /// The first reading.
    first: Moment,
    /// The last reading.
    last: Moment,
}

impl fmt::Debug for Kvmclock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kvmclock")
            .field("first", &self.first)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

impl Kvmclock {
    /// Creates the relation. `read` reads kvmclock, in nanoseconds.
    pub(crate) fn new(read: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Self {
        let now = Moment::of(&read).unwrap_or_default();
        Self {
            read: Arc::new(read),
            first: now,
            last: now,
        }
    }

    /// Reads kvmclock again, which takes an ioctl of the VM, if the last reading is older than [`RENEW`].
    fn renew(&mut self) {
        if rdtsc().wrapping_sub(self.last.tsc) > RENEW
            && let Some(now) = Moment::of(&*self.read)
        {
            self.last = now;
        }
    }

    /// Returns the value of the host's counter when kvmclock was at `ns`.
    fn tsc_at(&self, ns: u64) -> u64 {
        let ago = self.last.ns.wrapping_sub(ns).cast_signed();
        let ticks = self.last.ticks_in(ago.unsigned_abs(), self.first);
        let ticks = ticks.unwrap_or(0);
        if ago < 0 {
            self.last.tsc.wrapping_add(ticks)
        } else {
            self.last.tsc.wrapping_sub(ticks)
        }
    }
}

/// An offset, and the value of the guest's counter from which it applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Since {
    from: u64,
    offset: u64,
    /// Version of the sample from which the offset comes; `None` if it comes from reading the counter.
    version: Option<u32>,
}

/// Offsets of one vCPU.
#[derive(Debug, Default)]
struct Offsets {
    /// Levels, the newest first; within a level, the oldest offset first.
    levels: Vec<VecDeque<Since>>,
    /// A bit for each level: whether the next offset that leaves the level is dropped.
    forget: u32,
}

impl Offsets {
    /// Drops the offsets that come from reading a counter that seemed not to stall. Offsets from KVM's samples hold
    /// for any counter.
    fn forget_read(&mut self) {
        for level in &mut self.levels {
            level.retain(|since| since.version.is_some());
        }
    }

    fn note(&mut self, since: Since) {
        // After a counter was set back, its past values cannot be distinguished from future ones.
        if self.newest().is_some_and(|last| since.from < last.from) {
            self.levels.clear();
        }
        let mut moved = Some(since);
        for level in 0..LEVELS {
            let Some(since) = moved.take() else {
                return;
            };
            if self.levels.len() == level {
                self.levels.push(VecDeque::new());
            }
            let Some(kept) = self.levels.get_mut(level) else {
                return;
            };
            kept.push_back(since);
            if kept.len() > KEPT {
                self.forget ^= 1 << level;
                let oldest = kept.pop_front();
                moved = oldest.filter(|_| self.forget >> level & 1 == 1);
            }
        }
    }

    fn newest(&self) -> Option<&Since> {
        self.levels.iter().find_map(VecDeque::back)
    }

    /// Returns the offset for a counter reading `tsc`.
    fn at(&self, tsc: u64) -> Option<u64> {
        let (mut before, mut after) = (None, None);
        for level in &self.levels {
            let behind = level.partition_point(|since| since.from <= tsc);
            after = level.get(behind).or(after);
            before = behind.checked_sub(1).and_then(|index| level.get(index));
            if before.is_some() {
                break;
            }
        }
        let offset = match (before, after) {
            (None, None) => return None,
            (Some(only), None) | (None, Some(only)) => only.offset,
            (Some(before), Some(after)) => {
                let next = before.version.map(|version| version.wrapping_add(2));
                // If samples between the two were missed, the nearer of the two applies. A guest's counter may be
                // ahead of KVM's estimate. It loses that lead before the vCPU rests, and has none after the rest.
                let missed = next.is_some() && after.version.is_some() && next != after.version;
                if missed && after.from - tsc <= tsc - before.from {
                    after.offset
                } else {
                    before.offset
                }
            }
        };
        Some(offset)
    }
}

/// Relation of one vCPU's counter to the host's.
pub(crate) struct Relation {
    ram: Arc<GuestRam>,
    /// Address of the word with the head of the ring that detours record into, if there is a ring.
    head: Option<Gpa>,
    /// Marks of hits, if the counter stalls.
    marks: Marks,
    /// Address of KVM's sample. Bit 0 is set if KVM writes samples.
    sample_at: AtomicU64,
    stalls: AtomicBool,
    /// [`KvmSample::noted`] of the newest sample; 0 if there is none.
    noted: AtomicU64,
    /// Version of the last sample whose write did not end while the collector waited for it.
    in_vain: AtomicU32,
    /// The newest offset.
    offset: AtomicU64,
    /// All offsets that are kept. The collector waits for the lock; a vCPU at a hit only tries to take it.
    offsets: Mutex<Offsets>,
}

impl fmt::Debug for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relation")
            .field("stalls", &self.stalls)
            .field("sample_at", &self.sample_at)
            .field("sample", &self.sample())
            .field("newest", &self.lock().newest())
            .finish_non_exhaustive()
    }
}

impl Relation {
    /// Creates the relation. `head` is the address of the word with the head of the ring that detours record into;
    /// `None` if there is no ring.
    pub(crate) fn new(ram: Arc<GuestRam>, head: Option<Gpa>) -> Self {
        Self {
            ram,
            head,
            marks: Marks::default(),
            sample_at: AtomicU64::new(0),
            stalls: AtomicBool::new(false),
            noted: AtomicU64::new(0),
            in_vain: AtomicU32::new(0),
            offset: AtomicU64::new(0),
            offsets: Mutex::default(),
        }
    }

    /// Sets the address of KVM's sample from the value of `MSR_KVM_SYSTEM_TIME_NEW`.
    pub(crate) fn set_sample_at(&self, msr: u64) {
        self.sample_at.store(msr, Ordering::Relaxed);
    }

    /// Notes that the counter stalls, so that offsets from reading it are useless.
    pub(crate) fn set_stalling(&self) {
        self.marks.prepare();
        self.stalls.store(true, Ordering::Relaxed);
        let mut offsets = self.lock();
        offsets.forget_read();
        // The last sample may have been dropped in favour of a reading. Make sure that it is noted again.
        self.noted.store(0, Ordering::Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Offsets> {
        self.offsets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the newest offset; 0 before there is one.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        self.offset.load(Ordering::Relaxed)
    }

    /// Notes the `offset` of a counter that does not stall. It was read when the guest's counter was at `tsc`.
    pub(crate) fn note(&self, tsc: u64, offset: u64) {
        let mut offsets = self.lock();
        offsets.note(Since {
            from: tsc,
            offset,
            version: None,
        });
        self.offset.store(offset, Ordering::Relaxed);
    }

    /// Returns the address of KVM's sample, if KVM writes it.
    fn sample_at(&self) -> Option<Gpa> {
        let at = self.sample_at.load(Ordering::Relaxed);
        (at & 1 == 1).then_some(Gpa(at & !1))
    }

    /// Returns KVM's last sample; `None` while KVM writes it, or if there is none.
    pub(crate) fn sample(&self) -> Option<KvmSample> {
        KvmSample::read(&*self.ram, self.sample_at()?)
    }

    /// Notes `sample`, unless it was noted before. Never waits.
    pub(crate) fn renew(&self, sample: KvmSample, kvmclock: &mut Kvmclock) {
        let Some(offset) = self.news(sample, kvmclock) else {
            return;
        };
        match self.offsets.try_lock() {
            Ok(mut offsets) => self.note_sample(&mut offsets, sample, offset),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.note_sample(&mut poisoned.into_inner(), sample, offset);
            }
            // The collector has the lock, and is about to note the same sample.
            Err(TryLockError::WouldBlock) => self.offset.store(offset, Ordering::Relaxed),
        }
    }

    /// Returns the offset that `sample` gives; `None` if the sample was noted before.
    fn news(&self, sample: KvmSample, kvmclock: &mut Kvmclock) -> Option<u64> {
        if self.noted.load(Ordering::Relaxed) == sample.noted() {
            return None;
        }
        kvmclock.renew();
        Some(sample.tsc.wrapping_sub(kvmclock.tsc_at(sample.ns)))
    }

    fn note_sample(&self, offsets: &mut Offsets, sample: KvmSample, offset: u64) {
        self.noted.store(sample.noted(), Ordering::Relaxed);
        // An offset that comes from reading the counter is more exact than one from a sample.
        let is_known = || {
            let off = offset.wrapping_sub(self.offset()).cast_signed();
            offsets.newest().is_some() && off.unsigned_abs() <= APART
        };
        if !self.stalls.load(Ordering::Relaxed) && is_known() {
            return;
        }
        // Another thread may have noted this sample, or a later one, meanwhile.
        let is_newer = |newest: &Since| {
            let behind = newest
                .version
                .map(|noted| sample.version.wrapping_sub(noted).cast_signed());
            behind.is_none_or(|behind| behind > 0) || sample.tsc < newest.from
        };
        if offsets.newest().is_none_or(is_newer) {
            offsets.note(Since {
                from: sample.tsc,
                offset,
                version: Some(sample.version),
            });
            self.offset.store(offset, Ordering::Relaxed);
        }
    }

    /// Notes that a hit at `ns` took an exit. Only for a vCPU whose counter stalls.
    pub(crate) fn mark(&self, ns: u64) {
        // If there is no head to read, there are no records to be ordered.
        if let Some(head) = self.head.and_then(|head| self.ram.read_u64(head).ok()) {
            self.marks.note(head, ns);
        }
    }

    /// Returns `ns`, limited to the times that are possible for this vCPU's record at `position`.
    fn between(&self, position: u64, ns: u64) -> u64 {
        match self.stalls.load(Ordering::Relaxed) {
            true => self.marks.between(position, ns),
            false => ns,
        }
    }

    /// Returns the offset for a recent reading `tsc` of the counter; `None` if it is not known.
    fn offset_at(&self, tsc: u64, kvmclock: &mut Kvmclock) -> Option<u64> {
        let place = self.sample_at();
        let sample = place.and_then(|at| KvmSample::read_soon(&*self.ram, at, &self.in_vain));
        let news = sample.and_then(|sample| Some((sample, self.news(sample, kvmclock)?)));
        let mut offsets = self.lock();
        if let Some((sample, offset)) = news {
            self.note_sample(&mut offsets, sample, offset);
        }
        // A counter that stalls may have had other offsets since the newest known one. Only KVM's samples show
        // them.
        let is_past = |newest: &Since| tsc < newest.from;
        if sample.is_none()
            && self.stalls.load(Ordering::Relaxed)
            && !offsets.newest().is_some_and(is_past)
        {
            return None;
        }
        offsets.at(tsc)
    }
}

/// Computes the times of records from the guest's counters that they contain. Used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Timeline {
    times: Arc<Times>,
    relations: Box<[Arc<Relation>]>,
    kvmclock: Mutex<Kvmclock>,
    /// Whether the warning about unknown times has been logged.
    has_warned: AtomicBool,
}

impl Timeline {
    pub(crate) fn new(
        times: Arc<Times>,
        relations: Box<[Arc<Relation>]>,
        kvmclock: Kvmclock,
    ) -> Self {
        Self {
            times,
            relations,
            kvmclock: Mutex::new(kvmclock),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns a function that converts a record's stamp to host time.
    pub(crate) fn now(&self) -> impl Fn(Stamp) -> When {
        self.times.adjust();
        let line = self.times.line();
        move |Stamp { cpu, tsc, position }| {
            let mut kvmclock = self.kvmclock.lock().unwrap_or_else(PoisonError::into_inner);
            let relation = cpu.and_then(|cpu| self.relations.get(usize::try_from(cpu).ok()?));
            let offset = match relation {
                Some(relation) => relation.offset_at(tsc, &mut kvmclock),
                None => self.common(tsc, &mut kvmclock),
            };
            let ns = offset.map(|offset| line.at(tsc.wrapping_sub(offset)));
            let now = line.at(rdtsc());
            // A time in the future means that the counter was set after the record.
            let known = ns.filter(|ns| *ns <= now.saturating_add(AHEAD));
            if known.is_none() && !self.has_warned.swap(true, Ordering::Relaxed) {
                let ahead = ns.map(|ns| ns.saturating_sub(now));
                tracing::warn!(
                    cpu,
                    tsc,
                    ahead,
                    ?relation,
                    "there are hits whose time is unknown"
                );
            }
            let between = |ns| match (relation, position) {
                (Some(relation), Some(position)) => relation.between(position, ns),
                _ => ns,
            };
            match known {
                Some(ns) => match between(ns.min(now)) {
                    placed if placed == ns.min(now) => When::At(placed),
                    placed => When::Placed(placed),
                },
                None => When::After(between(0)),
            }
        }
    }

    /// Returns the offset for a reading `tsc` on an unknown vCPU, if the offsets of all vCPUs are equal.
    fn common(&self, tsc: u64, kvmclock: &mut Kvmclock) -> Option<u64> {
        let mut all = self
            .relations
            .iter()
            .map(|relation| relation.offset_at(tsc, kvmclock));
        let first = all.next()??;
        all.all(|other| {
            other.is_some_and(|other| {
                other.wrapping_sub(first).cast_signed().unsigned_abs() <= APART
            })
        })
        .then_some(first)
    }
}

#[cfg(test)]
mod tests;
