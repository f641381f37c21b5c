//! The command line: what can be typed, and the help that explains it.

use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use hvprobe_proto::v1::MachineState;
use hvprobe_spec::bounded;

use crate::event_args::{OutputArgs, WantedArgs};
use crate::explain_args::Explain;
use crate::histogram::HistogramArgs;
use crate::hit_args::{HitArgs, HoldArgs};
use crate::label::Label;
use crate::log::LogArgs;
use crate::perf_probe::DebugArgs;
use crate::plant::PlantArgs;
use crate::script::ScriptArgs;
use crate::server_args::{NamedMachine, OnMachine, Serve, ServerAt, Url};
use crate::size::Size;
use crate::sources_args::{Lines, Vars};

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

/// Adds a tip on where to write the guest's command to `error`, if that command seems to be the unknown argument.
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
    /// Keep machines for clients that connect to a unix socket, or to a TCP port of this machine
    Serve(Serve),
    /// Machines of a server
    #[command(subcommand)]
    Vm(Vm),
    /// Probes of a server's machine
    #[command(subcommand)]
    Probe(Probe),
    /// Print the hits of probes of a server's machines as they come
    Trace(Box<Trace>),
    /// Say what is to be done at hits of probes that ask (`--ask`) while the guest waits
    Decide(Decide),
    /// List symbols of a machine's kernel
    Syms(Syms),
    /// Print types and functions of a machine's kernel as C declares them
    Types(Types),
    /// Say what probe definitions come to in a kernel, without running it
    Explain(Box<Explain>),
    /// Tell which lines of a kernel's function take a probe, from debug information
    Lines(Lines),
    /// Tell which variables can be read at a point of a kernel's sources, from debug information
    Vars(Vars),
    /// Tell whether this machine can run guests, and how probes will work on it
    Doctor(Doctor),
    /// Write the ELF kernel inside a bzImage to a file, which then boots without being unpacked
    #[command(after_help = "\
Example:
  hvprobe unpack /boot/vmlinuz-6.1.0-56-cloud-amd64 vmlinux
  hvprobe run --kernel vmlinux -p 'p vfs_read'")]
    Unpack(Unpack),
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
    /// bzImage packed with gzip, lz4, xz or zstd
    pub(crate) kernel: PathBuf,
    /// File to write
    pub(crate) vmlinux: PathBuf,
}

/// Which guest to boot; shared by `run` and `vm boot`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guest")]
pub(crate) struct Guest {
    /// Kernel image, bzImage or ELF vmlinux [default: the one `cargo lab setup` fetched]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
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
    /// `vfs_*` in the place of SYM stands for every function that matches; repeatable
    #[arg(short, long = "probe", value_name = "DEFINITION")]
    pub(crate) probes: Vec<String>,

    /// File of such definitions, one a line as in kprobe_events, and of filters and `hist` triggers of
    /// their events, as scripts write them; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) events: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) debug: DebugArgs,

    /// Leave out probes of places that cannot be probed, and say which, instead of failing
    #[arg(long)]
    pub(crate) skip_refused: bool,

    /// Program to run in the guest, with its arguments [default: a shell on the console]
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,

    #[command(flatten)]
    pub(crate) hit: HitArgs,
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
  Which files are opened, and nothing else of it:
    hvprobe run -p 'p do_sys_openat2 name=+0($arg2):ustring' -- cat /etc/passwd
  How much is read at a time by whom, and how long it took:
    hvprobe run -p 'r vfs_read' --bars --hist keys=comm,duration.log2 --hist keys=comm,count.log2 \\
      -- cat /etc/passwd
  The same as a one-liner of bpftrace:
    hvprobe run -e 'kretprobe:vfs_read /retval > 0/ { @[comm] = hist(retval); }' -- cat /etc/passwd
  How a program fares when it gets no memory:
    hvprobe run -p 'p ksys_mmap_pgoff' --return -ENOMEM -- ls /

Hits are printed as `comm-pid [cpu] seconds: event: function(argument=value, ...)`, the time being
this machine's monotonic clock unless --time says otherwise, returns as `event: function(argument=value, ...) = result took=time`
with the arguments at entry, and a table per probe on standard error closes the run. Where types do
not tell the arguments, and with --raw, there are registers: `(symbol+offset) registers`, of returns
`(caller <- symbol) ret=value took=time registers`. With --json each line is an object: `type` is
`event`, `dropped`, `ended` or `summary`; `args` are the arguments; registers, addresses and the
guest's time stamp are hexadecimal strings, counts and times are numbers.

Ctrl-C takes the probes out and ends the guest; a second one leaves at once.")]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) guest: Guest,

