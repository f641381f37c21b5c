//! Options of the log.

use clap::{Args, ValueEnum};

/// Default number of waiting lines.
const LINES: u32 = 8192;

/// What is logged, how, and how much of it waits.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LogArgs {
    /// Log more to standard error; twice for still more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Format of messages and log lines on standard error; `RUST_LOG` selects log lines, unless -v is given
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t
    )]
    pub(crate) log_format: LogFormat,

    /// Number of log lines, of 8 KiB at most each, that wait for the reader of standard error; further lines are
    /// dropped and counted
    #[arg(
        long,
        global = true,
        value_name = "LINES",
        default_value_t = LINES,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub(crate) log_lines: u32,
}

/// What log messages look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// JSON, one object per line
    Json,
}
