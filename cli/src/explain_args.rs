//! Options of `hvprobe explain`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use crate::hit_args::{HitArgs, HoldArgs};
use crate::perf_probe::DebugArgs;

/// What to explain.
#[derive(Debug, Args)]
#[command(after_help = "\
Tells where a probe would be, the instruction there, whether its hits take exits and why, where each of its
arguments is, and when its filter is looked at. What only a guest that runs can tell stands behind
`provided`. The exit status is 1 when a probe would be refused.

Examples:
  hvprobe explain 'p vfs_read' 'r do_sys_openat2 name=+0(filename):ustring'
  hvprobe explain --kernel vmlinuz --post 'p vfs_read+0x1b'")]
pub(crate) struct Explain {
    /// Kernel image, bzImage or ELF vmlinux [default: the one `cargo lab setup` fetched]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) kernel: Option<PathBuf>,

    /// Definitions, as for `hvprobe run -p`
    #[arg(required_unless_present = "events", value_name = "DEFINITION")]
    pub(crate) definitions: Vec<String>,

    /// File of such definitions, one a line as in kprobe_events, and of filters of their events, as scripts
    /// write them; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) events: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) debug: DebugArgs,

    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hit: HitArgs,

    #[command(flatten)]
    pub(crate) hold: HoldArgs,
}
