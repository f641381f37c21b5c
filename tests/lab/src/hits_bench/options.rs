//! The options that `cargo lab bench hits` passes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

/// Measures what a hit costs and prints tables.
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// Calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    pub(crate) calls: u32,
    /// How often every loop is timed; the shortest times and the middle ones count
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// Rounds of the comparison of a program with and without a probe on its path; 0 leaves it out
    #[arg(long, default_value_t = 20)]
    pub(crate) rounds: u32,
    /// Hits of gdb's breakpoint; 0 leaves that out, which takes long where QEMU has to emulate
    #[arg(long, default_value_t = 200)]
    pub(crate) gdb_hits: u32,
    /// How long one answer of a guest's shell may take; an emulator inside an emulator is slow
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    patience: u64,
    /// The engine's instructions of a kind of hit, as counted elsewhere
    #[arg(long, value_name = "KIND=NUMBER", value_parser = counted)]
    instructions: Vec<(String, u32)>,
    /// The time stamp counter counts instructions here
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
