//! The command line: its commands and options, and their help.

use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use hvprobe_spec::bounded;

use super::events::{OutputArgs, WantedArgs};
use super::explain::Explain;
use super::guest::Guest;
use super::histograms::HistogramArgs;
use super::image::Image;
use super::log::LogArgs;
use super::probes::debug_info::DebugArgs;
use super::probes::hits::{HitArgs, HoldArgs};
use super::probes::plant::PlantArgs;
use super::probes::script::ScriptArgs;
use super::server::{OnMachine, Serve, Url};
use super::sources::{Lines, Vars};
use super::vm::Vm;

/// Parses the command line. Exits the program if it is invalid, or asks for help.
pub(crate) fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| with_way_out(shortened(error)).exit())
}

/// Shortens a long word of the command line in `error`.
fn shortened(mut error: clap::Error) -> clap::Error {
    for kind in [
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
        ContextKind::InvalidValue,
    ] {
        let Some(ContextValue::String(word)) = error.get(kind) else {
            continue;
        };
        let short = bounded(word).to_string();
        if short != *word {
            error.insert(kind, ContextValue::String(short));
            // The suggestion repeats the word.
            error.remove(ContextKind::Suggested);
        }
    }
    error
}

/// Adds to `error` a tip on where to write the guest's command, if the unknown argument seems to be that command.
fn with_way_out(mut error: clap::Error) -> clap::Error {
    let takes_command = error
        .get(ContextKind::Usage)
        .is_some_and(|usage| usage.to_string().contains("-- <COMMAND>"));
    let word = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if !word.starts_with('-') => word.clone(),
        _ => return error,
    };
    if error.kind() == ErrorKind::UnknownArgument && takes_command {
        let tip = format!("the guest's command is written behind `--`, as in `-- {word}`");
        let tips = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tips);
    }
    error
}

/// Kprobes from outside: boots Linux guests under KVM and watches any instruction of their kernels.
#[derive(Debug, Parser)]
#[command(
    name = "hvprobe",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Start here:
  hvprobe doctor                          what this machine can do
  hvprobe run -p 'p vfs_read' -- ls /     boot a guest, probe it, print the hits

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted; `hvprobe run` passes on the exit
status of the guest's command."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) log: LogArgs,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Boot a guest, plant probes, print their hits: everything in one process
    Run(Box<Run>),
    /// Run machines for clients that connect to a unix socket or a TCP port of this machine
    Serve(Serve),
    /// Manage the machines of a server
    #[command(subcommand)]
    Vm(Vm),
    /// Manage the probes of a server's machine
    #[command(subcommand)]
    Probe(Probe),
    /// Print hits on a server's machines as they happen
    Trace(Box<Trace>),
    /// Answer the hits of probes that ask (`--ask`) while the guest waits
    Decide(Decide),
    /// List symbols of a machine's kernel
    Syms(Syms),
    /// Print types and functions of a machine's kernel as C declares them
    Types(Types),
    /// Show how probe definitions resolve in a kernel, without running it
    Explain(Box<Explain>),
    /// Show which source lines of a kernel function can be probed, from debug information
    Lines(Lines),
    /// Show which variables can be read at a place in the kernel's sources, from debug information
    Vars(Vars),
    /// Check whether this machine can run guests, and how well probes work on it
    Doctor(Doctor),
    /// Write the ELF kernel inside a bzImage to a file, which then boots without being unpacked
    #[command(after_help = "\
Example:
  hvprobe unpack /boot/vmlinuz-6.1.0-56-cloud-amd64 vmlinux
  hvprobe run --kernel vmlinux -p 'p vfs_read'")]
    Unpack(Unpack),
    /// Look into a disk image, without mounting it
    #[command(subcommand)]
    Image(Image),
    /// Print a completion script for a shell
    #[command(after_help = "\
Example:
  hvprobe completions bash > ~/.local/share/bash-completion/completions/hvprobe")]
    Completions {
        /// The shell to complete for
        shell: Shell,
    },
}

