//! Resources of the hidden region that are in use.

use crate::code::detours::Detours;
use crate::registry::state::Registry;

/// Resources of the hidden region in use by probes, including ghosts of probes that have left. The resources of
/// ghosts are all released in time: when no task can be in their code any more and the room is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Out-of-line slots.
    pub slots: u64,
    /// Bytes of detours and of stubs, the code to which followed calls return.
    pub code: u64,
    /// Bytes of counters of detours.
    pub counters: u64,
    /// Bytes of instances of calls that are followed without exits.
    pub instances: u64,
    /// Number of ghosts: slots and record sources of former probes.
    pub left_behind: u64,
}

impl Registry {
    /// Returns the resources in use now.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let region = &self.code.region;
        let detours = region.detours.as_ref();
        let in_use = detours.map(Detours::in_use).unwrap_or_default();
        let [code, counters, instances] = in_use;
        let left_behind = self.code.ghost_sources.len() + self.code.ghost_slots.len();
        Usage {
            slots: region.slots_in_use(),
            code,
            counters,
            instances,
            left_behind: left_behind as u64,
        }
    }
}
