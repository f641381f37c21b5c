//! The entries of a histogram while it counts.
//!
//! Invariant: the memory for a histogram's entries, and for its data about probes, is taken from the budget that
//! all histograms of the machine share. It is released when the histogram is dropped.

use std::collections::{HashMap, HashSet};
use std::mem::size_of;
use std::sync::Arc;

use hvprobe_spec::aggregate::{Aggregate, Measured, Part};
use hvprobe_spec::histogram::{Histogram, KeyForm, Order, ValueForm};
use hvprobe_spec::predicate::{Field, Predicate};
use hvprobe_spec::{Actions, ProbeId};

use super::budget::MemoryBudget;
use super::key::{parts, push_number, push_stack_trace, push_text, push_unreadable};
use super::snapshot::{Row, Snapshot, Sum, sort};
use crate::event::{Event, EventKind};
use crate::filter::{Seen, no_more};

/// Maximum total size of the keys of a histogram, in bytes.
const KEY_BYTES: usize = 16 << 20;
/// Approximate overhead of an allocation, in bytes.
const ALLOCATED: usize = 16;
/// Approximate number of slots of a map for each used slot.
const SPARE: usize = 2;

/// Approximate memory for a probe whose events are not counted, in bytes.
const UNCOUNTED: usize = SPARE * size_of::<ProbeId>() + ALLOCATED;

/// There is no room for another probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Number of bytes that are left in the budget.
    pub left: usize,
}

/// A histogram that counts.
#[derive(Debug)]
pub struct Table {
    histogram: Histogram,
    probes: HashMap<ProbeId, Counted>,
    /// Probes for whose definition there was no room; their events are dropped.
    uncounted: HashSet<ProbeId>,
    rows: HashMap<Box<[u8]>, Entry>,
    /// Total size of the stored keys, in bytes.
    bytes: usize,
    paused: bool,
    hits: u64,
    dropped: u64,
    lost: u64,
    /// Buffer in which keys are made.
    key: Vec<u8>,
    budget: Arc<MemoryBudget>,
    /// Bytes of the budget that are taken for entries.
    rows_taken: usize,
    /// Bytes of the budget that are taken for data about probes.
    probes_taken: usize,
}

/// Which events of a probe are counted, and by which keys.
#[derive(Debug)]
struct Counted {
    actions: Arc<Actions>,
    what: Aggregate,
}

#[derive(Clone, Debug)]
struct Entry {
    hits: u64,
    sums: Box<[Sum]>,
    comm: Option<[u8; 16]>,
}

impl Counted {
    /// Returns the approximate size in memory.
    fn weight(&self) -> usize {
        let Aggregate {
            keys,
            values,
            filter,
        } = &self.what;
        let filter = filter.as_ref().map_or(0, parts_of);
        SPARE * size_of::<(ProbeId, Self)>()
            + keys.len() * (size_of::<Part>() + ALLOCATED)
            + values.len() * (size_of::<Measured>() + ALLOCATED)
            + filter * (size_of::<Predicate>() + ALLOCATED)
    }
}

/// Returns the number of predicates that `predicate` consists of.
fn parts_of(predicate: &Predicate) -> usize {
    match predicate {
        Predicate::Check(_) => 1,
        Predicate::Not(of) => 1 + parts_of(of),
        Predicate::All(of) | Predicate::Any(of) => 1 + of.iter().map(parts_of).sum::<usize>(),
    }
}

impl Entry {
    /// Returns the approximate size in memory of an entry with a key of `key` bytes and with `sums` sums.
    fn weight(key: usize, sums: usize) -> usize {
        SPARE * size_of::<(Box<[u8]>, Self)>() + key + sums * size_of::<Sum>() + 2 * ALLOCATED
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.budget.release(self.rows_taken + self.probes_taken);
    }
}

impl Table {
    /// Creates a table for `histogram`, without probes. Its memory is taken from `budget`.
    #[must_use]
    pub fn new(histogram: Histogram, budget: Arc<MemoryBudget>) -> Self {
        Self {
            histogram,
            probes: HashMap::new(),
            uncounted: HashSet::new(),
            rows: HashMap::new(),
            bytes: 0,
            paused: false,
            hits: 0,
            dropped: 0,
            lost: 0,
            key: Vec::new(),
            budget,
            rows_taken: 0,
            probes_taken: 0,
        }
    }

