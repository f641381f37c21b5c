//! The host's end of the ring that detours record into.
//!
//! A record takes whole cells, reserved by moving the *head* on, and begins with the position behind
//! it once it is complete. Invariants: only the [`Reader`] moves the *tail*, over records that were
//! complete, whose first words it has cleared before; what it reads it has copied out of the guest's
//! reach first; a guest that writes nonsense here loses records, which are counted, and nothing else.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_arch::detour::{
    BuildError, CELL, Capture, EntryCapture, Header, Layout, MAX_RECORD_CELLS, Malformed, Part,
};
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::{Gpa, Gva, Regs};
use rustc_hash::FxHashMap;

use crate::event::{self, Captured, Drained, Event, EventKind};
use crate::hidden::detours::CounterPlace;
use crate::hidden::follow::Followed;
use crate::hidden::{KERNEL_WINDOW, RingPlace};
use crate::probe::ProbeId;
use crate::probe::spec::Actions;
use crate::probe::table::Counters;
use crate::task::Task;

/// The longest that a record waits to be read.
const DEADLINE: Duration = Duration::from_millis(5);
/// How often counters are looked at that the guest only increments.
const SETTLE: Duration = Duration::from_secs(1);
const RECORD_MAX: usize = MAX_RECORD_CELLS as usize * CELL;

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
    /// What was added since the last call.
    fn take(&self, mem: &dyn PhysMemory) -> u64 {
        let Ok(now) = mem.read_u64(self.at) else {
            return 0;
        };
        now.wrapping_sub(self.seen.swap(now, Ordering::Relaxed))
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
        lost
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
            kind = EventKind::Return(event::Call {
                id: call.id,
                entry_ns: (around.host_ns)(call.tsc),
                entry_tsc: call.tsc,
                entry: Regs {
                    rip: self.what.at.0,
                    ..call.regs
                },
            });
            stack = &call.stack;
        }
        self.counters.hit(vcpu);
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
            host_ns: (around.host_ns)(record.tsc),
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
    host_ns: &'a dyn Fn(u64) -> u64,
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

/// Empties the ring of one machine.
#[derive(Debug)]
pub struct Reader {
    place: RingPlace,
    sources: Sources,
    tail: u64,
    malformed: u64,
    /// Guest and host time of the newest event.
    newest: (u64, u64),
}

impl Reader {
    /// A reader of the ring at `place`, which nobody else reads.
    #[must_use]
    pub fn new(place: RingPlace, sources: Sources) -> Self {
        Self {
            place,
            sources,
            tail: 0,
            malformed: 0,
            newest: (0, 0),
        }
    }

    /// Whether everything reserved was read. One load.
    fn is_empty(&self, mem: &dyn PhysMemory) -> bool {
        mem.read_u64(self.place.head)
            .is_ok_and(|head| head == self.tail)
    }

    /// Appends the events of at most `limit` records that are complete to `into`. Lost are those that
    /// were nonsense or nobody's; there is more if it was the limit that ended it.
    fn read(
        &mut self,
        mem: &dyn PhysMemory,
        host_ns: impl Fn(u64) -> u64,
        limit: usize,
        into: &mut Vec<Event>,
    ) -> Drained {
        let before = self.malformed;
        if self.is_empty(mem) {
            return Drained::default();
        }
        let sources = self.sources.now();
        let around = Around {
            mem,
            host_ns: &host_ns,
            sources: &sources,
        };
        let start = self.tail;
        let mut left = limit;
        let more = loop {
            if left == 0 {
                break true;
            }
            left -= 1;
            match self.next(&around, into) {
                Ok(true) => {}
                Ok(false) | Err(OutOfRange { .. }) => break false,
            }
        };
        if self.tail != start {
            // What was cleared is cleared before detours may reserve it again.
            fence(Ordering::Release);
            let _ = self.place.tell(mem, self.tail);
        }
        Drained {
            lost: self.malformed - before,
            more,
        }
    }

