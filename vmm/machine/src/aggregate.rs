//! Histograms of a machine's events.
//!
//! Invariants: nothing that the collector has handed on is left out, so that a histogram is as exact as the
//! counts of what was dropped before; who reads one does not stop the guest; one that nobody holds any more
//! is gone with the next event.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hvprobe_hit::aggregate::{Snapshot, Table};
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
/// How long reading waits for what has happened.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why there is no such histogram.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AggregateError {
    /// The machine has as many as it may.
    #[error("the machine has {AGGREGATIONS_MAX} histograms already")]
    TooMany,
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
    table: Arc<Mutex<Table>>,
    /// Counts those that there are.
    _one: Arc<()>,
}

impl Aggregation {
    /// What it counts.
    #[must_use]
    pub fn histogram(&self) -> Histogram {
        self.table().histogram().clone()
    }

    /// What it counts, as it is of the first of its probes; nothing if it has no probe.
    #[must_use]
    pub fn what(&self) -> Option<Aggregate> {
        self.table().what().cloned()
    }

    /// What was counted of what was handed on; see [`Machine::flush_events`].
    #[must_use]
    pub fn read(&self) -> Snapshot {
        // The collector waits for no more than the copy.
        let copied = self.table().copy();
        copied.snapshot()
    }

    /// Stops counting, or goes on with it.
    pub fn pause(&self, paused: bool) {
        self.table().pause(paused);
    }

    /// Begins anew.
    pub fn clear(&self) {
        self.table().clear();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What fills a table.
#[derive(Debug)]
struct Filler(Weak<Mutex<Table>>);

impl Listen for Filler {
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool {
        let table = self.0.upgrade();
        if let Some(table) = &table {
            lock(table).hear(events, dropped);
        }
        table.is_some()
    }

    fn note(&mut self, _: &[ThrottleNotice]) {}
}

impl Machine {
    /// Counts the events of `probes` from now on, as `histogram` says.
    ///
    /// # Errors
    /// When there is no such probe, or its events do not have what is asked for.
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
        let known = self.probes();
        let mut what = Vec::with_capacity(probes.len());
        for (index, id) in probes.iter().copied().enumerate() {
            let Some(probe) = known.iter().find(|probe| probe.id == id) else {
                return Err(AggregateError::NoSuchProbe { index, id });
            };
            let aggregate = probe.aggregate(&histogram).map_err(|source| {
                let name = probe.name.clone();
                AggregateError::Field {
                    index,
                    name,
                    source,
                }
            })?;
            what.push((id, Arc::clone(&probe.actions), aggregate));
        }
        let mut table = Table::new(histogram);
        for (id, actions, aggregate) in what {
            table.count(id, actions, aggregate);
        }
        let table = Arc::new(Mutex::new(table));
        self.listen(Box::new(Filler(Arc::downgrade(&table))));
        Ok(Aggregation { table, _one: one })
    }

    /// Returns when all events of what has happened are handed on. Waits for the guest a moment at most.
    pub fn flush_events(&self) {
        self.shared.detours.catch_up();
        if !self.flush.wait(PATIENCE) {
            warn!(
                machine = self.config.name,
                "events are not handed on in time"
            );
        }
    }
}
