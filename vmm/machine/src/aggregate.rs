//! Histograms of a machine's events.
//!
//! Invariants: a histogram counts every event that the collector delivers, so it is exact except for events that
//! were dropped before, whose number is known. Reading a histogram does not stop the guest. A histogram to which no
//! handle is left is removed with the next event. All histograms of a machine together use at most
//! [`AGGREGATION_BYTES`].
//!
//! The fields of a probe's events may depend on a module that is not loaded yet (an *awaited* probe). Then the
//! histogram's quantities are unknown; they are resolved before the first of the probe's events is counted.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::mem::size_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hvprobe_engine::ProbeInfo;
use hvprobe_hit::aggregate::{MemoryBudget, NoRoom, Snapshot, Table};
use hvprobe_hit::event::Event;
use hvprobe_spec::aggregate::Aggregate;
use hvprobe_spec::histogram::Histogram;
use hvprobe_spec::{ParseError, ProbeId};
use tracing::warn;

use crate::events::notice::ThrottleNotice;
use crate::events::subscription::Listen;
use crate::machine::Machine;

/// Maximum number of histograms of one machine. They are limited because a single thread, the collector, fills them
/// all.
pub const AGGREGATIONS_MAX: usize = 64;
/// Maximum memory of a machine's histograms together, in bytes.
pub const AGGREGATION_BYTES: usize = 256 << 20;
/// Maximum time that [`Machine::flush_events`] waits for events that have happened.
const PATIENCE: Duration = Duration::from_secs(5);

/// Error of creating or reading a histogram.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AggregateError {
    /// The machine has the maximum number of histograms.
    #[error("the machine has {AGGREGATIONS_MAX} histograms already")]
    TooMany,
    /// The histograms have too little memory left for the data of a probe.
    #[error(
        "the machine's histograms have {left} bytes left of {AGGREGATION_BYTES}, too few for as many probes \
         (index {index}): count fewer, or end another histogram"
    )]
    NoRoom {
        /// Position of the probe in the request.
        index: usize,
        /// Bytes left.
        left: usize,
    },
    /// No probe has that id.
    #[error("there is no probe {} (index {index})", id.0)]
    NoSuchProbe {
        /// Position of the probe in the request.
        index: usize,
        /// The id in the request.
        id: ProbeId,
    },
    /// The events of a probe lack a field of the histogram.
    #[error("of probe `{name}`")]
    Field {
        /// Position of the probe in the request.
        index: usize,
        /// The name of its events.
        name: String,
        /// The field, and its position in the histogram.
        source: ParseError,
    },
}

/// A handle to a histogram. The histogram counts as long as it has a handle. It keeps its content when the machine
/// has ended.
#[derive(Clone, Debug)]
pub struct Aggregation {
    counted: Arc<Mutex<Counted>>,
    /// Clone of the machine's `aggregations`, by which the machine counts its histograms.
    _one: Arc<()>,
}

impl Aggregation {
    /// Returns the definition of the histogram.
    #[must_use]
    pub fn histogram(&self) -> Histogram {
        self.counted().table.histogram().clone()
    }

    /// Returns the quantities that the histogram counts. They are those of the first of its probes that has been
    /// resolved; `None` if none has been.
    ///
    /// # Errors
    /// See [`Aggregation::read`].
    pub fn what(&self) -> Result<Option<Aggregate>, AggregateError> {
        let counted = self.counted();
        counted.checked()?;
        Ok(counted.table.what().cloned())
    }

    /// Returns the counts of all events that the collector has delivered so far; see [`Machine::flush_events`].
    ///
    /// # Errors
    /// When the module of an awaited probe has been loaded, and the probe's events lack a field of the
    /// histogram. The error is permanent.
    pub fn read(&self) -> Result<Snapshot, AggregateError> {
        let counted = self.counted();
        counted.checked()?;
        // The collector has to wait only while the table is copied.
        let copied = counted.table.copy();
        drop(counted);
        Ok(copied.snapshot())
    }

    /// Stops counting, or continues.
    pub fn pause(&self, paused: bool) {
        self.counted().table.pause(paused);
    }

    /// Discards all counts.
    pub fn clear(&self) {
        self.counted().table.clear();
    }

