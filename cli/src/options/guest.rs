//! Options that describe a guest to boot.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::probes::debug_info::DebugArgs;
use super::probes::hits::HitArgs;
use super::size::Size;

/// Which guest to boot; shared by `run` and `vm boot`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guest")]
pub(crate) struct Guest {
    /// Kernel: `latest` or a VERSION of those installed here, `host` for the running one, a kernel's build tree, or
    /// an image, bzImage or ELF vmlinux [default: the one `cargo lab setup` fetched]
    #[arg(short, long, value_name = "KERNEL", value_hint = ValueHint::AnyPath)]
    pub(crate) kernel: Option<PathBuf>,

    /// Initial ramdisk [default: the one `cargo lab setup` built, if there is one]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) initrd: Option<PathBuf>,

    /// Kernel command line [default: one that puts the console on the serial port]
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) cmdline: String,

    /// Number of virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cpus: u32,

    /// Guest memory; K, M, G and T are powers of 1024, a bare number is MiB
    #[arg(short, long, value_name = "SIZE", default_value = "256M")]
    pub(crate) memory: Size,

    /// Probe to plant as soon as the kernel's text is final: `p[:NAME] [MOD:]SYM[+OFF]|0xADDR`, or
    /// `r[MAXACTIVE][:NAME] [MOD:]SYM|0xADDR` for the returns of a function; a pattern such as
    /// `vfs_*` instead of SYM means every function that matches; repeatable
    #[arg(short, long = "probe", value_name = "DEFINITION")]
    pub(crate) probes: Vec<String>,

    /// File with definitions, one per line as in kprobe_events, and with `echo` lines that write filters and
    /// `hist` triggers of their events; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) events: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) debug: DebugArgs,

    /// Skip definitions that are refused, and report them, instead of failing
    #[arg(long)]
    pub(crate) skip_refused: bool,

    /// Program to run in the guest, with its arguments [default: a shell on the console]
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,

    #[command(flatten)]
    pub(crate) hit: HitArgs,
}
