//! The arguments of `hvprobe vm`.

use clap::{Args, Subcommand};
use hvprobe_proto::v1::MachineState;

use super::guest::Guest;
use super::label::Label;
use super::one_of::one_of;
use super::probes::hits::HoldArgs;
use super::server::{NamedMachine, ServerAt};
use crate::output::words::Word;

/// The machine to create.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hvprobe vm boot --name web --cpus 2 --memory 1G --kernel ./vmlinuz --initrd ./initrd.cpio
  hvprobe vm boot -p 'p vfs_read' -- sh -c 'while :; do ls -R /; done'")]
pub(crate) struct Boot {
    #[command(flatten)]
    pub(crate) server: ServerAt,

    /// Name of the machine [default: a free one]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// Label by which `vm list` finds the machine; repeatable
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
    /// List machines, including ended ones
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        server: ServerAt,
        /// Only machines with this label; repeatable, all must match
        #[arg(long = "label", value_name = "NAME=VALUE")]
        labels: Vec<Label>,
        /// Only machines in this state; repeatable
        #[arg(long = "state", value_name = "STATE", value_parser = one_of(&STATES, Word::or_unknown))]
        states: Vec<MachineState>,
        /// Keep running: print a line whenever a machine appears, changes or is removed, until interrupted
        #[arg(long, conflicts_with = "states")]
        watch: bool,
        /// Print JSON, one object per line
        #[arg(long)]
        json: bool,
    },
    /// Show one machine, as JSON
    Show(NamedMachine),
    /// Wait until a machine has ended, and exit with the status of its guest's command, or with 1 if the guest reset
    /// or crashed without one
    Wait(NamedMachine),
    /// Forget an ended machine, with its console output and last events
    #[command(visible_alias = "rm")]
    Remove {
        #[command(flatten)]
        server: ServerAt,
        /// Machine
        #[arg(value_name = "NAME")]
        machine: String,
    },
    /// Stop all virtual CPUs of a machine until it is resumed
    Pause(NamedMachine),
    /// Let a paused machine run again
    Resume(NamedMachine),
    /// Send an NMI to a machine's guest, as an NMI button does
    #[command(after_help = "\
By default Linux only logs the NMI. It panics if it was booted with unknown_nmi_panic,
or if /proc/sys/kernel/unknown_nmi_panic is 1, which shows what a hung guest is doing.

Example:
  hvprobe vm nmi --cpu 1 web")]
    Nmi {
        #[command(flatten)]
        on: NamedMachine,
        /// Virtual CPU that receives it, from 0 [default: all]
        #[arg(long, value_name = "N")]
        cpu: Option<u32>,
    },
    /// Remove the probes from a machine's guest and end it
    Stop(NamedMachine),
    /// Connect this terminal to a machine's console; Ctrl-] disconnects
    Console(NamedMachine),
    /// Print the kept part of a machine's console output
    Logs {
        #[command(flatten)]
        on: NamedMachine,
        /// Keep printing new output until the machine ends
        #[arg(short, long)]
        follow: bool,
    },
}

/// States of a machine, each with its help text.
const STATES: [(MachineState, &str); 4] = [
    (MachineState::Booting, "Its kernel is starting"),
    (
        MachineState::Running,
        "Its kernel has started, and probes can be planted",
    ),
    (MachineState::Paused, "Its virtual CPUs are stopped"),
    (MachineState::Stopped, "Its guest has ended"),
];
