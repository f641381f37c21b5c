//! Starts a rig of any kind.

use anyhow::{Context, Result};

use super::{bochs, direct, emulated, tcg};
use crate::job::Job;
use crate::kind::Kind;
use crate::outcome::{Listener, Outcome};
use crate::setup::Ready;

/// Boots a rig of this `kind` if it is an emulated one, runs the job's steps and ends the rig.
pub(crate) fn run(
    kind: Kind,
    ready: &Ready,
    job: &Job,
    listener: &mut dyn Listener,
) -> Result<Outcome> {
    match kind {
        Kind::Tcg => {
            let qemu = ready.qemu.as_ref().context("set up for another kind")?;
            emulated::run(&tcg::Tcg(qemu), ready, job, listener)
        }
        Kind::Bochs => emulated::run(&bochs::Bochs, ready, job, listener),
        Kind::Direct => direct::run(ready, job, listener),
    }
}
