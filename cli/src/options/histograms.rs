//! Options for counting hits in histograms.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Args, ValueHint};
use hvprobe_spec::histogram::read_histogram;

use crate::failure::WrongUsage;
use crate::failure::typed::bad_option;

/// Histogram that `--folded` and `--flame` print or draw.
const FOLDED_BY: &str = "keys=comm,stacktrace";

/// Counting instead of printing.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Histograms")]
pub(crate) struct HistogramArgs {
    /// Count hits in a table instead of printing each, as the kernel's `hist` triggers do:
    /// `keys=FIELD[.FORM],...[:vals=FIELD,...][:sort=FIELD[.descending],...][:size=N] [if FILTER]`, such as
    /// `keys=comm,count.log2:vals=count`; repeatable
    #[arg(long, value_name = "HISTOGRAM", conflicts_with = "hits")]
    hist: Vec<String>,

    /// Draw bars
    #[arg(long, conflicts_with = "json")]
    pub(crate) bars: bool,

    /// Count hits by task and kernel stack, and print one line per combination, in the format of flamegraph.pl
    /// and inferno: `COMM;OUTERMOST;...;INNERMOST HITS`
    #[arg(long, conflicts_with_all = ["hist", "bars", "json", "hits"])]
    pub(crate) folded: bool,

    /// Count hits by task and kernel stack, and write a flame graph (SVG) into this file, replacing it; needs
    /// an hvprobe built with the cargo feature `flame`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["hist", "bars", "json", "hits"])]
    pub(crate) flame: Option<PathBuf>,

    /// Print the counts every SECONDS, not only at the end
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) interval: Option<u64>,
}

impl HistogramArgs {
    /// Returns whether any histogram was asked for.
    pub(crate) fn is_given(&self) -> bool {
        self.by_stack() || !self.hist.is_empty()
    }

    /// Returns whether hits are counted by task and stack.
    fn by_stack(&self) -> bool {
        self.folded || self.flame.is_some()
    }

    /// Returns the texts of the histograms.
    pub(crate) fn histograms(&self) -> &[String] {
        static FOLDED: LazyLock<[String; 1]> = LazyLock::new(|| [FOLDED_BY.to_owned()]);
        match self.by_stack() {
            true => &*FOLDED,
            false => &self.hist,
        }
    }

    /// Returns whether a histogram has stacks as keys. If so, the probes must record stacks.
    pub(crate) fn need_stacks(&self) -> bool {
        let mut read = self.histograms().iter().map(|text| read_histogram(text));
        read.any(|read| read.is_ok_and(|histogram| histogram.needs_stacks()))
    }

    /// Checks the syntax of the histograms, and whether this program can draw flame graphs.
    pub(crate) fn check(&self) -> Result<(), WrongUsage> {
        if self.flame.is_some() {
            check_flame()?;
        }
        for text in &self.hist {
            read_histogram(text).map_err(|error| bad_option("hist", text, &error))?;
        }
        Ok(())
    }

    /// Refuses `--bars` and `--interval` if there are no histograms, neither in these options nor in files of
    /// definitions.
    pub(crate) fn check_shown(&self, any_in_files: bool) -> Result<(), WrongUsage> {
        if !self.is_given() && !any_in_files && (self.bars || self.interval.is_some()) {
            let message = "--bars and --interval go with histograms: give --hist, or --events with a file \
                           that has `hist` triggers";
            return Err(WrongUsage(message.to_owned()));
        }
        Ok(())
    }
}

/// Returns an error if the program was built without flame graphs.
fn check_flame() -> Result<(), WrongUsage> {
    if cfg!(feature = "flame") {
        return Ok(());
    }
    let message = "this hvprobe draws no flame graphs: build it with `--features hvprobe-cli/flame`, or give \
                   what --folded prints to inferno-flamegraph or flamegraph.pl";
    Err(WrongUsage(message.to_owned()))
}
