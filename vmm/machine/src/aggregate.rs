//! Histograms of a machine's events.
//!
//! Invariants: nothing that the collector has handed on is left out, so that a histogram is as exact as the
//! counts of what was dropped before; who reads one does not stop the guest; one that nobody holds any more
//! is gone with the next event; all of a machine together take no more memory than [`AGGREGATION_BYTES`].
//!
//! Of a probe whose module is to tell what it shows, nobody knows before what a histogram is of its events: that
//! is found out before the first of them is counted.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::mem::size_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hvprobe_engine::ProbeInfo;
use hvprobe_hit::aggregate::{NoRoom, Room, Snapshot, Table};
use hvprobe_hit::event::Event;
use hvprobe_spec::aggregate::Aggregate;
use hvprobe_spec::histogram::Histogram;
use hvprobe_spec::{ParseError, ProbeId};
use tracing::warn;

use crate::events::notice::ThrottleNotice;
use crate::events::subscription::Listen;
use crate::machine::Machine;

/// The most histograms of one machine, as each is filled by the one thread that collects events.
pub const AGGREGATIONS_MAX: usize = 64;
/// Bytes of all of them together.
pub const AGGREGATION_BYTES: usize = 256 << 20;
/// How long reading waits for what has happened.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why there is no such histogram.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AggregateError {
    /// The machine has as many as it may.
    #[error("the machine has {AGGREGATIONS_MAX} histograms already")]
    TooMany,
    /// They have no room for what is to be known of a probe.
    #[error(
        "the machine's histograms have {left} bytes left of {AGGREGATION_BYTES}, too few for as many probes \
         (index {index}): count fewer, or end another histogram"
    )]
    NoRoom {
        /// Its position in what was asked for.
        index: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// No probe has that id.
    #[error("there is no probe {} (index {index})", id.0)]
    NoSuchProbe {
        /// Its position in what was asked for.
        index: usize,
        /// What was asked for.
        id: ProbeId,
    },
    /// The events of a probe do not have what is asked for.
    #[error("of probe `{name}`")]
    Field {
        /// The probe's position in what was asked for.
        index: usize,
        /// The name of its events.
        name: String,
        /// What, and where in the histogram.
        source: ParseError,
    },
}

/// A histogram that counts for as long as somebody holds it. When the machine has ended it stays as it is.
#[derive(Clone, Debug)]
pub struct Aggregation {
    counted: Arc<Mutex<Counted>>,
    /// Counts those that there are.
    _one: Arc<()>,
}

impl Aggregation {
    /// What it counts.
    #[must_use]
    pub fn histogram(&self) -> Histogram {
        self.counted().table.histogram().clone()
    }

    /// What it counts, as it is of the first of its probes of which that is known.
    ///
    /// # Errors
    /// See [`Aggregation::read`].
    pub fn what(&self) -> Result<Option<Aggregate>, AggregateError> {
        let counted = self.counted();
        counted.checked()?;
        Ok(counted.table.what().cloned())
    }

    /// What was counted of what was handed on; see [`Machine::flush_events`].
    ///
    /// # Errors
    /// When the events of a probe whose module has come do not have what is asked for. It stays so.
    pub fn read(&self) -> Result<Snapshot, AggregateError> {
        let counted = self.counted();
        counted.checked()?;
        // The collector waits for no more than the copy.
        let copied = counted.table.copy();
        drop(counted);
        Ok(copied.snapshot())
    }

    /// Stops counting, or goes on with it.
    pub fn pause(&self, paused: bool) {
        self.counted().table.pause(paused);
    }

    /// Begins anew.
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

/// A table, and what is not known yet of what it is to count.
#[derive(Debug)]
struct Counted {
    table: Table,
    awaited: Waiting,
    /// What the first of them that was told of does not have.
    refused: Option<AggregateError>,
}

impl Counted {
    /// Looks whether modules have told.
    fn know_more(&mut self) {
        let Self {
            table,
            awaited,
            refused,
        } = self;
        awaited.retain(|_, (index, probe)| !learn(table, *index, probe, refused));
    }