/// What to unpack.
#[derive(Debug, Args)]
pub(crate) struct Unpack {
    /// bzImage packed with gzip, lz4, xz or zstd, or a name of a kernel as for `hvprobe run --kernel`
    pub(crate) kernel: PathBuf,
    /// File to write
    pub(crate) vmlinux: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Who reads files while `ls` runs?
    hvprobe run -p 'p vfs_read' -- ls /
  The first ten page faults of the boot, as JSON for jq:
    hvprobe run -p 'p handle_mm_fault' --hits 10 --json | jq .comm
  A name of your own, an instruction inside the function, two CPUs:
    hvprobe run --cpus 2 -p 'p:readers vfs_read' -p 'p vfs_read+0x1b' -- sh -c 'cat /proc/*/stat'
  A shell in the guest, with the hits in a file:
    hvprobe run --console -p 'p do_sys_openat2' 2>hits
  What reading returned, how long it took, and the registers at its entry:
    hvprobe run -p 'r vfs_read' --raw -- cat /etc/passwd
  Which files are opened, without the other arguments:
    hvprobe run -p 'p do_sys_openat2 name=+0($arg2):ustring' -- cat /etc/passwd
  How much is read at a time by whom, and how long it took:
    hvprobe run -p 'r vfs_read' --bars --hist keys=comm,duration.log2 --hist keys=comm,count.log2 \\
      -- cat /etc/passwd
  The same as a one-liner of bpftrace:
    hvprobe run -e 'kretprobe:vfs_read /retval > 0/ { @[comm] = hist(retval); }' -- cat /etc/passwd
  How a program behaves when it gets no memory:
    hvprobe run -p 'p ksys_mmap_pgoff' --return -ENOMEM -- ls /

Hits are printed as `comm-pid [cpu] seconds: event: function(argument=value, ...)`, where the time is
this machine's monotonic clock unless --time chooses another; returns as
`event: function(argument=value, ...) = result took=time`, with the arguments at entry. A table of the
probes on standard error ends the run. With --raw, and where types do not describe the arguments,
registers are printed: `(symbol+offset) registers`, for returns
`(caller <- symbol) ret=value took=time registers`. With --json each line is an object: `type` is
`event`, `dropped`, `throttled`, `ended` or `summary`, and with --hist `entry` and `totals`; `args` are
the arguments; registers, addresses and the
guest's time stamp are hexadecimal strings, counts and times are numbers.

Ctrl-C removes the probes and ends the guest; a second Ctrl-C exits at once.")]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) guest: Guest,

    /// Stop after N hits
    #[arg(short = 'n', long, value_name = "N", help_heading = "Output",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) hits: Option<u64>,

    /// Print JSON, one object per line
    #[arg(long, help_heading = "Output", conflicts_with = "console")]
    pub(crate) json: bool,

    /// Connect this terminal to the guest's console, and print hits on standard error; Ctrl-] ends
    #[arg(long, help_heading = "Output")]
    pub(crate) console: bool,

    /// Print at the end how long each step took
    #[arg(long, help_heading = "Output")]
    pub(crate) timings: bool,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    #[command(flatten)]
    pub(crate) histograms: HistogramArgs,

    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

/// Probes to plant.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe probe add 'p vfs_read' 'p:opens do_sys_openat2'
  hvprobe probe add --disabled 'p tcp_sendmsg+0x20'
  hvprobe probe add --capture '+0(%si):64' --stop 'p do_exit'
  hvprobe probe add --maxactive auto --when '%dx>=4096' 'r vfs_write'
  hvprobe probe add --skip-refused 'p tcp_*' 'r ext4:ext4_get_[a-f]*'
  hvprobe probe add --events /sys/kernel/tracing/kprobe_events

The probes stay until they are removed or the machine ends; those of `hvprobe trace -p` are removed when
it ends.")]
pub(crate) struct Add {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Register them without planting them
    #[arg(long)]
    pub(crate) disabled: bool,

    /// Skip definitions that are refused, and report them, instead of failing
    #[arg(long)]
    pub(crate) skip_refused: bool,

    /// `p[:NAME] [MOD:]SYM[+OFF]|0xADDR`, or `r[MAXACTIVE][:NAME] [MOD:]SYM|0xADDR`; a pattern such
    /// as `vfs_*` instead of SYM means every function that matches
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

#[derive(Debug, Subcommand)]
pub(crate) enum Probe {
    /// Plant probes: all of them or none, unless --skip-refused is given
    Add(Box<Add>),
    /// Remove probes
    #[command(visible_alias = "rm")]
    Remove(ChosenProbes),
    /// Plant disabled probes again
    Enable(ChosenProbes),
    /// Restore the guest's bytes, but keep the probes registered
    Disable(ChosenProbes),
    /// Plant all enabled probes again after `disarm-all`
    ArmAll(OnMachine),
    /// Take all probes out of the guest's code until `arm-all`; all probes, new ones too, stay registered
    DisarmAll(OnMachine),
    /// Use jumps, which need no exits, where possible (`on`), or breakpoints everywhere (`off`)
    Optimization {
        #[command(flatten)]
        on: OnMachine,
        /// Whether to use jumps
        switch: Switch,
    },
    /// List probes with their counters
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        on: OnMachine,
        /// Only probes whose OWNER is this
        #[arg(long, value_name = "NAME")]
        owner: Option<String>,
        /// Print JSON, one object per line
        #[arg(long)]
        json: bool,
    },
}

/// The positions of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// The default
    On,
    /// Until it is turned on again
    Off,
}

