//! Reports of hits: the time at which a hit was taken up, and the event that shows it.
//!
//! Invariant: the guest cannot make anything here fail. What cannot be read is zeroed and marked as unreadable.

use hvprobe_arch::Regs;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::task::Task;
use hvprobe_spec::{Actions, Item, ProbeId};

use super::context::Scene;
use super::view::Surroundings;
use crate::capture::capture;
use crate::clock::{Clock, Reading};
use crate::event::{Captured, Event, EventKind, EventProducer};

/// Time at which a hit was taken up, and the members of the site for which the hit is not reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) at: Reading,
    /// Members for which the hit is not reported: it exceeds their budget, a condition rejects it, or it is missed.
    /// A bit for each of the first 64 members of the site.
    muted: u64,
}

impl Taken {
    #[inline]
    pub(super) fn now<M: ?Sized, C: Clock>(around: &Surroundings<'_, M, C>) -> Self {
        Self {
            at: around.clock.now(),
            muted: 0,
        }
    }

    /// Notes that the hit is not reported for the site's member `index`. This is not remembered for members after
    /// the 64th, so their post-handlers and faults are reported nevertheless.
    pub(super) fn mute(&mut self, index: usize) {
        let bit = u32::try_from(index).ok().and_then(|n| 1_u64.checked_shl(n));
        self.muted |= bit.unwrap_or(0);
    }

    /// Returns whether the hit is not reported for the site's member `index`.
    pub(super) fn is_muted(&self, index: usize) -> bool {
        index < 64 && self.muted >> index & 1 == 1
    }

    /// Returns the hit `earlier`, taken up again at the time of `self` after the guest was held.
    pub(super) fn again(self, earlier: Self) -> Self {
        Self {
            muted: earlier.muted,
            ..self
        }
    }
}

/// Content of an event, without the data that is read from the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    vcpu: u32,
    probe: ProbeId,
    actions: &'a Actions,
    regs: &'a Regs,
    taken: &'a Taken,
}

impl<'a> Seen<'a> {
    #[inline]
    pub(super) fn new(
        vcpu: u32,
        probe: ProbeId,
        actions: &'a Actions,
        regs: &'a Regs,
        taken: &'a Taken,
    ) -> Self {
        Self {
            vcpu,
            probe,
            actions,
            regs,
            taken,
        }
    }

    /// Queues the event, with the task and with the data that `items` capture. Returns its cost in nanoseconds. An
    /// event is large, so it is made in its place in the queue: `kind` is a function, and data from the guest is
    /// read directly into that place.
    #[inline]
    pub(super) fn report<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        events: &mut EventProducer,
        kind: impl FnOnce() -> EventKind,
        items: &[Item],
    ) -> u64 {
        if !items.is_empty() {
            return self.report_read(scene, events, kind, |event| {
                self.capture(scene, event, items)
            });
        }
        let task = scene.current();
        let cost_ns = scene.around.clock.since(&self.taken.at);
        events.push(
            || self.event(kind(), task, cost_ns),
            |event| event.regs = *self.regs,
        );
        cost_ns
    }

    /// Like [`Seen::report`], but puts `captured`, which was read before, in front of the data that `items`
    /// capture.
    pub(super) fn report_with<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        events: &mut EventProducer,
        kind: impl FnOnce() -> EventKind,
        captured: &Captured,
        items: &[Item],
    ) -> u64 {
        self.report_read(scene, events, kind, |event| {
            event.captured = *captured;
            self.capture(scene, event, items);
        })
    }

    /// Like [`Seen::report`], but `read` adds the data from the guest. Not inlined, so that hits for which nothing
    /// is read have few instructions.
    #[inline(never)]
    fn report_read<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        events: &mut EventProducer,
        kind: impl FnOnce() -> EventKind,
        read: impl FnOnce(&mut Event),
    ) -> u64 {
        let task = scene.current();
        let cost_ns = || scene.around.clock.since(&self.taken.at);
        let mut measured = None;
        events.push(
            || self.event(kind(), task, 0),
            |event| {
                event.regs = *self.regs;
                read(event);
                event.cost_ns = *measured.insert(cost_ns());
            },
        );
        measured.unwrap_or_else(cost_ns)
    }

    fn capture<M: PhysMemory + ?Sized, C>(
        &self,
        scene: &Scene<'_, M, C>,
        event: &mut Event,
        items: &[Item],
    ) {
        let entry = match &event.kind {
            EventKind::Return(call) => Some(&call.entry),
            EventKind::Hit | EventKind::Post | EventKind::Fault { .. } => None,
        };
        capture(scene, &mut event.captured, items, self.regs, entry);
    }

    /// Returns the event, with the task and with the data that `items` capture, but without a cost.
    pub(super) fn event_now<M: PhysMemory + ?Sized, C>(
        &self,
        scene: &Scene<'_, M, C>,
        kind: EventKind,
        items: &[Item],
    ) -> Event {
        let mut event = self.event(kind, scene.current(), 0);
        event.regs = *self.regs;
        self.capture(scene, &mut event, items);
        event
    }

    /// Returns the event without the parts that are added in its place in the queue: the registers, and the data
    /// that is read from the guest.
    #[inline]
    fn event(&self, kind: EventKind, task: Option<Task>, cost_ns: u64) -> Event {
        Event {
            seq: 0,
            kind,
            probe: self.probe,
            vcpu: self.vcpu,
            host_ns: self.taken.at.host_ns,
            guest_tsc: self.taken.at.guest_tsc,
            regs: Regs::default(),
            shown: self.actions.registers,
            captured: Captured::nothing(),
            task,
            cost_ns,
        }
    }
}
