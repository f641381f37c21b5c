//! Options that name debug information.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Sources of line numbers and variables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct DebugArgs {
    /// vmlinux with the debug information (DWARF) of the guest's kernel, or the file of a module with its own;
    /// repeatable. Stacks then show source lines of the kernel, and probes can also be defined as for `perf
    /// probe`: `[EVENT=]FUNC[@SRC][:LINE|+OFFSET|%return|;TEXT] [ARGUMENT...]`, `[EVENT=]SRC(:LINE|;TEXT) ...`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) debug_info: Vec<PathBuf>,

    /// Folder with the sources of that kernel, in which `;TEXT` looks for lines
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "debug_info")]
    pub(crate) source: Option<PathBuf>,
}
