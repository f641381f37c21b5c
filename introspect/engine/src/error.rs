//! Why the registry did not do what it was asked for.

use hvprobe_spec::{ProbeId, SpecError};

use crate::refusal::Refused;
use crate::registered::Skipped;
use crate::world::StopError;

/// Why a batch was not registered. None of its probes is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// One probe of the batch was refused.
    #[error("probe {index} ({definition})")]
    Refused {
        /// Its position in the batch, from 0.
        index: usize,
        /// Its definition.
        definition: Box<str>,
        /// Where in the text of that what is refused stands, if it is a part of it.
        column: Option<u32>,
        /// Why.
        #[source]
        source: Refused,
    },
    /// Some of the functions that a pattern of the batch stands for were refused.
    #[error(
        "probe {index} ({definition}): {count} of {functions} functions cannot be probed, so none \
         was planted: name those you want, or have the others skipped (`--skip-refused`); the \
         first"
    )]
    SomeRefused {
        /// The pattern's position in the batch, from 0.
        index: usize,
        /// Its definition.
        definition: String,
        /// How many were refused.
        count: usize,
        /// How many match.
        functions: usize,
        /// The first that was refused.
        #[source]
        first: Box<Skipped>,
    },
    /// No probe of the batch is to blame, but something the engine plants itself.
    #[error("probes cannot be planted now")]
    Unplanted {
        /// Why.
        #[source]
        source: Refused,
    },
    /// What one probe of the batch is to do makes no sense.
    #[error("probe {index} ({definition})")]
    Spec {
        /// Its position in the batch, from 0.
        index: usize,
        /// Its definition.
        definition: String,
        /// Why.
        #[source]
        source: SpecError,
    },
    /// The virtual CPUs could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
}

/// Why a change of registered probes failed. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No probe has this id.
    #[error("there is no probe {id} (index {index})")]
    NoSuchProbe {
        /// The id.
        id: ProbeId,
        /// Its position in the list given.
        index: usize,
    },
    /// A probe could not be armed.
    #[error("probe {id} cannot be armed")]
    Refused {
        /// The id.
        id: ProbeId,
        /// Why.
        #[source]
        source: Refused,
    },
    /// The virtual CPUs could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
}

impl From<Skipped> for RegisterError {
    fn from(skipped: Skipped) -> Self {
        Self::Refused {
            index: skipped.index,
            definition: skipped.definition.into(),
            column: skipped.column,
            source: skipped.why,
        }
    }
}
