//! The host's end of the ring that detours record into: whose records they are, what events become of
//! them, and who gets those. [`Reader`] takes the records.
//!
//! Invariants: what is read was copied out of the guest's reach first; a guest that writes nonsense
//! here loses records, which are counted, and nothing else.

mod reader;
mod room;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_arch::detour::{BY_HOST, BuildError, Capture, EntryCapture, Layout, Malformed, Part};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_linux::task::Task;
use hvprobe_spec::{Actions, ProbeId};
use rustc_hash::FxHashMap;

use crate::event::{self, Captured, Drained, Event, EventKind};
use crate::hidden::KERNEL_WINDOW;
use crate::hidden::detours::CounterPlace;
use crate::hidden::follow::Followed;
use crate::probe::table::Counters;
use reader::Look;
pub use reader::Reader;

/// The longest that a record waits to be read.
const DEADLINE: Duration = Duration::from_millis(5);
/// How often counters are looked at that the guest only increments.
const SETTLE: Duration = Duration::from_secs(1);
/// The most that a counter of the guest's can grow by between two looks at it: beyond what processors
/// do in minutes. What has grown by more was not counted but written.
const PLAUSIBLE: u64 = 1 << 40;

/// Whose records they are, and what they mean.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) probe: ProbeId,
    what: What,
    layout: Layout,
    pub(crate) actions: Arc<Actions>,
    counters: Arc<Counters>,
    /// What its detour and its calls count in.
    pub(crate) words: CounterPlace,
    lost: Tally,
    vetoed: Tally,
    missed: Tally,
    enabled: AtomicBool,
    /// What was recorded while it was enabled has been read.
    silent: AtomicBool,
    /// Hits that made no event since then and are to be told as lost.
    late: AtomicU64,
}

/// What records tell of.
#[derive(Debug)]
pub(crate) struct What {
    /// The probepoint.
    pub(crate) at: Gva,
    pub(crate) capture: Capture,
    /// For a return probe: what is kept of a call at its entry, and the calls.
    pub(crate) followed: Option<(EntryCapture, Arc<Followed>)>,
}

/// Where the guest counts what leaves no record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tallies {
    pub(crate) lost: Gpa,
    pub(crate) vetoed: Gpa,
    pub(crate) missed: Gpa,
}

/// A counter of the guest's, and how much of it was accounted for.
#[derive(Debug)]
struct Tally {
    at: Gpa,
    seen: AtomicU64,
}

impl Tally {
    /// What was added since the last call; nothing if that is nonsense.
    fn take(&self, mem: &dyn PhysMemory) -> u64 {
        let Ok(now) = mem.read_u64(self.at) else {
            return 0;
        };
        let added = now.wrapping_sub(self.seen.swap(now, Ordering::Relaxed));
        if added <= PLAUSIBLE { added } else { 0 }
    }
}

impl Source {
    /// # Errors
    /// When there are no such records.
    pub(crate) fn new(
        probe: ProbeId,
        what: What,
        actions: Arc<Actions>,
        counters: Arc<Counters>,
        words: CounterPlace,
        tallies: Tallies,
    ) -> Result<Self, BuildError> {
        let tally = |at| Tally {
            at,
            seen: AtomicU64::new(0),
        };
        let layout = match &what.followed {
            None => Layout::new(&what.capture)?,
            Some((entry, _)) => Layout::of_return(&what.capture, entry)?,
        };
        Ok(Self {
            probe,
            what,
            layout,
            actions,
            counters,
            words,
            lost: tally(tallies.lost),
            vetoed: tally(tallies.vetoed),
            missed: tally(tallies.missed),
            enabled: AtomicBool::new(true),
            silent: AtomicBool::new(false),
            late: AtomicU64::new(0),
        })
    }

