//! The options that `cargo lab bench hits` passes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

/// Measure the cost of a hit and print tables
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// Number of calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    pub(crate) calls: u32,
    /// Number of times that each loop is timed; the table shows the fastest and the median
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// Number of rounds that compare a program with and without a probe; 0 skips them
    #[arg(long, default_value_t = 20)]
    pub(crate) rounds: u32,
    /// Number of hits of gdb's breakpoint, which take long if QEMU must emulate the guest; 0 skips them
    #[arg(long, default_value_t = 200)]
    pub(crate) gdb_hits: u32,
    /// Time limit for one answer of a guest's shell; an emulator inside an emulator is slow
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    patience: u64,
    /// Number of instructions of the engine for a kind of hit, as counted elsewhere; repeatable
    #[arg(long, value_name = "KIND=NUMBER", value_parser = counted)]
    instructions: Vec<(String, u32)>,
    /// Treat ticks of the time stamp counter as instructions
    #[arg(long)]
    pub(crate) ticks_are_instructions: bool,
    /// Folder with the guest's `kernel` and `initrd.cpio`
    #[arg(long, default_value = "/guest")]
    pub(crate) guest: PathBuf,
}

impl Options {
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }

    /// Returns the engine's instructions of a kind of hit, if they were counted.
    pub(crate) fn counted_as(&self, kind: &str) -> Option<u32> {
        let mut all = self.instructions.iter();
        all.find_map(|(counted, number)| (counted == kind).then_some(*number))
    }
}

/// Parses `KIND=NUMBER`.
fn counted(text: &str) -> Result<(String, u32)> {
    let (kind, number) = text.split_once('=').context("no `=`")?;
    Ok((kind.to_owned(), number.parse()?))
}
