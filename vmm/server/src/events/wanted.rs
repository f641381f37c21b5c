//! Which events a client wants.
//!
//! Invariant: the decision depends only on the [`Facts`] of an event, which are the same whether the event was just
//! made or is decoded. So a client that continues from a position gets the events that it would have got without
//! the interruption. The collector looks up events in the lists, which takes the same time for lists of any length,
//! and evaluates a few short filters. The cost of any other filter depends on its text, so it is evaluated by the
//! task that takes the events for its client.

use std::collections::HashSet;
use std::mem::size_of;

use hvprobe_hit::event::Event;
use hvprobe_hit::passes_by_task;
use hvprobe_linux::task::Task;
use hvprobe_machine::queue::Share;
use hvprobe_proto::v1;
use hvprobe_spec::predicate::Predicate;

use crate::wire::event;

/// Selection of events; all events by default. An event has to match each set that is not empty.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) probes: HashSet<u32>,
    pub(crate) pids: HashSet<i32>,
    pub(crate) tgids: HashSet<i32>,
    /// Names of tasks, without zero bytes.
    pub(crate) comms: HashSet<Vec<u8>>,
    /// Kinds as on the wire.
    pub(crate) kinds: HashSet<i32>,
    /// Condition that also has to hold.
    pub(crate) filter: Option<Predicate>,
    /// The memory of this selection, as shares of the pools that limit it.
    pub(crate) room: Vec<Share>,
}

/// Ratio of the memory of a list to the size of its entries: its hash table has free entries, and one more byte for
/// each entry.
const SPARE: usize = 2;
/// Bytes that the allocation of a name takes besides the name itself.
const ALLOCATED: usize = 16;
/// Bytes that a parsed filter of the greatest length takes.
const FILTER: usize = 16 << 10;

/// The facts about an event that decide whether it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    probe: u32,
    vcpu: u32,
    kind: v1::EventKind,
    task: Option<Task>,
}

impl Wanted {
    /// Selects the events of `probes`, or all events if empty.
    #[cfg(test)]
    pub(crate) fn of_probes(probes: &[u32]) -> Self {
        Self {
            probes: probes.iter().copied().collect(),
            ..Self::default()
        }
    }

    /// Whether every event is wanted.
    pub(crate) fn is_all(&self) -> bool {
        self.lists_all() && self.filter.is_none()
    }

    /// Whether the lists let every event pass.
    pub(crate) fn lists_all(&self) -> bool {
        self.probes.is_empty()
            && self.pids.is_empty()
            && self.tgids.is_empty()
            && self.comms.is_empty()
            && self.kinds.is_empty()
    }

    /// Returns the number of comparisons of the filter; 0 without one.
    pub(crate) fn comparisons(&self) -> usize {
        self.filter.as_ref().map_or(0, comparisons)
    }

    /// Returns the approximate memory of the selection, in bytes.
    pub(crate) fn weight(&self) -> usize {
        let numbers = [
            self.probes.capacity(),
            self.pids.capacity(),
            self.tgids.capacity(),
            self.kinds.capacity(),
        ];
        let entries = numbers.into_iter().fold(0, usize::saturating_add);
        let names = self.comms.iter();
        let names = names.fold(0, |sum: usize, name| {
            sum.saturating_add(name.capacity() + ALLOCATED)
        });
        let sets = entries
            .saturating_mul(size_of::<u32>())
            .saturating_add(self.comms.capacity().saturating_mul(size_of::<Vec<u8>>()));
        let filter = self.filter.as_ref().map_or(0, |_| FILTER);
        sets.saturating_mul(SPARE)
            .saturating_add(names)
            .saturating_add(filter + size_of::<Self>())
    }

    /// Whether events of `probe` can be wanted.
    pub(crate) fn has_probe(&self, probe: u32) -> bool {
        self.probes.is_empty() || self.probes.contains(&probe)
    }

    /// Whether an event with these `facts` is wanted.
    pub(crate) fn has(&self, facts: &Facts) -> bool {
        self.lists(facts)
            && self
                .filter
                .as_ref()
                .is_none_or(|filter| passes_by_task(filter, facts.task.as_ref(), facts.vcpu))
    }

    /// Whether the lists let an event with these `facts` pass.
    pub(crate) fn lists(&self, facts: &Facts) -> bool {
        let of_task = |wanted: fn(&Self, &Task) -> bool| {
            let task = facts.task.as_ref();
            task.is_some_and(|task| wanted(self, task))
        };
        self.has_probe(facts.probe)
            && (self.kinds.is_empty() || self.kinds.contains(&facts.kind.into()))
            && (self.pids.is_empty() || of_task(|it, task| it.pids.contains(&task.pid)))
            && (self.tgids.is_empty() || of_task(|it, task| it.tgids.contains(&task.tgid)))
            && (self.comms.is_empty() || of_task(|it, task| it.comms.contains(event::comm(task))))
    }
}

fn comparisons(filter: &Predicate) -> usize {
    match filter {
        Predicate::Check(_) => 1,
        Predicate::Not(of) => comparisons(of),
        Predicate::All(of) | Predicate::Any(of) => of.iter().map(comparisons).sum(),
    }
}

impl From<&Event> for Facts {
    fn from(event: &Event) -> Self {
        Self {
            probe: event.probe.0,
            vcpu: event.vcpu,
            kind: event::kind(&event.kind),
            task: event.task,
        }
    }
}

impl From<&v1::Event> for Facts {
    fn from(event: &v1::Event) -> Self {
        let task = event.task.as_ref().map(|task| {
            let mut comm = [0; 16];
            for (into, byte) in comm.iter_mut().zip(&task.comm) {
                *into = *byte;
            }
            Task {
                pid: task.pid,
                tgid: task.tgid,
                comm,
            }
        });
        Self {
            probe: event.probe,
            vcpu: event.vcpu,
            kind: event.kind(),
            task,
        }
    }
}
