//! Mechanisms by which a probe is planted.

use std::fmt;

/// Mechanism by which the displaced instruction takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mechanism {
    /// The probepoint holds a jump to a detour, which records the hit and runs the instruction: no exit.
    Optimized,
    /// The host emulates the instruction on the saved registers: one exit per hit.
    Emulated,
    /// A copy of the instruction runs in an out-of-line slot and is followed by a jump back: one exit per hit.
    Boosted,
    /// A copy of the instruction runs in an out-of-line slot, with interrupts held off, and is followed by a second
    /// exit: two exits per hit.
    Stepped,
}

impl Mechanism {
    /// Returns the name by which the mechanism is requested and shown.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::Emulated => "emulated",
            Self::Boosted => "boosted",
            Self::Stepped => "stepped",
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
