//! The result of registering a batch.

use std::time::Duration;

use hvprobe_spec::{ProbeId, ProbeSpec};

use crate::refusal::Refused;

/// Maximum number of probes in a batch after its patterns are expanded.
pub const BATCH_MAX: usize = 16_384;
/// Maximum number of probes of one machine. Each takes some hundred bytes on the host and, with a detour, also in
/// the guest.
pub const PROBES_MAX: usize = 65_536;

/// What happens to a batch when one of its probes is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refusals {
    /// No probe of the batch is registered.
    #[default]
    Fail,
    /// The other probes are registered.
    Skip,
}

/// A batch that was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Ids of the new probes, each with the position of its definition in the batch, in the order of the batch.
    /// The probes of a pattern are in the order of their addresses.
    pub probes: Vec<(usize, ProbeId)>,
    /// Refused probes, in the order of the batch. Empty with [`Refusals::Fail`].
    pub skipped: Vec<Skipped>,
    /// Time that the virtual CPUs were stopped, from the request to stop until the last was released; zero if
    /// they were not stopped.
    pub stopped_for: Duration,
}

impl Registered {
    /// Returns the ids of the new probes.
    #[must_use]
    pub fn ids(&self) -> Vec<ProbeId> {
        self.probes.iter().map(|(_, id)| *id).collect()
    }
}

/// A probe that was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{target}")]
pub struct Skipped {
    /// Position of the probe's definition in the batch.
    pub index: usize,
    /// Definition of this one probe. If a pattern was refused as a whole, the definition with the pattern.
    pub definition: String,
    /// Target of the probe: a symbol, `module:symbol`, an address or a pattern.
    pub target: String,
    /// Column of the refused part in the text of the definition at `index`; `None` if no part of that text is to
    /// blame.
    pub column: Option<u32>,
    /// Reason for the refusal.
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
