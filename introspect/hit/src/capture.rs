//! Reads what a hit captures from the guest, and decides whether the hit passes the probe's filter.
//!
//! Invariants: the guest cannot make anything here fail: what cannot be read is zeroed and marked as unreadable;
//! work is bounded by the limits of [`hvprobe_spec`].

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gva, Regs};
use hvprobe_linux::unwind::Start;
use hvprobe_spec::predicate::Predicate;
use hvprobe_spec::{Actions, Item};

use super::context::Scene;
use crate::event::Captured;
use crate::fetch::{fetch, whole_text};
use crate::filter;
use crate::stack_trace::stack_trace;

/// Appends the data that `items` capture to `into`. `regs` are the registers at the hit; at a return, `entry` are
/// the registers at the call's entry.
pub(super) fn capture<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    into: &mut Captured,
    items: &[Item],
    regs: &Regs,
    entry: Option<&Regs>,
) {
    for item in items {
        let at = match item {
            Item::Memory { base, offset, .. } => regs.get(*base).wrapping_add_signed(*offset),
            Item::Stack(word) => regs.rsp.wrapping_add(u64::from(*word) * 8),
            Item::Fetched(fetched) => {
                fetch(scene, into, fetched, regs, entry);
                continue;
            }
            Item::StackTrace(most) => {
                let start = Start {
                    regs,
                    returned: entry.is_some(),
                };
                stack_trace(scene, into, *most, start);
                continue;
            }
        };
        into.item(item.len(), |bytes| scene.read(Gva(at), bytes));
    }
}

/// Returns whether `filter`, the filter of `actions`, accepts a hit with the data in `captured`; `None` if this
/// cannot be decided. `regs` are the registers at the hit; at a return, `entry` are the registers at the call's
/// entry.
pub(super) fn passes<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    vcpu: u32,
    (actions, filter): (&Actions, &Predicate),
    captured: &Captured,
    (regs, entry): (&Regs, Option<&Regs>),
) -> Option<bool> {
    let task = scene.current();
    let seen = filter::Seen {
        actions,
        regs,
        entry,
        captured,
        task: task.as_ref(),
        vcpu,
    };
    // Memory that was captured at the entry of a call may have changed since, so it is not read again.
    let now = if entry.is_some() {
        &[][..]
    } else {
        &actions.capture
    };
    let at_return = &actions.capture_at_return;
    seen.passes(filter, &|index, bytes| {
        let item = match index.checked_sub(actions.capture.len()) {
            None => now.get(index)?,
            Some(index) => at_return.get(index)?,
        };
        match item {
            Item::Fetched(fetched) => whole_text(scene, fetched, regs, entry, bytes),
            _ => None,
        }
    })
}