    /// What a detour does for it.
    pub(crate) fn part(&self) -> Part<'_> {
        match &self.what.followed {
            None => Part::Record {
                source: self.probe.0,
                capture: &self.what.capture,
                lost: self.words.lost(),
            },
            Some((entry, calls)) => Part::Return {
                instances: &calls.instances,
                capture: entry,
                stubs: calls.stubs,
                missed: self.words.missed(),
            },
        }
    }

    /// The calls of a return probe.
    pub(crate) fn followed(&self) -> Option<&Followed> {
        Some(&*self.what.followed.as_ref()?.1)
    }

    /// A disabled return probe only counts the calls that return.
    pub(crate) fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Relaxed);
        if enabled {
            self.silent.store(false, Ordering::Relaxed);
        }
    }

    /// The probe is disabled, and what it had recorded by then has been read. A task that was
    /// preempted in the detour may still finish a record: that hit is counted, without an event.
    pub(crate) fn silence(&self) {
        let enabled = self.enabled.load(Ordering::Relaxed);
        self.silent.store(!enabled, Ordering::Relaxed);
    }

    /// Whether [`Source::silence`] has something to do.
    pub(crate) fn is_to_be_silenced(&self) -> bool {
        !self.enabled.load(Ordering::Relaxed) && !self.silent.load(Ordering::Relaxed)
    }

    /// Accounts for the calls of a task that will not run again.
    pub(crate) fn task_dead(&self, task: Gva, mem: &(impl PhysMemory + ?Sized)) {
        if let Some(calls) = self.followed() {
            let orphans = calls.reclaim(task, mem);
            if orphans > 0 {
                self.counters.add_orphans(orphans);
            }
        }
    }

    /// Accounts for what detours only counted; returns how many hits left no record.
    fn settle(&self, mem: &dyn PhysMemory) -> u64 {
        let lost = self.lost.take(mem);
        self.counters.add_hits(lost);
        self.counters.add_vetoed(self.vetoed.take(mem));
        self.counters.add_missed(self.missed.take(mem));
        lost.saturating_add(self.late.swap(0, Ordering::Relaxed))
    }

    /// The event that a record tells of, unless it is only to be counted, or is none of ours.
    fn event(&self, record: &[u8], around: &Around<'_>) -> Result<Option<Event>, Malformed> {
        let record = self.layout.decode(record)?;
        let vcpu = record.cpu.unwrap_or(0);
        let mut regs = record.regs;
        regs.rip = self.what.at.0;
        let (mut kind, mut stack) = (EventKind::Hit, &record.stack);
        if let Some(call) = &record.call {
            if !self.enabled.load(Ordering::Relaxed) {
                self.counters.miss(vcpu);
                return Ok(None);
            }
            regs.rip = around
                .sources
                .return_address(call.return_address, around.mem)
                .0;
            let (entry_ns, entry_tsc) = match call.cpu {
                Some(BY_HOST) => (call.tsc, 0),
                cpu => ((around.host_ns)(cpu, call.tsc).unwrap_or(0), call.tsc),
            };
            kind = EventKind::Return(event::Call {
                id: call.id,
                entry_ns,
                entry_tsc,
                entry: Regs {
                    rip: self.what.at.0,
                    ..call.regs
                },
            });
            stack = &call.stack;
        }
        self.counters.hit(vcpu);
        if self.silent.load(Ordering::Relaxed) {
            self.late.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        let mut captured = Captured::nothing();
        for word in stack.as_slice() {
            captured.item(8, |bytes| {
                bytes.copy_from_slice(&word.to_le_bytes());
                true
            });
        }
        Ok(Some(Event {
            kind,
            seq: 0,
            probe: self.probe,
            vcpu,
            host_ns: (around.host_ns)(record.cpu, record.tsc).unwrap_or(0),
            guest_tsc: record.tsc,
            regs,
            shown: self.actions.registers,
            captured,
            task: record.task.map(|task| Task {
                pid: task.pid.cast_signed(),
                tgid: task.tgid.cast_signed(),
                comm: task.comm,
            }),
            cost_ns: 0,
        }))
    }
}

/// What records are read with.
struct Around<'a> {
    mem: &'a dyn PhysMemory,
    host_ns: &'a dyn Fn(Option<u32>, u64) -> Option<u64>,
    sources: &'a Map,
}

/// How many return probes one call can be followed by.
pub(crate) const NESTED_MAX: usize = 16;

/// All sources, by the number their records have.
#[derive(Clone, Debug, Default)]
struct Map(FxHashMap<u32, Arc<Source>>);

impl Map {
    /// Where a function really returns to that found `at` on its stack: another return probe may
    /// have come before.
    fn return_address(&self, mut at: Gva, mem: &dyn PhysMemory) -> Gva {
        for _ in 0..NESTED_MAX {
            if at < KERNEL_WINDOW.start || at >= KERNEL_WINDOW.end {
                break;
            }
            let mut followed = self.0.values().filter_map(|source| source.followed());
            match followed.find_map(|calls| calls.return_address(at, mem)) {
                Some(to) => at = to,
                None => break,
            }
        }
        at
    }
}