    /// Takes one record; `false` when the next is not complete.
    fn next(&mut self, around: &Around<'_>, into: &mut Vec<Event>) -> Result<bool, OutOfRange> {
        let mem = around.mem;
        let cell = self.tail & u64::from(self.place.capacity - 1);
        let at = self.place.cells.wrapping_add(cell * CELL as u64);
        if mem.read_u64(at)? == 0 {
            return Ok(false);
        }
        fence(Ordering::Acquire);
        let mut bytes = [0; RECORD_MAX];
        mem.read(at, &mut bytes[..CELL])?;
        let header = match Header::read(&bytes[..CELL]) {
            Ok(header) if header.position == self.tail => header,
            Ok(_) | Err(_) => return self.resync(mem),
        };
        let Some(record) = bytes.get_mut(..usize::from(header.cells) * CELL) else {
            return self.resync(mem);
        };
        mem.read(at, record)?;
        for cell in 0..u64::from(header.cells) {
            mem.write_u64(at.wrapping_add(cell * CELL as u64), 0)?;
        }
        self.tail = self.tail.wrapping_add(u64::from(header.cells));
        let source = around.sources.0.get(&header.source);
        match source.map(|source| source.event(record, around)) {
            Some(Ok(event)) => into.extend(event.map(|event| self.in_order(event))),
            Some(Err(_)) | None => self.malformed += 1,
        }
        Ok(true)
    }

    /// Host time, which is worked out anew for each batch, does not run back where the guest's did
    /// not.
    fn in_order(&mut self, mut event: Event) -> Event {
        let (tsc, ns) = self.newest;
        if event.guest_tsc >= tsc {
            event.host_ns = event.host_ns.max(ns);
            self.newest = (event.guest_tsc, event.host_ns);
        }
        event
    }

    /// The guest wrote nonsense where a record should begin: nothing between it and the head can be
    /// made sense of.
    fn resync(&mut self, mem: &dyn PhysMemory) -> Result<bool, OutOfRange> {
        let head = mem.read_u64(self.place.head)?;
        for cell in 0..u64::from(self.place.capacity) + u64::from(MAX_RECORD_CELLS) {
            mem.write_u64(self.place.cells.wrapping_add(cell * CELL as u64), 0)?;
        }
        self.malformed += 1;
        self.tail = head;
        Ok(false)
    }

    /// Accounts for the hits that detours only counted. Returns how many of them left no record.
    fn settle(&self, mem: &dyn PhysMemory) -> u64 {
        let sources = self.sources.now();
        sources.0.values().map(|source| source.settle(mem)).sum()
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
    pub fn catch_up(&self, mem: &dyn PhysMemory, host_ns: impl Fn(u64) -> u64) {
        let mut state = self.lock();
        let capacity = state.reader.place.capacity as usize;
        let mut read = Vec::new();
        let lost = state.reader.read(mem, host_ns, capacity, &mut read).lost;
        state.lost += lost + state.reader.settle(mem);
        let room = capacity.saturating_sub(state.waiting.len());
        state.lost += read.len().saturating_sub(room) as u64;
        state.waiting.extend(read.into_iter().take(room));
    }

    /// Appends at most `most` events to `batch`, as [`event::Source::drain`] does. Lost are hits that
    /// left none.
    pub fn drain(
        &self,
        mem: &dyn PhysMemory,
        host_ns: impl Fn(u64) -> u64,
        batch: &mut Vec<Event>,
        most: usize,
    ) -> Drained {
        let mut state = self.lock();
        let waiting = state.waiting.len().min(most);
        batch.extend(state.waiting.drain(..waiting));
        let mut drained = state.reader.read(mem, host_ns, most - waiting, batch);
        drained.more |= !state.waiting.is_empty();
        if state.settled.is_none_or(|last| last.elapsed() > SETTLE) {
            state.settled = Some(Instant::now());
            drained.lost += state.reader.settle(mem);
        }
        drained.lost += std::mem::take(&mut state.lost);
        drained
    }

    /// How long the ring may be left alone; `None` while nothing records.
    #[must_use]
    pub fn patience(&self) -> Option<Duration> {
        let sources = self.lock().reader.sources.now();
        (!sources.0.is_empty()).then_some(DEADLINE)
    }
}

#[cfg(test)]
mod tests;