    /// Counts `events`, before which so many were lost. What was awaited of a probe is told before its first event,
    /// so the others are not looked at: the collector's time is everybody's.
    fn hear(&mut self, events: &[Event], dropped: u64) {
        let Self {
            table,
            awaited,
            refused,
        } = self;
        if !awaited.is_empty() {
            for event in events {
                if let Entry::Occupied(probe) = awaited.entry(event.probe)
                    && let (index, told) = probe.get()
                    && learn(table, *index, told, refused)
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

/// Has `table` count the events of `probe`, which waits for its module, if that has told; whether it has. There is no
/// room, if another's histograms have it: then its hits are dropped, as there is nobody whose fault that is.
fn learn(
    table: &mut Table,
    index: usize,
    probe: &ProbeInfo,
    refused: &mut Option<AggregateError>,
) -> bool {
    let Some(told) = probe.told() else {
        return false;
    };
    match aggregate(table, index, &told) {
        Ok(what) => table.learn(told.id, Arc::clone(&told.actions), what, AWAITED),
        Err(why) => {
            table.release(AWAITED);
            refused.get_or_insert(why);
        }
    }
    true
}

/// What `table` is to count of the events of `probe`, which is the one at `index` of those asked for.
fn aggregate(table: &Table, index: usize, probe: &ProbeInfo) -> Result<Aggregate, AggregateError> {
    let what = probe.aggregate(table.histogram());
    what.map_err(|source| AggregateError::Field {
        index,
        name: probe.name.clone(),
        source,
    })
}

/// Has `table` count the events of `probe`, which is the one at `index` of those asked for.
fn count(table: &mut Table, index: usize, probe: &ProbeInfo) -> Result<(), AggregateError> {
    let what = aggregate(table, index, probe)?;
    let counted = table.count(probe.id, Arc::clone(&probe.actions), what);
    counted.map_err(|NoRoom { left }| AggregateError::NoRoom { index, left })
}

/// Probes whose modules are to tell, and their positions in what was asked for.
type Waiting = BTreeMap<ProbeId, (usize, ProbeInfo)>;

/// What is kept of a probe that waits for its module, about.
const AWAITED: usize = 2 * size_of::<(ProbeId, (usize, ProbeInfo))>() + 512;

/// A table of what `histogram` says of those of `known` that `ids` names, each counted once however often it is
/// named, and those of which that is told by their modules.
fn table(
    known: Vec<ProbeInfo>,
    ids: &[ProbeId],
    histogram: Histogram,
    room: &Arc<Room>,
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
        // Named before.
        let Some(probe) = probe.take() else {
            continue;
        };
        let counted = count(&mut table, index, &probe);
        if probe.awaited.is_none() {
            counted?;
        } else {
            // What it shows may be another thing of the same name, or what it does not show yet.
            let reserved = table.reserve(AWAITED);
            reserved.map_err(|NoRoom { left }| AggregateError::NoRoom { index, left })?;
            awaited.insert(id, (index, probe));
        }
    }
    Ok((table, awaited))
}

/// What fills a table.
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
    /// Counts the events of `probes` from now on, as `histogram` says.
    ///
    /// # Errors
    /// When there is no such probe, or its events do not have what is asked for, unless its module is not
    /// loaded and may have it.
    pub fn aggregate(
        &self,
        probes: &[ProbeId],
        histogram: Histogram,
    ) -> Result<Aggregation, AggregateError> {
        // Taken before it is counted, so that of several at a time none is one too many; one is held by the
        // machine itself.
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

    /// Returns when all events of what has happened are handed on, which is at once unless the host keeps a
    /// virtual CPU from going on; after five seconds at the latest. Says whether they are.
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

    /// As many as a machine has at most, and as many as are named at once.
    const PROBES: u32 = 65_536;
    const NAMED: u32 = 16_384;

    #[test]
    fn what_a_list_costs_is_its_length_and_not_that_of_the_probes_for_each_of_it() {
        let known: Vec<_> = (0..PROBES).map(|id| probe(id, false)).collect();
        let room = Arc::new(Room::new(AGGREGATION_BYTES));
        let last: Vec<_> = (PROBES - NAMED..PROBES).map(ProbeId).collect();
        let same = vec![ProbeId(PROBES - 1); last.len()];
        for ids in [last, same] {
            let begun = Instant::now();
            let (_table, awaited) = table(known.clone(), &ids, by_pid(), &room).expect("a table");
            let took = begun.elapsed();
            eprintln!("{} named of {PROBES} in {took:?}", ids.len());
            assert!(awaited.is_empty());
            // Each with each would be a thousand million steps.
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
        let room = Arc::new(Room::new(AGGREGATION_BYTES));
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
    fn what_others_have_taken_is_not_the_end_of_a_histogram_whose_modules_tell() {
        let room = Arc::new(Room::new(8 * AWAITED));
        let known = vec![probe(1, false), probe(2, true)];
        let ids = [ProbeId(1), ProbeId(2)];
        let (mut table, awaited) = table(known, &ids, by_pid(), &room).expect("a table");
        assert_eq!(awaited.len(), 1);
        table.hear(&[event(1), event(2)], 0);
        let mut other = Table::new(by_pid(), Arc::clone(&room));
        other.reserve(room.left()).expect("all that is left");
        let mut refused = None;
        // As it is once its module has come.
        assert!(learn(&mut table, 1, &probe(2, false), &mut refused));
        assert_eq!(refused, None);
        table.hear(&[event(1), event(2)], 0);
        let told = table.copy().snapshot();
        assert_eq!((told.hits, told.dropped), (4, 0));
        assert!(room.left() > 0, "what it waited with is given back");
    }

    #[test]
    fn probes_that_wait_for_their_modules_are_counted_once_and_have_their_room() {
        let room = Arc::new(Room::new(8 * AWAITED));
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