    fn counted(&self) -> MutexGuard<'_, Counted> {
        let mut counted = lock(&self.counted);
        counted.know_more();
        counted
    }
}

fn lock(counted: &Mutex<Counted>) -> MutexGuard<'_, Counted> {
    counted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A table, and its awaited probes.
#[derive(Debug)]
struct Counted {
    table: Table,
    awaited: Waiting,
    /// Error of the first awaited probe whose events lack a field.
    refused: Option<AggregateError>,
}

impl Counted {
    /// Resolves awaited probes whose modules have been loaded.
    fn know_more(&mut self) {
        let Self {
            table,
            awaited,
            refused,
        } = self;
        awaited.retain(|_, (index, probe)| !learn(table, *index, probe, refused));
    }

    /// Counts `events`. `dropped` events were lost before them. First resolves the awaited probes that have events
    /// among `events`. This is enough, because a probe's module is loaded before the probe's first event. The other
    /// awaited probes are not checked, to save time of the collector's thread, which serves all listeners.
    fn hear(&mut self, events: &[Event], dropped: u64) {
        let Self {
            table,
            awaited,
            refused,
        } = self;
        if !awaited.is_empty() {
            for event in events {
                if let Entry::Occupied(probe) = awaited.entry(event.probe)
                    && let (index, info) = probe.get()
                    && learn(table, *index, info, refused)
                {
                    probe.remove();
                }
            }
        }
        table.hear(events, dropped);
    }

    fn checked(&self) -> Result<(), AggregateError> {
        self.refused.clone().map_or(Ok(()), Err)
    }
}

/// Makes `table` count the events of the awaited `probe`, if its module has been loaded. Returns whether it has. If
/// there is no room, because other histograms have taken it, the probe's hits are dropped. That is no error, as
/// none of the requests was wrong. If the events lack a field, the error goes to `refused`.
fn learn(
    table: &mut Table,
    index: usize,
    probe: &ProbeInfo,
    refused: &mut Option<AggregateError>,
) -> bool {
    let Some(resolved) = probe.resolved() else {
        return false;
    };
    match aggregate(table, index, &resolved) {
        Ok(what) => table.learn(resolved.id, Arc::clone(&resolved.actions), what, AWAITED),
        Err(why) => {
            table.release(AWAITED);
            refused.get_or_insert(why);
        }
    }
    true
}

/// Returns the quantities that `table` counts of the events of `probe`, which is at `index` in the request.
fn aggregate(table: &Table, index: usize, probe: &ProbeInfo) -> Result<Aggregate, AggregateError> {
    let what = probe.aggregate(table.histogram());
    what.map_err(|source| AggregateError::Field {
        index,
        name: probe.name.clone(),
        source,
    })
}

/// Makes `table` count the events of `probe`, which is at `index` in the request.
fn count(table: &mut Table, index: usize, probe: &ProbeInfo) -> Result<(), AggregateError> {
    let what = aggregate(table, index, probe)?;
    let counted = table.count(probe.id, Arc::clone(&probe.actions), what);
    counted.map_err(|NoRoom { left }| AggregateError::NoRoom { index, left })
}

/// Awaited probes, with their positions in the request.
type Waiting = BTreeMap<ProbeId, (usize, ProbeInfo)>;

/// Approximate memory of an awaited probe, in bytes.
const AWAITED: usize = 2 * size_of::<(ProbeId, (usize, ProbeInfo))>() + 512;