    /// Stop after so many hits
    #[arg(short = 'n', long, value_name = "N", help_heading = "Output",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) hits: Option<u64>,

    /// Print JSON, one object per line
    #[arg(long, help_heading = "Output", conflicts_with = "console")]
    pub(crate) json: bool,

    /// Connect this terminal to the guest's console, and print hits on standard error; Ctrl-] ends
    #[arg(long, help_heading = "Output")]
    pub(crate) console: bool,

    /// Tell at the end what took how long
    #[arg(long, help_heading = "Output")]
    pub(crate) timings: bool,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    #[command(flatten)]
    pub(crate) histograms: HistogramArgs,

    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

/// The machine to create.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe vm boot --name web --cpus 2 --memory 1G --kernel ./vmlinuz --initrd ./initrd.cpio
  hvprobe vm boot -p 'p vfs_read' -- sh -c 'while :; do ls -R /; done'")]
pub(crate) struct Boot {
    #[command(flatten)]
    pub(crate) server: ServerAt,

    /// Name of the machine [default: one that is free]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// Say something about the machine, by which `vm list` finds it; repeatable
    #[arg(long = "label", value_name = "NAME=VALUE")]
    pub(crate) labels: Vec<Label>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) guest: Guest,

    #[command(flatten)]
    pub(crate) hold: HoldArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Vm {
    /// Create a machine and start its guest
    Boot(Box<Boot>),
    /// List machines, ended ones too
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        server: ServerAt,
        /// Only those that have this label; repeatable, all must be there
        #[arg(long = "label", value_name = "NAME=VALUE")]
        labels: Vec<Label>,
        /// Only those in this state; repeatable
        #[arg(long = "state", value_name = "STATE")]
        states: Vec<StateArg>,
        /// Go on: print a line whenever a machine comes, changes or goes, until interrupted
        #[arg(long, conflicts_with = "states")]
        watch: bool,
        /// Print JSON, one object per line
        #[arg(long)]
        json: bool,
    },
    /// Show one machine, as JSON
    Show(NamedMachine),
    /// Wait until a machine has ended, and exit with the status of its guest's command
    Wait(NamedMachine),
    /// Forget a machine that has ended
    #[command(visible_alias = "rm")]
    Remove(NamedMachine),
    /// Stop all virtual CPUs of a machine until it is resumed
    Pause(NamedMachine),
    /// Let a paused machine run again
    Resume(NamedMachine),
    /// Send an NMI to a machine's guest, as an NMI button does
    #[command(after_help = "\
By default Linux logs what came, and nothing else. It panics if it was booted with unknown_nmi_panic,
or if /proc/sys/kernel/unknown_nmi_panic is 1: a way to learn what a guest that hangs is doing.

Example:
  hvprobe vm nmi --cpu 1 web")]
    Nmi {
        #[command(flatten)]
        on: NamedMachine,
        /// The virtual CPU that gets it, from 0 [default: all]
        #[arg(long, value_name = "N")]
        cpu: Option<u32>,
    },
    /// Take the probes out of a machine's guest and end it
    Stop(NamedMachine),
    /// Connect this terminal to a machine's console; Ctrl-] disconnects
    Console(NamedMachine),
    /// Print what a machine's console has printed, as far as it is kept
    Logs {
        #[command(flatten)]
        on: NamedMachine,
        /// Go on with what it prints, until the machine ends
        #[arg(short, long)]
        follow: bool,
    },
}

