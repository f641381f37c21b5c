//! Which events a client wants.
//!
//! Invariant: that is told by the [`Facts`] of an event alone, which are the same whether it was just made
//! or is read from its encoding. So a client that goes on from a position gets what it would have got.

use std::collections::HashSet;

use hvprobe_hit::event::{Event, EventKind};
use hvprobe_hit::passes_by_task;
use hvprobe_linux::task::Task;
use hvprobe_proto::v1;
use hvprobe_spec::predicate::Predicate;

use crate::wire::convert;

/// All events by default. Of the sets that are not empty, each has to have the event's own.
#[derive(Clone, Debug, Default)]
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
}

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
        let Self {
            probes,
            pids,
            tgids,
            comms,
            kinds,
            filter,
        } = self;
        probes.is_empty()
            && pids.is_empty()
            && tgids.is_empty()
            && comms.is_empty()
            && kinds.is_empty()
            && filter.is_none()
    }

    /// Whether what happens at `probe` can be wanted.
    pub(crate) fn has_probe(&self, probe: u32) -> bool {
        self.probes.is_empty() || self.probes.contains(&probe)
    }

    /// Whether an event of these `facts` is wanted.
    pub(crate) fn has(&self, facts: &Facts) -> bool {
        let of_task = |wanted: fn(&Self, &Task) -> bool| {
            let task = facts.task.as_ref();
            task.is_some_and(|task| wanted(self, task))
        };
        self.has_probe(facts.probe)
            && (self.kinds.is_empty() || self.kinds.contains(&facts.kind.into()))
            && (self.pids.is_empty() || of_task(|it, task| it.pids.contains(&task.pid)))
            && (self.tgids.is_empty() || of_task(|it, task| it.tgids.contains(&task.tgid)))
            && (self.comms.is_empty() || of_task(|it, task| it.comms.contains(convert::comm(task))))
            && self
                .filter
                .as_ref()
                .is_none_or(|filter| passes_by_task(filter, facts.task.as_ref(), facts.vcpu))
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
