//! The kernel's stack at a hit.
//!
//! Invariant: return addresses that return probes have replaced are reported as if there were no return probes.
//! Hit path: no allocation, and what is read is bounded by the number of addresses.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::unwind::{Start, Surroundings, Unwinder};
use hvprobe_spec::{FRAME, FRAMES_MAX, TextHeader};

use super::context::Scene;
use crate::event::Captured;

/// Appends at most `most` addresses of the kernel's stack to `into`, beginning at `start`.
pub(super) fn stack_trace<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    into: &mut Captured,
    most: u8,
    start: Start<'_>,
) {
    walk(scene.table.unwinder(), scene, into, most, start);
}

/// Appends at most `most` addresses of the stack of `guest` to `into`. Without an unwinder, marks the stack as
/// unreadable.
pub(crate) fn walk(
    unwinder: Option<&Unwinder>,
    guest: &(impl Surroundings + ?Sized),
    into: &mut Captured,
    most: u8,
    start: Start<'_>,
) {
    let most = usize::from(most);
    into.text(most * FRAME, |bytes| {
        let mut frames = [Gva(0); FRAMES_MAX];
        let room = frames.get_mut(..most)?;
        let (count, goes_on) = unwinder?.walk(guest, start, room);
        for (into, frame) in bytes.chunks_exact_mut(FRAME).zip(&room[..count]) {
            let [low @ .., _, _, _, _] = frame.0.to_le_bytes();
            into.copy_from_slice(&low);
        }
        Some(TextHeader {
            len: u16::try_from(count * FRAME).ok()?,
            truncated: goes_on,
        })
    });
}

impl<M: PhysMemory + ?Sized, C> Surroundings for Scene<'_, M, C> {
    fn word(&self, at: Gva) -> Option<u64> {
        self.read_u64(at)
    }

    fn returns_to(&self, found: Gva, slot: Gva) -> Option<Gva> {
        if self.table.stands_for(found).is_some() {
            return Some(found);
        }
        let to = self.table.leads_to(self.around.mem, found)?;
        if !self.table.is_trampoline(to) {
            return Some(to);
        }
        let task = self.task()?;
        let calls = &self.table.returns()?.calls;
        let known = calls.return_address(task, slot);
        known.or_else(|| self.table.restored(task, slot))
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        self.table.stands_for(at).unwrap_or((at, 0))
    }
}
