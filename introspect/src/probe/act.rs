//! What handlers do: capture, change, report.
//!
//! Invariants: nothing here fails for the guest's sake: what cannot be read is zeros and marked,
//! what cannot be written is counted; work is bounded by the limits of [`super::spec`].

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};

use super::ProbeId;
use super::guest_memory::GuestMemory;
use super::hit::Surroundings;
use super::scene::Scene;
use super::spec::{Actions, Change, Item};
use crate::event::{Captured, Event, EventKind, EventProducer};
use crate::world::Clock;

/// When and for whom a hit was taken up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) host_ns: u64,
    pub(super) guest_tsc: u64,
    /// Members whose budget this hit is beyond: a bit for each of the first 64 of the site.
    muted: u64,
}

impl Taken {
    pub(super) fn now<M: ?Sized, C: Clock>(around: &Surroundings<'_, M, C>) -> Self {
        Self {
            host_ns: around.clock.host_ns(),
            guest_tsc: around.clock.guest_tsc(),
            muted: 0,
        }
    }

    /// The hit is beyond the budget of the site's member `index`. Of a member behind the 64th it is
    /// forgotten, so that what comes after its pre-handler is reported.
    pub(super) fn mute(&mut self, index: usize) {
        let bit = u32::try_from(index).ok().and_then(|n| 1_u64.checked_shl(n));
        self.muted |= bit.unwrap_or(0);
    }

    /// Whether the hit is beyond the budget of the site's member `index`.
    pub(super) fn is_muted(&self, index: usize) -> bool {
        index < 64 && self.muted >> index & 1 == 1
    }

    /// The same hit, taken up again after the guest was held.
    pub(super) fn again(self, earlier: Self) -> Self {
        Self {
            muted: earlier.muted,
            ..self
        }
    }
}

/// An event that is yet to be completed by [`report`].
#[inline]
pub(super) fn event(
    kind: EventKind,
    vcpu: u32,
    probe: ProbeId,
    actions: &Actions,
    regs: &Regs,
    taken: &Taken,
) -> Event {
    Event {
        seq: 0,
        kind,
        probe,
        vcpu,
        host_ns: taken.host_ns,
        guest_tsc: taken.guest_tsc,
        regs: *regs,
        shown: actions.registers,
        captured: Captured::EMPTY,
        task: None,
        cost_ns: 0,
    }
}

/// Adds `items`, the task and the cost to `event`, and queues it. Returns the cost.
pub(super) fn report<M: PhysMemory + ?Sized, C: Clock>(
    scene: &Scene<'_, M, C>,
    events: &mut EventProducer,
    event: &mut Event,
    items: &[Item],
) -> u64 {
    complete(scene, event, items);
    let now = scene.around.clock.host_ns();
    event.cost_ns = now.saturating_sub(event.host_ns);
    events.push(event);
    event.cost_ns
}

/// Adds `items` and the task to `event`.
pub(super) fn complete<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    event: &mut Event,
    items: &[Item],
) {
    if !items.is_empty() {
        capture(scene, &mut event.captured, items, &event.regs);
    }
    event.task = scene.current();
}

/// Appends `items`, read with `regs`.
pub(super) fn capture<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    into: &mut Captured,
    items: &[Item],
    regs: &Regs,
) {
    let memory = scene.memory();
    for item in items {
        let at = match item {
            Item::Memory { base, offset, .. } => regs.get(*base).wrapping_add_signed(*offset),
            Item::Stack(word) => regs.rsp.wrapping_add(u64::from(*word) * 8),
        };
        into.item(item.len(), |bytes| memory.read(Gva(at), bytes).is_ok());
    }
}

/// Makes `changes`; whether all could be made. Those that can be are.
#[inline]
pub(super) fn apply<M: PhysMemory + ?Sized>(
    changes: &[Change],
    regs: &mut Regs,
    memory: &GuestMemory<'_, M>,
) -> bool {
    changes.is_empty() || apply_all(changes, regs, memory)
}

/// Apart from [`apply`], so that hits that change nothing need not have all registers at hand.
#[inline(never)]
fn apply_all<M: PhysMemory + ?Sized>(
    changes: &[Change],
    regs: &mut Regs,
    memory: &GuestMemory<'_, M>,
) -> bool {
    let mut all = true;
    for change in changes {
        match change {
            Change::Register { register, value } => regs.set(*register, *value),
            Change::Memory {
                base,
                offset,
                bytes,
            } => {
                let base = base.map_or(0, |base: Gpr| regs.get(base));
                let at = Gva(base.wrapping_add_signed(*offset));
                all &= memory.write(at, bytes).is_ok();
            }
        }
    }
    all
}
