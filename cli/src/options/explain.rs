//! Options of `hvprobe explain`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::probes::debug_info::DebugArgs;
use super::probes::hits::{HitArgs, HoldArgs};

/// What to explain.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints where a probe would be planted, the instruction there, whether its hits need exits and why, where
each argument is found, and when its filter is evaluated. `provided` introduces what only a running guest
can decide. The exit status is 1 if a probe would be refused.

Examples:
  hvprobe explain 'p vfs_read' 'r do_sys_openat2 name=+0(filename):ustring'
  hvprobe explain --kernel vmlinuz --post 'p vfs_read+0x1b'")]
pub(crate) struct Explain {
    /// Kernel: `latest` or a VERSION of those installed here, `host` for the running one, a kernel's build tree, or
    /// an image, bzImage or ELF vmlinux [default: the one `cargo lab setup` fetched]
    #[arg(short, long, value_name = "KERNEL", value_hint = ValueHint::AnyPath)]
    pub(crate) kernel: Option<PathBuf>,

    /// Definitions, as for `hvprobe run -p`
    #[arg(required_unless_present = "events", value_name = "DEFINITION")]
    pub(crate) definitions: Vec<String>,

    /// File with definitions, one per line as in kprobe_events, and with `echo` lines that write filters of
    /// their events; repeatable
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