/// The sources that there are now. The control side changes them, the reader takes what there is.
#[derive(Clone, Debug, Default)]
pub struct Sources(Arc<Mutex<Arc<Map>>>);

impl Sources {
    fn now(&self) -> Arc<Map> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Map) -> T) -> T {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut map))
    }

    pub(crate) fn get(&self, id: ProbeId) -> Option<Arc<Source>> {
        self.now().0.get(&id.0).cloned()
    }

    pub(crate) fn add(&self, source: Arc<Source>) {
        self.change(|map| map.0.insert(source.probe.0, source));
    }

    pub(crate) fn remove(&self, id: ProbeId) -> Option<Arc<Source>> {
        self.change(|map| map.0.remove(&id.0))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<Source>> + use<> {
        let sources: Vec<_> = self.now().0.values().cloned().collect();
        sources.into_iter()
    }
}

/// What a machine's collector and its control side share of the ring: the reader, and the events
/// that the control side has read before the collector came to it.
#[derive(Debug)]
pub struct Collection {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    reader: Reader,
    waiting: VecDeque<Event>,
    lost: u64,
    settled: Option<Instant>,
}

impl Collection {
    /// A collection of what `reader` reads.
    #[must_use]
    pub fn new(reader: Reader) -> Self {
        let state = State {
            reader,
            waiting: VecDeque::new(),
            lost: 0,
            settled: None,
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads and accounts for everything that has been recorded up to now; the collector gets it
    /// with the next [`Collection::drain`]. What no room is left for in one ring's worth of events
    /// is read but lost.
    pub fn catch_up(
        &self,
        mem: &dyn PhysMemory,
        host_ns: impl Fn(Option<u32>, u64) -> Option<u64>,
    ) {
        self.lock().catch_up(mem, host_ns);
    }

    /// The same when the guest will not run again: what it has begun to record is lost.
    pub fn end(&self, mem: &dyn PhysMemory, host_ns: impl Fn(Option<u32>, u64) -> Option<u64>) {
        let mut state = self.lock();
        state.catch_up(mem, host_ns);
        let given_up = state.reader.give_up(mem);
        state.lost = state.lost.saturating_add(given_up);
    }

    /// Appends at most `most` events to `batch`, as [`event::Source::drain`] does. Lost are hits that
    /// left none.
    pub fn drain(
        &self,
        mem: &dyn PhysMemory,
        host_ns: impl Fn(Option<u32>, u64) -> Option<u64>,
        batch: &mut Vec<Event>,
        most: usize,
    ) -> Drained {
        let mut state = self.lock();
        let waiting = state.waiting.len().min(most);
        batch.extend(state.waiting.drain(..waiting));
        let now = Instant::now();
        let look = Look::patient(most - waiting, now);
        let mut drained = state.reader.read(mem, host_ns, look, batch);
        drained.more |= !state.waiting.is_empty();
        let lost = &mut drained.lost;
        let is_settled = |last| now.saturating_duration_since(last) <= SETTLE;
        if !state.settled.is_some_and(is_settled) {
            state.settled = Some(now);
            *lost = lost.saturating_add(state.reader.settle(mem));
        }
        *lost = lost.saturating_add(std::mem::take(&mut state.lost));
        drained
    }

    /// How long the ring may be left alone; `None` while nothing records.
    #[must_use]
    pub fn patience(&self) -> Option<Duration> {
        let state = self.lock();
        if state.reader.records() {
            Some(DEADLINE)
        } else {
            // Whoever still has a record to finish of a probe that has left.
            state.reader.awaits().then_some(SETTLE)
        }
    }
}

impl State {
    fn catch_up(
        &mut self,
        mem: &dyn PhysMemory,
        host_ns: impl Fn(Option<u32>, u64) -> Option<u64>,
    ) {
        let most = self.reader.capacity();
        let mut read = Vec::new();
        let look = Look::at_all(most);
        let lost = self.reader.read(mem, host_ns, look, &mut read).lost;
        let lost = lost.saturating_add(self.reader.settle(mem));
        let room = most.saturating_sub(self.waiting.len());
        let dropped = read.len().saturating_sub(room) as u64;
        self.lost = self.lost.saturating_add(lost).saturating_add(dropped);
        self.waiting.extend(read.into_iter().take(room));
        // What was finished late comes before what waits already.
        let waiting = self.waiting.make_contiguous();
        if !waiting.is_sorted_by_key(|event| event.host_ns) {
            waiting.sort_by_cached_key(|event| event.host_ns);
        }
    }
}

#[cfg(test)]
mod tests;
