//! Errors of the registry's operations.

use hvprobe_arch::Gva;
use hvprobe_spec::{ProbeId, SpecError};

use crate::refusal::Refused;
use crate::registered::Skipped;
use crate::world::StopError;

/// Why a batch was not registered. Then none of its probes is registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// One probe of the batch was refused.
    #[error("probe {index} ({definition})")]
    Refused {
        /// Position of the probe in the batch, from 0.
        index: usize,
        /// Definition of the probe.
        definition: Box<str>,
        /// Column of the refused part in the definition's text; `None` if no part of it is to blame.
        column: Option<u32>,
        /// Why.
        #[source]
        source: Refused,
    },
    /// Some of the functions that match a pattern of the batch were refused.
    #[error(
        "probe {index} ({definition}): {count} of {functions} functions cannot be probed, so none \
         was planted: name those you want, or have the others skipped (`--skip-refused`); the \
         first"
    )]
    SomeRefused {
        /// Position of the pattern in the batch, from 0.
        index: usize,
        /// Definition with the pattern.
        definition: String,
        /// Number of refused functions.
        count: usize,
        /// Number of matching functions.
        functions: usize,
        /// The first refused function.
        #[source]
        first: Box<Skipped>,
    },
    /// A patch of the engine's own failed; no probe of the batch is to blame.
    #[error("probes cannot be planted now")]
    Unplanted {
        /// Why.
        #[source]
        source: Refused,
    },
    /// The specification of one probe of the batch is invalid.
    #[error("probe {index} ({definition})")]
    Spec {
        /// Position of the probe in the batch, from 0.
        index: usize,
        /// Definition of the probe.
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
        /// Id that was not found.
        id: ProbeId,
        /// Position of the id in the given list.
        index: usize,
    },
    /// A probe could not be armed.
    #[error("probe {id} cannot be armed")]
    Refused {
        /// Id of the probe.
        id: ProbeId,
        /// Why.
        #[source]
        source: Refused,
    },
    /// A site could not be armed that has none of the given probes, so that no change was made.
    #[error("the site at {at} cannot be armed")]
    Site {
        /// Address of the site.
        at: Gva,
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
