//! What definitions come to in a kernel that does not run, for `hvprobe explain`, which needs no machine.
//!
//! Invariant: what is asked for is read, bounded and refused as it is when probes are registered.

use hvprobe_engine::Explained;
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_machine::Kernel;
use hvprobe_proto::v1::{self, ErrorKind};
use tonic::Status;

use crate::status::{Failure, chain, refused};
use crate::wire::registration;

/// What one probe comes to.
#[derive(Debug)]
pub struct Explanation {
    /// Its definition, which names one place unless that is refused as a whole.
    pub definition: String,
    /// What it comes to, or why it is refused.
    pub outcome: Result<Explained, Status>,
}

/// Why nothing is explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The kernel cannot be read.
    #[error("the kernel cannot be read")]
    Image(#[from] ImageError),
    /// What is asked for makes no sense.
    #[error("{}", .0.message())]
    Request(#[from] Status),
}

/// What `probes` come to in `kernel`, in their order.
///
/// # Errors
/// When the kernel cannot be read, or what is asked for makes no sense for any kernel.
pub fn explain(
    kernel: &Kernel,
    probes: Vec<v1::ProbeSpec>,
) -> Result<Vec<Explanation>, ExplainError> {
    let specs = registration::specs(probes)?;
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