    /// Adds `probe` to the probes whose events are counted, or replaces its definition. `what` says which of its
    /// events are counted and how; `actions` are what the probe does at its hits.
    ///
    /// # Errors
    /// When there is no room for the probe's definition.
    pub fn count(
        &mut self,
        probe: ProbeId,
        actions: Arc<Actions>,
        what: Aggregate,
    ) -> Result<(), NoRoom> {
        let counted = Counted { actions, what };
        let before = self.probes.get(&probe).map_or(0, Counted::weight);
        self.exchange(before, counted.weight())?;
        self.probes.insert(probe, counted);
        Ok(())
    }

    /// Like [`Table::count`], for a probe whose definition was not known when `reserved` bytes were
    /// [reserved](Self::reserve) for it. The definition uses these bytes, and the bytes of an earlier definition.
    /// If they are not enough and no more are left in the budget, only the hits of this probe are dropped: other
    /// probes must still be counted when other tables have used up the budget meanwhile.
    pub fn learn(
        &mut self,
        probe: ProbeId,
        actions: Arc<Actions>,
        what: Aggregate,
        reserved: usize,
    ) {
        let counted = Counted { actions, what };
        let before = self.probes.remove(&probe);
        let before = reserved + before.map_or(0, |before| before.weight());
        if self.exchange(before, counted.weight()).is_ok() {
            self.probes.insert(probe, counted);
        } else {
            // `UNCOUNTED` is far less than was reserved.
            let kept = self.exchange(before, UNCOUNTED);
            debug_assert!(kept.is_ok(), "{kept:?}");
            self.uncounted.insert(probe);
        }
    }

    /// Releases `bytes` bytes that were [reserved](Self::reserve).
    pub fn release(&mut self, bytes: usize) {
        let released = self.exchange(bytes, 0);
        debug_assert!(released.is_ok(), "{released:?}");
    }

    /// Replaces `before` of the bytes that are taken for probes by `after` bytes.
    fn exchange(&mut self, before: usize, after: usize) -> Result<(), NoRoom> {
        if let Some(less) = before.checked_sub(after) {
            self.probes_taken -= less;
            self.budget.release(less);
            return Ok(());
        }
        self.reserve(after - before)
    }

    /// Takes `bytes` bytes for other data about probes. They stay taken until [`Self::learn`] uses them,
    /// [`Self::release`] releases them, or the table is dropped.
    ///
    /// # Errors
    /// When fewer bytes are left.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), NoRoom> {
        if !self.budget.take(bytes) {
            let left = self.budget.left();
            return Err(NoRoom { left });
        }
        self.probes_taken += bytes;
        Ok(())
    }

    /// Returns the definition of the histogram.
    #[must_use]
    pub fn histogram(&self) -> &Histogram {
        &self.histogram
    }

    /// Returns what is counted of the probe with the lowest id; `None` if there is no probe.
    #[must_use]
    pub fn what(&self) -> Option<&Aggregate> {
        let first = self.probes.iter().min_by_key(|(id, _)| id.0);
        first.map(|(_, counted)| &counted.what)
    }

    /// Pauses the counting, or continues it.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Discards everything that was counted.
    pub fn clear(&mut self) {
        self.rows = HashMap::new();
        self.budget.release(self.rows_taken);
        (self.bytes, self.rows_taken) = (0, 0);
        (self.hits, self.dropped, self.lost) = (0, 0, 0);
    }

    /// Counts `events`. Before these, `lost` other events were lost.
    pub fn hear(&mut self, events: &[Event], lost: u64) {
        if self.paused {
            return;
        }
        self.lost = self.lost.saturating_add(lost);
        for event in events {
            self.hear_one(event);
        }
    }

    fn hear_one(&mut self, event: &Event) {
        let call = match &event.kind {
            EventKind::Hit => None,
            EventKind::Return(call) => Some(call),
            EventKind::Post | EventKind::Fault { .. } => return,
        };
        let Some(Counted { actions, what }) = self.probes.get(&event.probe) else {
            if self.uncounted.contains(&event.probe) {
                self.dropped += 1;
            }
            return;
        };
        let seen = Seen {
            actions,
            regs: &event.regs,
            entry: call.map(|call| &call.entry),
            captured: &event.captured,
            task: event.task.as_ref(),
            vcpu: event.vcpu,
        };
        match what.filter.as_ref().map(|it| seen.passes(it, &no_more)) {
            None | Some(Some(true)) => {}
            Some(Some(false)) => return,
            Some(None) => {
                self.lost = self.lost.saturating_add(1);
                return;
            }
        }
        let number = |of: &Measured| number(of, event, &seen);
        let key = &mut self.key;
        key.clear();
        for part in &what.keys {
            let read = match &part.of {
                Measured::Field(Field::Text(source)) => {
                    seen.bytes(source, |text| push_text(key, text))
                }
                Measured::StackTrace(item) => {
                    seen.item(*item).map(|stack| push_stack_trace(key, stack))
                }
                of => number(of).map(|(value, _)| push_number(key, part, value)),
            };
            if read.is_none() {
                push_unreadable(key);
            }
        }
        if !self.rows.contains_key(self.key.as_slice()) {
            let bytes = self.bytes + self.key.len();
            let weight = Entry::weight(self.key.len(), what.values.len());
            let is_full = self.rows.len() >= self.histogram.size || bytes > KEY_BYTES;
            if is_full || !self.budget.take(weight) {
                self.dropped += 1;
                return;
            }
            self.bytes = bytes;
            self.rows_taken += weight;
            let entry = Entry {
                hits: 0,
                sums: vec![Sum::default(); what.values.len()].into(),
                comm: event.task.as_ref().map(|task| task.comm),
            };
            self.rows.insert(self.key.as_slice().into(), entry);
        }
        let Some(entry) = self.rows.get_mut(self.key.as_slice()) else {
            return;
        };
        self.hits += 1;
        entry.hits += 1;
        for (sum, of) in entry.sums.iter_mut().zip(&what.values) {
            if let Some((value, signed)) = number(of) {
                sum.add(match signed {
                    true => value.cast_signed().into(),
                    false => value.into(),
                });
            }
        }
    }

    /// Returns a copy of the current content, from which a [`Snapshot`] can be made without the table.
    #[must_use]
    pub fn copy(&self) -> Copied {
        let keys = self.what().into_iter().flat_map(|what| &what.keys);
        Copied {
            entries: self
                .rows
                .iter()
                .map(|(key, it)| (key.clone(), it.clone()))
                .collect(),
            sort: self.histogram.sort.clone(),
            signed: keys.map(is_signed).collect(),
            forms: self.histogram.values.iter().map(|it| it.form).collect(),
            hits: self.hits,
            dropped: self.dropped,
            lost: self.lost,
        }
    }
}

