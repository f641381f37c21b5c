//! Options for scripts in the language of bpftrace.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Options that conflict with a script, which has its own means for the same purposes.
const OTHERS: [&str; 11] = [
    "probes", "events", "hist", "bars", "folded", "flame", "interval", "json", "hits", "time",
    "output",
];

/// Scripts.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Scripts")]
pub(crate) struct ScriptArgs {
    /// Run this program, in the language of bpftrace, at hits, such as
    /// `kprobe:vfs_read /arg2 > 100/ { @[comm] = hist(arg2); }`; repeatable, all together are one script
    #[arg(short = 'e', long = "program", value_name = "PROGRAM",
          conflicts_with_all = OTHERS)]
    pub(crate) programs: Vec<String>,

    /// File of such programs; repeatable
    #[arg(long = "script", value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = OTHERS)]
    pub(crate) scripts: Vec<PathBuf>,
}