/// Creates a table for `histogram` and the probes `ids`, which must be among `known`. A probe that is named several
/// times is counted once. Also returns the probes of `ids` that are awaited.
fn table(
    known: Vec<ProbeInfo>,
    ids: &[ProbeId],
    histogram: Histogram,
    room: &Arc<MemoryBudget>,
) -> Result<(Table, Waiting), AggregateError> {
    let mut table = Table::new(histogram, Arc::clone(room));
    let mut awaited = BTreeMap::new();
    let mut by_id: HashMap<ProbeId, Option<ProbeInfo>> = known
        .into_iter()
        .map(|probe| (probe.id, Some(probe)))
        .collect();
    for (index, id) in ids.iter().copied().enumerate() {
        let Some(probe) = by_id.get_mut(&id) else {
            return Err(AggregateError::NoSuchProbe { index, id });
        };
        // This probe was named earlier in `ids`.
        let Some(probe) = probe.take() else {
            continue;
        };
        let counted = count(&mut table, index, &probe);
        if probe.awaited.is_none() {
            counted?;
        } else {
            // An error does not matter here: without the module, fields may be missing, or may be others of the
            // same name.
            let reserved = table.reserve(AWAITED);
            reserved.map_err(|NoRoom { left }| AggregateError::NoRoom { index, left })?;
            awaited.insert(id, (index, probe));
        }
    }
    Ok((table, awaited))
}

/// Listener that fills the table of a histogram. Holds the table weakly, so that the listener is removed once no
/// handle to the histogram is left.
#[derive(Debug)]
struct Filler(Weak<Mutex<Counted>>);

impl Listen for Filler {
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool {
        let counted = self.0.upgrade();
        if let Some(counted) = &counted {
            lock(counted).hear(events, dropped);
        }
        counted.is_some()
    }

    fn note(&mut self, _: &[ThrottleNotice]) {}
}

impl Machine {
    /// Creates a histogram, which counts all later events of `probes` as `histogram` defines.
    ///
    /// # Errors
    /// When there are too many histograms or too little memory is left for one, when a probe does not exist, or
    /// when its events lack a field of the histogram. A field of a probe whose module is not loaded may be missing:
    /// the module may have it.
    pub fn aggregate(
        &self,
        probes: &[ProbeId],
        histogram: Histogram,
    ) -> Result<Aggregation, AggregateError> {
        // The reference is taken before the count is checked, so that several calls at a time cannot exceed the
        // maximum. The machine itself holds one reference.
        let one = Arc::clone(&self.aggregations);
        if Arc::strong_count(&one) > AGGREGATIONS_MAX + 1 {
            return Err(AggregateError::TooMany);
        }
        let (table, awaited) = table(self.probes(), probes, histogram, &self.histograms)?;
        let counted = Arc::new(Mutex::new(Counted {
            table,
            awaited,
            refused: None,
        }));
        self.listen(Box::new(Filler(Arc::downgrade(&counted))));
        Ok(Aggregation { counted, _one: one })
    }

