//! Frames whose real return addresses were restored, because no probe follows their calls any longer.

use std::collections::VecDeque;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use rustc_hash::FxHashMap;

use super::calls::{Fate, Frame};

/// Maximum number of frames that are remembered.
const RESTORED_MAX: usize = 4096;
/// The newest frames whose real return addresses were restored, at most `RESTORED_MAX`.
///
/// A task that was interrupted in a detour, just after the detour had read the trampoline's address from the frame,
/// still reaches the trampoline, through that detour's stub.
#[derive(Clone, Debug, Default)]
pub struct RestoredFrames {
    /// Real return addresses, by the task and the slot.
    frames: FxHashMap<(Gva, Gva), Gva>,
    /// Keys of `frames`, the oldest first.
    order: VecDeque<(Gva, Gva)>,
}

impl RestoredFrames {
    /// Remembers `frame`, and forgets the oldest frame if there are too many.
    pub fn add(&mut self, frame: &Frame) {
        let key = (frame.task, frame.slot);
        if self.frames.insert(key, frame.ret).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > RESTORED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.frames.remove(&oldest);
        }
    }

    /// Returns the real return address of the frame of `task` at `slot`.
    #[must_use]
    pub fn get(&self, task: Gva, slot: Gva) -> Option<Gva> {
        self.frames.get(&(task, slot)).copied()
    }
}

/// Writes the real return address into the slot of `frame`, if the slot still holds the trampoline's address.
/// Returns whether the calls of the frame can be forgotten. No probe may follow them any longer, and the vCPUs must
/// be stopped.
pub fn restore_frame(
    frame: &Frame,
    trampoline: Gva,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) -> Fate {
    // If the function has returned and was interrupted at the trampoline, the interrupt's frame has overwritten the
    // slot. Then the call is still needed.
    let holds = tables.read_u64(mem, frame.slot) == Ok(trampoline.0);
    if holds
        && tables
            .write(mem, frame.slot, &frame.ret.0.to_le_bytes())
            .is_ok()
    {
        Fate::Forget
    } else {
        Fate::Keep
    }
}
