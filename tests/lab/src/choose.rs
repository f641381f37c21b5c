//! Choice between this machine and an emulated one, by the result of `hvprobe doctor`.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::kind::Kind;
use crate::process::{self, Audience, End, Limits};
use crate::progress;

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the rig that `asked` names. Without one, chooses this machine if its KVM can run Linux guests, and
/// tcg otherwise, and prints the choice with the reason. Needs the `hvprobe` program.
pub(crate) fn choose(asked: Option<Kind>, hvprobe: &Path) -> Result<Kind> {
    if let Some(kind) = asked {
        return Ok(kind);
    }
    let (kind, reason) = if !Path::new("/dev/kvm").exists() {
        (Kind::Tcg, "this machine has no /dev/kvm")
    } else {
        match doctor(hvprobe)? {
            End::Exited(status) if status.success() => (
                Kind::Direct,
                "hvprobe doctor finds that this machine's KVM can run Linux guests",
            ),
            End::TimedOut => (Kind::Tcg, "hvprobe doctor did not finish in 60 s here"),
            _ => (
                Kind::Tcg,
                "hvprobe doctor finds that this machine's KVM cannot run Linux guests",
            ),
        }
    };
    progress::note(&format!("rig {}: {reason}", kind.name()));
    Ok(kind)
}

fn doctor(hvprobe: &Path) -> Result<End> {
    let mut command = Command::new(hvprobe);
    let limits = Limits {
        deadline: Instant::now() + PATIENCE,
        silence: None,
    };
    process::run(command.arg("doctor"), true, limits, &mut Nobody)
}

struct Nobody;

impl Audience for Nobody {
    fn output(&mut self, _bytes: &[u8]) -> Result<ControlFlow<()>> {
        Ok(ControlFlow::Continue(()))
    }
}
