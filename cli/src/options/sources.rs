//! Options of `hvprobe lines` and `hvprobe vars`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::server::OnMachine;

/// The files to look into, instead of asking a server.
#[derive(Debug, Args)]
pub(crate) struct Files {
    /// Kernel: `latest` or a VERSION of those installed here, `host` for the running one, a kernel's build tree, or
    /// an image, bzImage or ELF vmlinux [default: the one `cargo lab setup` fetched]
    #[arg(short, long, value_name = "KERNEL", value_hint = ValueHint::AnyPath, requires = "debug_info",
          conflicts_with_all = ["vm", "socket", "connect"])]
    pub(crate) kernel: Option<PathBuf>,

    /// vmlinux with the debug information (DWARF) of that kernel, or of the machine's kernel: it is uploaded
    /// to the server, which keeps it while the machine runs; or the file of a module, which needs neither
    /// [default: what the server has for its machine]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) debug_info: Option<PathBuf>,

    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Of which function.
#[derive(Debug, Args)]
#[command(after_help = "\
Lines are counted from the function's first line, which is 0.

Examples:
  hvprobe lines vfs_read --kernel vmlinuz --debug-info vmlinux
  hvprobe lines vfs_read:6-12 --vm web
  hvprobe lines vfs_read --vm web --debug-info vmlinux")]
pub(crate) struct Lines {
    /// `FUNC[@SRC][:LINE[-LINE|+COUNT]]`
    #[arg(value_name = "FUNC")]
    pub(crate) function: String,

    #[command(flatten)]
    pub(crate) on: OnMachine,

    #[command(flatten)]
    pub(crate) files: Files,
}

/// At which point.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints each variable as a fetch argument, or why it cannot be read there.

Examples:
  hvprobe vars vfs_read:6 --kernel vmlinuz --debug-info vmlinux
  hvprobe vars vfs_read:6 --vm web")]
pub(crate) struct Vars {
    /// `FUNC[@SRC][:LINE|+OFFSET|%return]` or `SRC:LINE`
    #[arg(value_name = "PROBEPOINT")]
    pub(crate) point: String,

    #[command(flatten)]
    pub(crate) on: OnMachine,

    #[command(flatten)]
    pub(crate) files: Files,
}