/// Probes by number or name.
#[derive(Debug, Args)]
pub(crate) struct ChosenProbes {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Numbers or names of probes, as `probe list` shows them
    #[arg(
        required_unless_present = "all",
        conflicts_with = "all",
        value_name = "PROBE"
    )]
    pub(crate) probes: Vec<String>,

    /// All probes of the machine
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe trace                              every hit of every probe
  hvprobe trace --probe opens --hits 100     a hundred hits of one probe
  hvprobe trace -p 'r vfs_read' --vm web     returns of vfs_read; its probe is removed at the end
  hvprobe trace --comm sshd --filter 'cpu == 0'   hits in tasks of this name on CPU 0
  hvprobe trace --time wall -o hits          with date and time, into a file
  hvprobe trace --probe opens --hist keys=comm --interval 5   number of hits per command
  hvprobe trace --json | jq .registers.rdi   for other programs; see `hvprobe run --help`")]
pub(crate) struct Trace {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Only this probe, by number or name; repeatable
    #[arg(long = "probe", value_name = "PROBE")]
    pub(crate) probes: Vec<String>,

    /// Stop after N hits
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) hits: Option<u64>,

    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) wanted: WantedArgs,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    #[command(flatten)]
    pub(crate) histograms: HistogramArgs,

    #[command(flatten)]
    pub(crate) script: ScriptArgs,

    #[command(flatten)]
    pub(crate) plant: PlantArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A decision is `proceed`, `return=VALUE` (skip the function), `jump=ADDRESS`, or changes like those of
`--set`; separate several with commas. The probe's default applies to hits that nobody answers in time,
and to those still open when this command ends.

Examples:
  hvprobe probe add --ask 60s,proceed 'p:mounts path_mount'
  hvprobe decide mounts                                   ask at this terminal
  hvprobe decide mounts --answer '%si=0,return=-EPERM'    always say the same")]
pub(crate) struct Decide {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Numbers or names of probes [default: all that ask]
    #[arg(value_name = "PROBE")]
    pub(crate) probes: Vec<String>,

    /// Give this answer every time, instead of asking at the terminal
    #[arg(long, value_name = "DECISION", allow_hyphen_values = true)]
    pub(crate) answer: Option<String>,

    /// Stop after N hits
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) hits: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe types do_sys_openat2
  hvprobe types 'struct open_how' 'enum pid_type' size_t
  hvprobe types nf_tables:nft_do_chain 'nf_tables:struct nft_base_chain'")]
pub(crate) struct Types {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// `struct NAME`, `union NAME`, `enum NAME`, a typedef, or a function; `MODULE:` in front means one of a
    /// loaded module
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe syms 'vfs_*'
  hvprobe syms '*_sys_open*' --limit 20 --json")]
pub(crate) struct Syms {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Pattern that the whole name matches: `*`, `?`, `[…]`
    #[arg(value_name = "GLOB")]
    pub(crate) pattern: String,

    /// Print at most N symbols
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,

    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Runs a tiny guest that tries what probes need and shows what happened. The exit status is 1 when
Linux guests cannot run on this machine.

With --report, it also boots a guest with this machine's own kernel, tries probes of each kind in it, and
writes the results into a file for a bug report. The file contains no names or addresses.")]
pub(crate) struct Doctor {
    /// Ask the server at this socket about the machine it runs on
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) socket: Option<PathBuf>,

    /// Ask the server on this TCP port, `http://127.0.0.1:PORT`
    #[arg(
        long,
        value_name = "URL",
        requires = "token_file",
        conflicts_with = "socket"
    )]
    pub(crate) connect: Option<Url>,

    /// File with the token of that server
    #[arg(long, value_name = "FILE", requires = "connect", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,

    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// Write a file with everything a bug report needs
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["socket", "connect", "json"])]
    pub(crate) report: Option<PathBuf>,

    /// Kernel for the report's guest, as for `hvprobe run --kernel` [default: latest]
    #[arg(short, long, value_name = "KERNEL", value_hint = ValueHint::AnyPath, requires = "report")]
    pub(crate) kernel: Option<PathBuf>,
}

#[cfg(test)]
mod tests;
