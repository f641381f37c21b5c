//! Mechanisms by which a probe is planted.

use std::fmt;

/// Mechanism by which the displaced instruction takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mechanism {
    /// The probepoint holds a jump to code that records the hit and runs the instruction: no exit.
    Optimized,
    /// The host emulates the instruction on the saved registers: one exit per hit.
    Emulated,
    /// A copy in a slot runs, which ends in a jump back: one exit per hit.
    Boosted,
    /// A copy in a slot runs with interrupts held off, and ends in a second exit.
    Stepped,
}

impl Mechanism {
    /// Returns the name by which it is requested and shown.
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
