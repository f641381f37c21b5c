//! `cargo lab coverage`: counts how much of a kernel's text can be probed, by which mechanism, and what cannot be
//! probed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::cargo;
use crate::job::{Job, Step};
use crate::kind::Kind;
use crate::run;
use crate::setup::Ready;

/// Which kernel.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Kernel image, bzImage or ELF vmlinux [default: the stock kernel of the lab's guests]
    kernel: Option<PathBuf>,
}

/// Time limit. It is much longer than the largest kernel takes.
const LIMIT: Duration = Duration::from_secs(600);

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let ready = Ready::make_with(Kind::Direct, false, false, None)?;
    let built = ready.workspace.build(&["--bin=coverage"])?;
    let kernel = match &options.kernel {
        Some(kernel) => kernel
            .canonicalize()
            .with_context(|| format!("cannot find {}", kernel.display()))?,
        None => ready.guest.kernel(),
    };
    let mut job = Job::new(&built, LIMIT);
    let program = cargo::program_named(&built, "coverage")?;
    job.programs.push(("coverage".to_owned(), program));
    job.steps.push(Step::new("coverage", [kernel]));
    run::run_job(Kind::Direct, &ready, &job)
}