/// A copy of a table's content.
#[derive(Debug)]
pub struct Copied {
    entries: Vec<(Box<[u8]>, Entry)>,
    sort: Vec<Order>,
    signed: Vec<bool>,
    forms: Vec<ValueForm>,
    hits: u64,
    dropped: u64,
    lost: u64,
}

impl Copied {
    /// Returns the content with its entries sorted.
    #[must_use]
    pub fn snapshot(self) -> Snapshot {
        let rows = self.entries.into_iter().map(|(key, entry)| Row {
            keys: parts(&key),
            hits: entry.hits,
            sums: entry.sums.into(),
            comm: entry.comm,
        });
        let mut rows: Vec<_> = rows.collect();
        sort(&mut rows, &self.sort, &self.signed, &self.forms);
        Snapshot {
            rows,
            hits: self.hits,
            dropped: self.dropped,
            lost: self.lost,
        }
    }
}

/// Returns the value of `of` for an event, extended to 64 bits, and whether it is signed. `None` if the value is
/// not known.
fn number(of: &Measured, event: &Event, seen: &Seen<'_>) -> Option<(u64, bool)> {
    match of {
        Measured::Field(field) => seen.number(field),
        Measured::Time => known_time(event.host_ns).map(|ns| (ns, false)),
        Measured::Duration => {
            let EventKind::Return(call) = &event.kind else {
                return None;
            };
            let entry = known_time(call.entry_ns)?;
            Some((known_time(event.host_ns)?.saturating_sub(entry), false))
        }
        Measured::Divided { of, by } => {
            let (number, is_signed) = number(of, event, seen)?;
            let divided = match is_signed {
                true => {
                    let wide = i128::from(number.cast_signed()) / i128::from(by.get());
                    i64::try_from(wide).ok()?.cast_unsigned()
                }
                false => number / by.get(),
            };
            Some((divided, is_signed))
        }
        Measured::StackTrace(_) => None,
    }
}

/// Returns the time, if it is known.
fn known_time(ns: u64) -> Option<u64> {
    (ns > 0).then_some(ns)
}

/// Returns whether a key is a signed number.
fn is_signed(part: &Part) -> bool {
    part.of.is_signed()
        && matches!(
            part.form,
            KeyForm::Plain | KeyForm::ExecName | KeyForm::Bits | KeyForm::Buckets(_)
        )
}

#[cfg(test)]
mod tests;
