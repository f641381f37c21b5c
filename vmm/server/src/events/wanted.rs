//! Which events a client wants.
//!
//! Invariant: that is told by the [`Facts`] of an event alone, which are the same whether it was just made
//! or is read from its encoding. So a client that goes on from a position gets what it would have got. Lists
//! cost the same however long they are, and are looked at by the collector, as are a few short filters; any other
//! costs what it says, and is evaluated where its own client's events are taken.

use std::collections::HashSet;
use std::mem::size_of;

use hvprobe_hit::event::{Event, EventKind};
use hvprobe_hit::passes_by_task;
use hvprobe_linux::task::Task;
use hvprobe_machine::queue::Share;
use hvprobe_proto::v1;
use hvprobe_spec::predicate::Predicate;

use crate::wire::convert;

/// All events by default. Of the sets that are not empty, each has to have the event's own.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) probes: HashSet<u32>,
    pub(crate) pids: HashSet<i32>,
    pub(crate) tgids: HashSet<i32>,
    /// Names of tasks, without zero bytes.
    pub(crate) comms: HashSet<Vec<u8>>,
    /// As they are on the wire.
    pub(crate) kinds: HashSet<i32>,
    /// What has to hold besides.
    pub(crate) filter: Option<Predicate>,
    /// The room that all this takes, where it is counted.
    pub(crate) room: Vec<Share>,
}

/// What an entry of a list takes besides itself: a byte of its table, and the places that are free in that.
const SPARE: usize = 2;
/// What a name takes besides its bytes where it is allocated.
const ALLOCATED: usize = 16;
/// What a filter of the greatest length takes, read.
const FILTER: usize = 16 << 10;

/// What of an event decides whether it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    probe: u32,
    vcpu: u32,
    kind: v1::EventKind,
    task: Option<Task>,
}

impl Wanted {
    /// Those of `probes`, or all if there are none.
    #[cfg(test)]
    pub(crate) fn of_probes(probes: &[u32]) -> Self {
        Self {
            probes: probes.iter().copied().collect(),
            ..Self::default()
        }
    }

    /// Whether that is every event.
    pub(crate) fn is_all(&self) -> bool {
        self.lists_all() && self.filter.is_none()
    }

    /// Whether no list leaves an event out.
    pub(crate) fn lists_all(&self) -> bool {
        self.probes.is_empty()
            && self.pids.is_empty()
            && self.tgids.is_empty()
            && self.comms.is_empty()
            && self.kinds.is_empty()
    }

    /// How many comparisons its filter has.
    pub(crate) fn comparisons(&self) -> usize {
        self.filter.as_ref().map_or(0, comparisons)
    }

    /// The memory that it takes, about.
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

    /// Whether what happens at `probe` can be wanted.
    pub(crate) fn has_probe(&self, probe: u32) -> bool {
        self.probes.is_empty() || self.probes.contains(&probe)
    }

    /// Whether an event of these `facts` is wanted.
    pub(crate) fn has(&self, facts: &Facts) -> bool {
        self.lists(facts)
            && self
                .filter
                .as_ref()
                .is_none_or(|filter| passes_by_task(filter, facts.task.as_ref(), facts.vcpu))
    }

    /// Whether no list leaves out an event of these `facts`.
    pub(crate) fn lists(&self, facts: &Facts) -> bool {
        let of_task = |wanted: fn(&Self, &Task) -> bool| {
            let task = facts.task.as_ref();
            task.is_some_and(|task| wanted(self, task))
        };
        self.has_probe(facts.probe)
            && (self.kinds.is_empty() || self.kinds.contains(&facts.kind.into()))
            && (self.pids.is_empty() || of_task(|it, task| it.pids.contains(&task.pid)))
            && (self.tgids.is_empty() || of_task(|it, task| it.tgids.contains(&task.tgid)))
            && (self.comms.is_empty() || of_task(|it, task| it.comms.contains(convert::comm(task))))
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
            kind: match event.kind {
                EventKind::Hit => v1::EventKind::Hit,
                EventKind::Post => v1::EventKind::Post,
                EventKind::Fault { .. } => v1::EventKind::Fault,
                EventKind::Return(_) => v1::EventKind::Return,
            },
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
