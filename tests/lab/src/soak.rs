//! `cargo lab soak`: adds and removes probes of all kinds on one guest for a long time.
//!
//! The soak is one end-to-end test (`tests/tests/rig/soak.rs`). It runs briefly for every change, and for the
//! requested time with this command.

use std::env;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::Args;

use crate::run::{self, SOAK_MINUTES};

/// How long, and on what.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Duration of the soak
    #[arg(long, value_name = "MINUTES", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    minutes: u32,
    /// Kernel of the guest, a name (see `cargo lab test --help`) or a file [default: the stock kernel]
    #[arg(long, value_name = "NAME|FILE")]
    kernel: Option<String>,
    /// Use the seed that an earlier run printed, to repeat its random choices
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Record the result in docs/hosts.md; refused if the tree has changes
    #[arg(long)]
    record: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let lab = env::current_exe().context("this program has no file")?;
    // The limit includes time for the machine and its guest to boot.
    let limit = u64::from(options.minutes) * 60 + 900;
    let mut command = Command::new(lab);
    command
        .args(["test", "--rig-only", "--retries", "0", "--verbose"])
        .args(["--filter", "soak::", "--timeout", &limit.to_string()])
        // The guest has 8 GiB of memory, most of which it does not touch.
        .args(["--memory", "9G"])
        .env(SOAK_MINUTES, options.minutes.to_string());
    if let Some(kernel) = &options.kernel {
        command.args(["--kernel", kernel]);
    }
    if options.record {
        command.arg("--record=soak");
    }
    if let Some(seed) = options.seed {
        command.env("HVPROBE_SOAK_SEED", seed.to_string());
    }
    let status = command.status().context("cannot run the test")?;
    Ok(ExitCode::from(run::code(status)))
}
