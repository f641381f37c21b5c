//! What is told of a batch that was registered.

use std::time::Duration;

use hvprobe_spec::{ProbeId, ProbeSpec};

use crate::refusal::Refused;

/// The most probes that patterns may bring a batch to.
pub const BATCH_MAX: usize = 16_384;
/// The most probes of one machine: some hundred bytes each here and, with a detour, in the guest.
pub const PROBES_MAX: usize = 65_536;

/// What becomes of a batch when a probe of it is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refusals {
    /// None of it is registered.
    #[default]
    Fail,
    /// The rest is registered.
    Skip,
}

/// A batch that was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// The new probes with the positions in the batch of what they come from, in that order. A
    /// pattern's come in the order of their addresses.
    pub probes: Vec<(usize, ProbeId)>,
    /// What was refused, in the order of the batch. Empty with [`Refusals::Fail`].
    pub skipped: Vec<Skipped>,
    /// For how long the virtual CPUs were stopped, from the request to stop until the last was let
    /// go; zero when they were not.
    pub stopped_for: Duration,
}

impl Registered {
    /// The ids of the new probes.
    #[must_use]
    pub fn ids(&self) -> Vec<ProbeId> {
        self.probes.iter().map(|(_, id)| *id).collect()
    }
}

/// A probe that was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{target}")]
pub struct Skipped {
    /// The position in the batch of what it comes from.
    pub index: usize,
    /// Its own definition, which names one place unless that was refused as a whole.
    pub definition: String,
    /// What was to be probed: the symbol, `module:symbol`, address or pattern.
    pub target: String,
    /// Where in the text of the batch's definition what is refused stands, if it is a part of it.
    pub column: Option<u32>,
    /// Why not.
    #[source]
    pub why: Refused,
}

impl Skipped {
    pub(crate) fn new(index: usize, spec: &ProbeSpec, why: Refused) -> Self {
        Self {
            index,
            definition: spec.definition.to_string(),
            target: spec.definition.target.to_string(),
            column: why.column(&spec.definition),
            why,
        }
    }
}
