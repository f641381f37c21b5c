//! How the time-stamp counters of the virtual CPUs relate to the host's.
//!
//! A virtual CPU's counter is the host's plus an *offset* of its own. There are two kinds of host:
//!
//! - Mostly the offset stays, unless the guest sets its counter. It is learned whenever the virtual CPU
//!   has parked, by reading both; and when KVM tells the guest that it is another.
//! - KVM does not trust some hosts' counters (`kvm_arch_vcpu_load` in arch/x86/kvm/x86.c). There the
//!   guest's *stalls* while the virtual CPU is not in the guest, and is moved on when it falls behind
//!   what KVM thinks it should be; so the offset changes at every entry, and any reading by an ioctl is
//!   out of date before the guest runs. But KVM tells the guest each time, for its kvmclock, of which
//!   moment a value of the counter is. That is read here, without an ioctl.
//!
//! Invariants: a virtual CPU that notes an offset waits for nobody; an offset is used only for readings
//! it may be right for, and where none is known there is no time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::record::{Stamp, When};
use hvprobe_vm::memory::GuestRam;

use super::marks::Marks;
use super::times::{Moment, Times, rdtsc};
use super::told::Told;

/// How many of a virtual CPU's newest offsets are kept; of so many older ones every second, of as many
/// before them every fourth, and so on.
const KEPT: usize = 256;
const LEVELS: usize = 24;
/// How far ahead of now a time may be that is worked out, in nanoseconds: as far as times may be off where
/// counters cannot be trusted. KVM reads its two clocks one after the other, and may lose its processor in between.
const AHEAD: u64 = 200_000;
/// Offsets so far apart, in ticks, are not one: tens of microseconds.
const APART: u64 = 1 << 16;
/// How often what relates kvmclock to the host's counter is renewed, in ticks: tens of milliseconds.
const RENEW: u64 = 1 << 27;

/// Relates the VM's kvmclock to the host's counter.
#[derive(Clone)]
pub(crate) struct Kvmclock {
    read: Arc<dyn Fn() -> Option<u64> + Send + Sync>,
    first: Moment,
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
    /// `read` reads it, nanoseconds.
    pub(crate) fn new(read: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Self {
        let now = Moment::of(&read).unwrap_or_default();
        Self {
            read: Arc::new(read),
            first: now,
            last: now,
        }
    }

    /// Makes sure that it is not out of date. An ioctl of the VM's, a few times a second.
    fn renew(&mut self) {
        if rdtsc().wrapping_sub(self.last.tsc) > RENEW
            && let Some(now) = Moment::of(&*self.read)
        {
            self.last = now;
        }
    }

    /// The host's counter when kvmclock was at `ns`.
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

/// An offset, and from which value of the guest's counter on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Since {
    from: u64,
    offset: u64,
    /// Where it was told.
    version: Option<u32>,
}

/// The offsets of one virtual CPU.
#[derive(Debug, Default)]
struct Offsets {
    /// The newest first; in each, the oldest first.
    levels: Vec<VecDeque<Since>>,
    /// A bit for each level: whether the next that leaves it is forgotten.
    forget: u32,
}

impl Offsets {
    /// Forgets what was read of a counter that seemed to go on: what KVM has told holds for any.
    fn forget_read(&mut self) {
        for level in &mut self.levels {
            level.retain(|since| since.version.is_some());
        }
    }

    fn note(&mut self, since: Since) {
        // A counter that was set back has no past that could be told from what is to come.
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

    /// The one for a reading of `tsc`.
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
                // Where some between were not seen, the one behind: what the guest's counter runs
                // ahead of KVM's opinion it loses before, and has none of it after, a rest.
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

/// How the counter of one virtual CPU relates to the host's.
pub(crate) struct Relation {
    ram: Arc<GuestRam>,
    /// Where the head of the ring is that detours record into, if there is one.
    head: Option<Gpa>,
    /// Of a counter that stalls.
    marks: Marks,
    /// Where KVM tells the guest, and the lowest bit set if it does.
    told_at: AtomicU64,
    stalls: AtomicBool,
    /// [`Told::noted`] of the newest; 0 if there is none.
    noted: AtomicU64,
    /// The version that KVM was waited for in vain to be done with.
    in_vain: AtomicU32,
    /// The newest offset.
    offset: AtomicU64,
    /// Locked by the collector, and tried by the virtual CPU.
    offsets: Mutex<Offsets>,
}

impl fmt::Debug for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relation")
            .field("stalls", &self.stalls)
            .field("told_at", &self.told_at)
            .field("told", &self.told())
            .field("newest", &self.lock().newest())
            .finish_non_exhaustive()
    }
}

impl Relation {
    /// `head` is where the head of the ring is that detours record into.
    pub(crate) fn new(ram: Arc<GuestRam>, head: Option<Gpa>) -> Self {
        Self {
            ram,
            head,
            marks: Marks::default(),
            told_at: AtomicU64::new(0),
            stalls: AtomicBool::new(false),
            noted: AtomicU64::new(0),
            in_vain: AtomicU32::new(0),
            offset: AtomicU64::new(0),
            offsets: Mutex::default(),
        }
    }

    /// Takes over the value of `MSR_KVM_SYSTEM_TIME_NEW`.
    pub(crate) fn set_told_at(&self, msr: u64) {
        self.told_at.store(msr, Ordering::Relaxed);
    }

