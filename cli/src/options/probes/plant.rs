//! Options for probes that exist only while a command runs.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::debug_info::DebugArgs;
use super::hits::{ActArgs, HoldArgs};
use crate::options::histograms::HistogramArgs;

/// Which probes to plant, and what they are to do.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Probes of its own")]
pub(crate) struct PlantArgs {
    /// Probe to plant while this runs, defined as for `hvprobe run -p`; repeatable. However this program ends,
    /// the probe is removed, and machines that it paused resume
    #[arg(
        short = 'p',
        long = "plant",
        value_name = "DEFINITION",
        conflicts_with = "ScriptArgs"
    )]
    pub(crate) definitions: Vec<String>,

    /// File with definitions, one per line as in kprobe_events, and with `echo` lines that write filters and
    /// `hist` triggers of their events; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) events: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) debug: DebugArgs,

    /// Skip definitions that are refused, and report them, instead of failing
    #[arg(long)]
    pub(crate) skip_refused: bool,

    /// Name of the session that owns the probes, as `probe list` shows it [default: `trace-` and the process id]
    #[arg(long, value_name = "NAME")]
    pub(crate) owner: Option<String>,

    #[command(flatten)]
    pub(crate) acts: ActArgs,

    #[command(flatten)]
    pub(crate) hold: HoldArgs,
}

impl PlantArgs {
    /// Makes the probes record the data that `histograms` need, if there are any probes.
    pub(crate) fn count(&mut self, histograms: &HistogramArgs) {
        if !self.definitions.is_empty() || !self.events.is_empty() {
            let (are_counted, by_stack) = (histograms.is_given(), histograms.need_stacks());
            self.acts.count(are_counted, by_stack);
        }
    }
}
