//! Explains probe definitions for a kernel that is not running, for `hvprobe explain`. Needs no machine.
//!
//! Invariant: requests are parsed, checked and refused by the same rules as when probes are registered.

use hvprobe_engine::Explained;
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind};
use hvprobe_proto::wire::probe_spec;
use hvprobe_spec::chain;
use hvprobe_vmlinux::Kernel;
use tonic::Status;

use crate::refusal::refused;

/// Explanation of one probe.
#[derive(Debug)]
pub struct Explanation {
    /// Definition of the probe, for one place. If a definition of several places is refused as a whole, that
    /// definition.
    pub definition: String,
    /// What the definition resolves to, or why it is refused.
    pub outcome: Result<Explained, Status>,
}

/// Why nothing can be explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The kernel cannot be read.
    #[error("the kernel cannot be read")]
    Image(#[from] ImageError),
    /// A request is invalid.
    #[error("{}", .0.message())]
    Request(#[from] Status),
}

/// Explains `probes` for `kernel`, in their order.
///
/// # Errors
/// When the kernel cannot be read, or a request is invalid for any kernel.
pub fn explain(
    kernel: &Kernel,
    probes: Vec<v1::ProbeSpec>,
) -> Result<Vec<Explanation>, ExplainError> {
    let specs = probe_spec::specs(probes).map_err(Status::from)?;
    for (index, spec) in specs.iter().enumerate() {
        spec.check().map_err(|error| {
            let message = format!("{}: {}", spec.definition, chain(&error));
            let failure = Failure::invalid(ErrorKind::BadActions, message);
            Status::from(failure.at_index(index))
        })?;
    }
    let image = KernelImage::parse(kernel.elf())?;
    let explained = specs.iter().enumerate().flat_map(|(index, spec)| {
        let all = hvprobe_engine::explain(&image, spec).into_iter();
        all.map(move |one| match one {
            Ok(explained) => Explanation {
                definition: explained.definition.clone(),
                outcome: Ok(explained),
            },
            Err(skipped) => {
                let failure = refused(chain(&skipped.why), &skipped.why).at_index(index);
                Explanation {
                    outcome: Err(failure.at_known(skipped.column).into()),
                    definition: skipped.definition,
                }
            }
        })
    });
    Ok(explained.collect())
}
