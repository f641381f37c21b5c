//! The model of the probed places.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;

use super::super::*;

/// An instruction that is probed.
pub(super) struct Spot {
    pub(super) symbol: &'static str,
    pub(super) offset: u64,
    /// Length of the instruction.
    pub(super) len: u64,
    pub(super) emulated: bool,
}

pub(super) const fn spot(symbol: &'static str, offset: u64, len: u64, emulated: bool) -> Spot {
    Spot {
        symbol,
        offset,
        len,
        emulated,
    }
}

impl Spot {
    pub(super) fn is_entry(&self) -> bool {
        self.offset == 0
    }
}

pub(super) const SPOTS: [Spot; 6] = [
    spot("filler_000", 0, 1, true),
    spot("filler_001", 0, 4, false),
    spot("filler_002", 0, 1, true),
    spot("vfs_read", 9, 1, true),
    spot("vfs_read", 0xd, 4, false),
    spot("filler_003", 0, 4, false),
];
/// The byte that the guest writes over its own code: a `nop`.
pub(super) const REWRITTEN: u8 = 0x90;
/// Kind of probe at a spot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flavour {
    Hits,
    HitsAndPost,
    /// A return probe at an entry; elsewhere the same as `Hits`.
    Returns,
}

/// The expected state of a probe.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    pub(super) flavour: Flavour,
    pub(super) disabled: bool,
    pub(super) counts: Counts,
}

/// A spot with the guest's code and the probes there.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) spot: &'static Spot,
    pub(super) at: Gva,
    /// First byte of the guest's own code as it was built.
    pub(super) built: u8,
    /// First byte of the guest's own code as it is now.
    pub(super) own: u8,
    /// First byte of the guest's own code when the first of the probes was registered.
    pub(super) planned: u8,
    pub(super) probes: BTreeMap<ProbeId, Probe>,
    pub(super) armed: bool,
    /// Whether the guest wrote over our int3.
    pub(super) overwritten: bool,
    pub(super) gone: bool,
}

impl Place {
    pub(super) fn byte(&self) -> u8 {
        if self.armed && !self.overwritten {
            INT3
        } else {
            self.own
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        let as_left = if self.armed {
            !self.overwritten
        } else {
            self.own == self.planned
        };
        self.gone || !as_left
    }

    /// Arms or disarms the place, as its probes require. Returns `None` if it must be armed and cannot be.
    pub(super) fn settle(mut self, switched_on: bool) -> Option<Self> {
        let wanted = switched_on && self.probes.values().any(|probe| !probe.disabled);
        if wanted && !self.armed && !self.gone {
            if self.own != self.planned {
                return None;
            }
            self.armed = true;
            self.overwritten = false;
        } else if !wanted && self.armed {
            self.armed = false;
            self.gone |= self.overwritten;
        }
        if self.probes.is_empty() {
            self.gone = false;
        }
        Some(self)
    }

    /// Returns the end of the displaced instruction.
    pub(super) fn next(&self) -> Gva {
        let len = if self.planned == REWRITTEN {
            1
        } else {
            self.spot.len
        };
        self.at.wrapping_add(len)
    }

    pub(super) fn mechanism(&self) -> Mechanism {
        // If all probes are disabled, returns the mechanism with all enabled.
        let idle = self.probes.values().all(|probe| probe.disabled);
        let counts = |probe: &Probe| idle || !probe.disabled;
        let post = |probe: &Probe| counts(probe) && probe.flavour == Flavour::HitsAndPost;
        if self.spot.emulated || self.planned == REWRITTEN {
            Mechanism::Emulated
        } else if self.probes.values().any(post) {
            Mechanism::Stepped
        } else {
            Mechanism::Boosted
        }
    }
}