    /// The counter stalls: what was read of it is no use.
    pub(crate) fn set_stalling(&self) {
        self.marks.prepare();
        self.stalls.store(true, Ordering::Relaxed);
        let mut offsets = self.lock();
        offsets.forget_read();
        // What was told last may have been passed over for what was read.
        self.noted.store(0, Ordering::Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Offsets> {
        self.offsets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest offset; 0 before there is one.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        self.offset.load(Ordering::Relaxed)
    }

    /// The offset of a counter that does not stall, as seen at `tsc` of the guest's.
    pub(crate) fn note(&self, tsc: u64, offset: u64) {
        let mut offsets = self.lock();
        offsets.note(Since {
            from: tsc,
            offset,
            version: None,
        });
        self.offset.store(offset, Ordering::Relaxed);
    }

    /// Where KVM tells the guest, if it does.
    fn told_at(&self) -> Option<Gpa> {
        let at = self.told_at.load(Ordering::Relaxed);
        (at & 1 == 1).then_some(Gpa(at & !1))
    }

    /// What KVM has told the guest last; `None` while it is writing it.
    pub(crate) fn told(&self) -> Option<Told> {
        Told::read(&*self.ram, self.told_at()?)
    }

    /// Notes what KVM has `told` the guest, if that is new; waits for nobody.
    pub(crate) fn renew(&self, told: Told, kvmclock: &mut Kvmclock) {
        let Some(offset) = self.news(told, kvmclock) else {
            return;
        };
        match self.offsets.try_lock() {
            Ok(mut offsets) => self.note_told(&mut offsets, told, offset),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.note_told(&mut poisoned.into_inner(), told, offset);
            }
            // The collector is about to see the same.
            Err(TryLockError::WouldBlock) => self.offset.store(offset, Ordering::Relaxed),
        }
    }

    /// The offset by what KVM has `told`, unless that is noted.
    fn news(&self, told: Told, kvmclock: &mut Kvmclock) -> Option<u64> {
        if self.noted.load(Ordering::Relaxed) == told.noted() {
            return None;
        }
        kvmclock.renew();
        Some(told.tsc.wrapping_sub(kvmclock.tsc_at(told.ns)))
    }

    fn note_told(&self, offsets: &mut Offsets, told: Told, offset: u64) {
        self.noted.store(told.noted(), Ordering::Relaxed);
        // What was read is more exact.
        let is_known = || {
            let off = offset.wrapping_sub(self.offset()).cast_signed();
            offsets.newest().is_some() && off.unsigned_abs() <= APART
        };
        if !self.stalls.load(Ordering::Relaxed) && is_known() {
            return;
        }
        // It, or one behind it, may have been noted meanwhile.
        let is_newer = |newest: &Since| {
            let behind = newest
                .version
                .map(|noted| told.version.wrapping_sub(noted).cast_signed());
            behind.is_none_or(|behind| behind > 0) || told.tsc < newest.from
        };
        if offsets.newest().is_none_or(is_newer) {
            offsets.note(Since {
                from: told.tsc,
                offset,
                version: Some(told.version),
            });
            self.offset.store(offset, Ordering::Relaxed);
        }
    }

    /// Notes that the virtual CPU, whose counter stalls, has left the guest for a hit at `ns`.
    pub(crate) fn mark(&self, ns: u64) {
        // Where there is no such memory, nothing is recorded.
        if let Some(head) = self.head.and_then(|head| self.ram.read_u64(head).ok()) {
            self.marks.note(head, ns);
        }
    }

    /// `ns` as it can be for a record at `position` of this virtual CPU's.
    fn between(&self, position: u64, ns: u64) -> u64 {
        match self.stalls.load(Ordering::Relaxed) {
            true => self.marks.between(position, ns),
            false => ns,
        }
    }

    /// The offset for a reading of `tsc` that was made not long ago.
    fn offset_at(&self, tsc: u64, kvmclock: &mut Kvmclock) -> Option<u64> {
        let told = self.told_at();
        let told = told.and_then(|at| Told::read_soon(&*self.ram, at, &self.in_vain));
        let news = told.and_then(|told| Some((told, self.news(told, kvmclock)?)));
        let mut offsets = self.lock();
        if let Some((told, offset)) = news {
            self.note_told(&mut offsets, told, offset);
        }
        // A counter that stalls may have had others since, which only KVM knows.
        let is_past = |newest: &Since| tsc < newest.from;
        if told.is_none()
            && self.stalls.load(Ordering::Relaxed)
            && !offsets.newest().is_some_and(is_past)
        {
            return None;
        }
        offsets.at(tsc)
    }
}

/// Tells the time of what was recorded with the counters of a guest. Of one thread at a time.
#[derive(Debug)]
pub(crate) struct Timeline {
    times: Arc<Times>,
    relations: Box<[Arc<Relation>]>,
    kvmclock: Mutex<Kvmclock>,
    /// Whether somebody has heard that not all times can be told.
    is_told: AtomicBool,
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
            is_told: AtomicBool::new(false),
        }
    }

    /// What tells the host's time of what a detour tells.
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
            // What would be to come was read of a counter that has been set meanwhile.
            let told = ns.filter(|ns| *ns <= now.saturating_add(AHEAD));
            if told.is_none() && !self.is_told.swap(true, Ordering::Relaxed) {
                let ahead = ns.map(|ns| ns.saturating_sub(now));
                tracing::warn!(
                    cpu,
                    tsc,
                    ahead,
                    ?relation,
                    "there are hits whose time cannot be told"
                );
            }
            let between = |ns| match (relation, position) {
                (Some(relation), Some(position)) => relation.between(position, ns),
                _ => ns,
            };
            match told {
                Some(ns) => match between(ns.min(now)) {
                    placed if placed == ns.min(now) => When::At(placed),
                    placed => When::Placed(placed),
                },
                None => When::After(between(0)),
            }
        }
    }

    /// The offset for a reading of any virtual CPU, if they have one in common.
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
