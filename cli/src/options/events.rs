//! Options that say which events are wanted, and how and where they are printed.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use hvprobe_proto::v1::SubscribeRequest;
use hvprobe_spec::fetch::read_filter;

use crate::failure::typed::{self, bad_option};
use crate::failure::{Refused, WrongUsage, mistake};
use crate::output::events::times::TimeFormat;
use crate::output::file::{OutputFile, Unwritten};

/// Which events.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Events")]
pub(crate) struct WantedArgs {
    /// Only events of this thread; repeatable, as are --tgid and --comm; an event must match each kind of
    /// option given
    #[arg(long = "pid", value_name = "N", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    pids: Vec<i32>,

    /// Only events of this process
    #[arg(long = "tgid", value_name = "N", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    tgids: Vec<i32>,

    /// Only events of tasks of this name
    #[arg(long = "comm", value_name = "NAME", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    comms: Vec<String>,

    /// Only events that match this expression over `pid`, `tgid`, `comm` and `cpu`, as after `if` in a
    /// definition
    #[arg(long, value_name = "EXPR", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    filter: Option<String>,
}

impl WantedArgs {
    /// Checks the syntax of the filter; the error points at the mistake.
    pub(crate) fn check(&self) -> Result<(), WrongUsage> {
        typed::one("filter", self.filter.as_deref(), read_filter).map(|_| ())
    }

    /// Returns a request for these events of `probes` on `machine`.
    pub(crate) fn request(&self, machine: &str, probes: Vec<u32>) -> SubscribeRequest {
        let comms = self.comms.iter();
        SubscribeRequest {
            machine: machine.to_owned(),
            probes,
            pids: self.pids.clone(),
            tgids: self.tgids.clone(),
            comms: comms.map(|comm| comm.clone().into_bytes()).collect(),
            filter: self.filter.clone().unwrap_or_default(),
            ..Default::default()
        }
    }

    /// Returns the error for a request that the server refused. It points at the mistake in the filter if the
    /// server reports one.
    pub(crate) fn refused(&self, status: tonic::Status) -> anyhow::Error {
        match (&self.filter, mistake(&status)) {
            (Some(text), Some(mut error)) => {
                // `bad_option` adds the prefix itself.
                if let Some(message) = error.message.strip_prefix("bad filter: ") {
                    error.message = message.to_owned();
                }
                bad_option("filter", text, &error).into()
            }
            _ => Refused::from(status).into(),
        }
    }
}

/// How and where events are printed.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Format of times; JSON contains both of the first two
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        conflicts_with_all = ["json", "hist", "folded", "flame"]
    )]
    pub(crate) time: TimeFormat,

    /// Write the trace into this file, replacing it, instead of printing it
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["hist", "folded", "flame"])]
    output: Option<PathBuf>,
}

impl OutputArgs {
    /// Opens the file that replaces standard output, if one was asked for.
    pub(crate) fn open(&self) -> Result<Option<OutputFile>, Unwritten> {
        let file = self.output.as_deref().map(OutputFile::create);
        file.transpose()
    }
}
