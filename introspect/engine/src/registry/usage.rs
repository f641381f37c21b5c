//! How much of what is handed out is in use.

use crate::code::detours::Detours;
use crate::registry::state::Registry;

/// What a machine's probes, and what is left behind of those that have gone, take of what is handed out to
/// them. What has left gives all of it back, though not at once: not before nobody can be on the way through it, and
/// somebody wants it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Out-of-line slots.
    pub slots: u64,
    /// Bytes of detours, and of the code that calls return to.
    pub code: u64,
    /// Bytes of counters that detours count in.
    pub counters: u64,
    /// Bytes of instances of calls that detours follow.
    pub instances: u64,
    /// Slots and sources of records that are kept of former probes.
    pub left_behind: u64,
}

impl Registry {
    /// What of all that is handed out is in use now.
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
