//! Frames that nobody waits for any longer, and that get their real return addresses back.

use std::collections::VecDeque;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use rustc_hash::FxHashMap;

use super::calls::{Fate, Frame};

/// How many frames are remembered that got their return addresses back.
const VACATED_MAX: usize = 4096;
/// Frames that were given their real return addresses back, the newest few thousand.
///
/// A task that was interrupted in a detour just after it had read the trampoline's address from its
/// frame still comes to the trampoline, by way of that detour's stub.
#[derive(Clone, Debug, Default)]
pub struct Vacated {
    /// Real return addresses, by the task and the slot.
    frames: FxHashMap<(Gva, Gva), Gva>,
    /// The oldest first.
    order: VecDeque<(Gva, Gva)>,
}

impl Vacated {
    /// Remembers `frame`, and forgets the oldest if there are too many.
    pub fn add(&mut self, frame: &Frame) {
        let key = (frame.task, frame.slot);
        if self.frames.insert(key, frame.ret).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > VACATED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.frames.remove(&oldest);
        }
    }

    /// Where the frame of `task` at `slot` really returns to.
    #[must_use]
    pub fn get(&self, task: Gva, slot: Gva) -> Option<Gva> {
        self.frames.get(&(task, slot)).copied()
    }
}

/// Puts the real return address of a call nobody waits for back into its slot, while the virtual
/// CPUs stand still.
pub fn vacate(frame: &Frame, trampoline: Gva, tables: &PageTables, mem: &dyn PhysMemory) -> Fate {
    // The slot is overwritten when the function has returned, an interrupt came at the trampoline,
    // and its frame lies over the slot. Then the call is still needed.
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