    /// Waits until all events that have happened are delivered, at most five seconds. Returns whether they are. The
    /// wait is short unless the host keeps a vCPU from running.
    pub fn flush_events(&self) -> bool {
        self.shared.detours.catch_up();
        let is_whole = self.flush.wait(PATIENCE);
        if !is_whole {
            warn!(
                machine = self.config.name,
                "events are not handed on in time"
            );
        }
        is_whole
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use hvprobe_engine::{Awaited, ProbeState};
    use hvprobe_spec::definition::Kind;
    use hvprobe_spec::histogram::read_histogram;

    use super::*;

    fn probe(id: u32, awaited: bool) -> ProbeInfo {
        ProbeInfo {
            id: ProbeId(id),
            name: format!("p_{id}"),
            definition: "p vfs_read".to_owned(),
            kind: Kind::Probe,
            addr: None,
            symbol: None,
            state: ProbeState::Placed,
            disabled: false,
            turned_off: false,
            budget: None,
            mechanism: None,
            unoptimized: None,
            maxactive: None,
            counts: hvprobe_hit::Counts::default(),
            actions: Arc::default(),
            shown: Arc::default(),
            awaited: awaited.then(Awaited::default),
        }
    }

    fn by_pid() -> Histogram {
        read_histogram("keys=common_pid").expect("a histogram")
    }

    /// Maximum number of probes of a machine.
    const PROBES: u32 = 65_536;
    /// Maximum number of probes in a request.
    const NAMED: u32 = 16_384;

    #[test]
    fn what_a_list_costs_is_its_length_and_not_that_of_the_probes_for_each_of_it() {
        let known: Vec<_> = (0..PROBES).map(|id| probe(id, false)).collect();
        let room = Arc::new(MemoryBudget::new(AGGREGATION_BYTES));
        let last: Vec<_> = (PROBES - NAMED..PROBES).map(ProbeId).collect();
        let same = vec![ProbeId(PROBES - 1); last.len()];
        for ids in [last, same] {
            let begun = Instant::now();
            let (_table, awaited) = table(known.clone(), &ids, by_pid(), &room).expect("a table");
            let took = begun.elapsed();
            eprintln!("{} named of {PROBES} in {took:?}", ids.len());
            assert!(awaited.is_empty());
            // Comparing each named probe with each known one would take a thousand million steps.
            assert!(took < Duration::from_secs(1), "{took:?}");
        }
        let unknown = table(known, &[ProbeId(3), ProbeId(PROBES)], by_pid(), &room);
        let (index, id) = (1, ProbeId(PROBES));
        assert_eq!(
            unknown.err(),
            Some(AggregateError::NoSuchProbe { index, id })
        );
    }

    fn event(probe: u32) -> Event {
        Event {
            kind: hvprobe_hit::event::EventKind::Hit,
            shown: hvprobe_spec::RegisterSet::default(),
            captured: hvprobe_hit::event::Captured::nothing(),
            seq: 0,
            probe: ProbeId(probe),
            vcpu: 0,
            host_ns: 0,
            guest_tsc: 0,
            regs: hvprobe_arch::Regs::default(),
            task: None,
            cost_ns: 0,
        }
    }

    #[test]
    fn what_an_event_costs_is_not_what_all_probes_do_that_wait_for_their_modules() {
        const BATCHES: u64 = 16_384;
        let mut known: Vec<_> = (0..PROBES).map(|id| probe(id, true)).collect();
        known[0].awaited = None;
        let room = Arc::new(MemoryBudget::new(AGGREGATION_BYTES));
        let ids: Vec<_> = (0..PROBES).map(ProbeId).collect();
        let (table, awaited) = table(known, &ids, by_pid(), &room).expect("a table");
        assert_eq!(awaited.len(), ids.len() - 1);
        let mut counted = Counted {
            table,
            awaited,
            refused: None,
        };
        let begun = Instant::now();
        for _ in 0..BATCHES {
            counted.hear(&[event(0)], 0);
        }
        let took = begun.elapsed();
        eprintln!("{BATCHES} batches heard in {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(counted.table.copy().snapshot().hits, BATCHES);
    }

    #[test]
    fn what_others_have_taken_is_not_the_end_of_a_histogram_whose_modules_have_come() {
        let room = Arc::new(MemoryBudget::new(8 * AWAITED));
        let known = vec![probe(1, false), probe(2, true)];
        let ids = [ProbeId(1), ProbeId(2)];
        let (mut table, awaited) = table(known, &ids, by_pid(), &room).expect("a table");
        assert_eq!(awaited.len(), 1);
        table.hear(&[event(1), event(2)], 0);
        let mut other = Table::new(by_pid(), Arc::clone(&room));
        other.reserve(room.left()).expect("all that is left");
        let mut refused = None;
        // The same probe, with its module loaded.
        assert!(learn(&mut table, 1, &probe(2, false), &mut refused));
        assert_eq!(refused, None);
        table.hear(&[event(1), event(2)], 0);
        let snapshot = table.copy().snapshot();
        assert_eq!((snapshot.hits, snapshot.dropped), (4, 0));
        assert!(room.left() > 0, "what it waited with is released");
    }

    #[test]
    fn probes_that_wait_for_their_modules_are_counted_once_and_have_their_room() {
        let room = Arc::new(MemoryBudget::new(8 * AWAITED));
        let known: Vec<_> = (0..8).map(|id| probe(id, true)).collect();
        let ids: Vec<_> = [0, 1, 0, 1].map(ProbeId).into();
        let two = table(known.clone(), &ids, by_pid(), &room).expect("room for two");
        assert_eq!(two.1.len(), 2);
        let all: Vec<_> = (0..8).map(ProbeId).collect();
        let refused = table(known.clone(), &all, by_pid(), &room).err();
        assert!(
            matches!(refused, Some(AggregateError::NoRoom { .. })),
            "{refused:?}"
        );
        drop(two);
        assert_eq!(room.left(), 8 * AWAITED);
    }
}