/// What a machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateArg {
    /// Its kernel is starting
    Booting,
    /// Its probes are planted
    Running,
    /// Its virtual CPUs stand still
    Paused,
    /// Its guest has ended
    Ended,
}

impl From<StateArg> for MachineState {
    fn from(state: StateArg) -> Self {
        match state {
            StateArg::Booting => Self::Booting,
            StateArg::Running => Self::Running,
            StateArg::Paused => Self::Paused,
            StateArg::Ended => Self::Stopped,
        }
    }
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

The probes stay until they are removed or the machine ends. Those of `hvprobe trace -p` go with it.")]
pub(crate) struct Add {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Register them without planting them
    #[arg(long)]
    pub(crate) disabled: bool,

    /// Leave out probes of places that cannot be probed, and say which, instead of failing
    #[arg(long)]
    pub(crate) skip_refused: bool,

    /// `p[:NAME] [MOD:]SYM[+OFF]|0xADDR`, or `r[MAXACTIVE][:NAME] [MOD:]SYM|0xADDR`; a pattern such
    /// as `vfs_*` in the place of SYM stands for every function that matches
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

#[derive(Debug, Subcommand)]
pub(crate) enum Probe {
    /// Plant probes, all or none unless told otherwise
    Add(Box<Add>),
    /// Take probes out
    #[command(visible_alias = "rm")]
    Remove(ChosenProbes),
    /// Plant disabled probes again
    Enable(ChosenProbes),
    /// Restore the guest's bytes but keep the probes
    Disable(ChosenProbes),
    /// Plant all enabled probes again after `disarm-all`
    ArmAll(OnMachine),
    /// Restore all of the guest's bytes, whatever is enabled, until `arm-all`
    DisarmAll(OnMachine),
    /// Use jumps that need no exits wherever probes can do without, or breakpoints everywhere
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
        /// Only those that go with clients of this name
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
    /// As it is at first
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
  hvprobe trace --probe opens --hits 100     a hundred hits of one
  hvprobe trace -p 'r vfs_read' --vm web     its returns, with a probe that goes with this
  hvprobe trace --comm sshd --filter 'cpu == 0'   those of a task there, whoever made them happen
  hvprobe trace --time wall -o hits          with date and time, into a file
  hvprobe trace --probe opens --hist keys=comm --interval 5   who makes how many of them
  hvprobe trace --json | jq .registers.rdi   for programs; see `hvprobe run --help`")]
pub(crate) struct Trace {
    #[command(flatten)]
    pub(crate) on: OnMachine,

    /// Only this probe, by number or name; repeatable
    #[arg(long = "probe", value_name = "PROBE")]
    pub(crate) probes: Vec<String>,

    /// Stop after so many hits
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
`--set`; several are separated by commas. Questions that are open when this ends, and those that
nobody answers in time, fall to the probe's default.

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

    /// Decide this every time, instead of asking at the terminal
    #[arg(long, value_name = "DECISION", allow_hyphen_values = true)]
    pub(crate) answer: Option<String>,

    /// Stop after so many hits
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

    /// `struct NAME`, `union NAME`, `enum NAME`, a typedef, or a function; behind `MODULE:` one of a module
    /// that is loaded
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

    /// Pattern over the whole name: `*`, `?`, `[…]`
    #[arg(value_name = "GLOB")]
    pub(crate) pattern: String,

    /// At most so many
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

With --report, a guest with this machine's own kernel is booted, too, probes of each kind are tried in
it, and all of it goes into a file for a bug report. The file has no names or addresses in it.")]
pub(crate) struct Doctor {
    /// Ask the server at this socket about its machine
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

    /// Write everything that a bug report needs into this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["socket", "connect", "json"])]
    pub(crate) report: Option<PathBuf>,

    /// Kernel for the report's guest [default: the newest in /boot that can be read]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "report")]
    pub(crate) kernel: Option<PathBuf>,
}

#[cfg(test)]
mod tests;
