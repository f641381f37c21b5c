//! The mechanisms by which a probe is planted.

use std::fmt;

/// How the displaced instruction takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mechanism {
    /// The probepoint holds a jump to code that records the hit and carries the instruction out: no
    /// exit.
    Optimized,
    /// The host carries it out on the saved registers: one exit per hit.
    Emulated,
    /// A copy in a slot is run, which ends in a jump back: one exit per hit.
    Boosted,
    /// A copy in a slot is run with interrupts held off, and ends in a second exit.
    Stepped,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimized => "optimized",
            Self::Emulated => "emulated",
            Self::Boosted => "boosted",
            Self::Stepped => "stepped",
        })
    }
}
