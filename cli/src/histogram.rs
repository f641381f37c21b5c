//! `--hist`: events counted by the server, and shown as what they amount to.

use std::io;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Args, ValueHint};
use hvprobe_proto::v1::{
    AggregateFor, AggregateRequest, AggregateResponse, HistogramCommand, HistogramEntry,
    HistogramForm, HistogramKey, HistogramSchema, HistogramTotals, Probe, aggregate_request,
    aggregate_response, histogram_key_value::What,
};
use hvprobe_spec::ParseError;
use hvprobe_spec::histogram::read_histogram;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;

use crate::client::Client;
use crate::events_file::FileHistogram;
use crate::failure::{Refused, WrongUsage, mistake};
use crate::flame;
use crate::follow::Format;
use crate::never::or_never;
use crate::output;
use crate::output::histogram::{self, Look};
use crate::output::histogram_key::is_symbol;
use crate::output::names::Names;
use crate::symbolize;
use crate::typed::bad_option;

/// Commands that wait for the server.
const COMMANDS: usize = 1;
/// What `--folded` and `--flame` count.
const FOLDED_BY: &str = "keys=comm,stacktrace";

/// Counting instead of printing.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Histograms")]
pub(crate) struct HistogramArgs {
    /// Count hits and print what they amount to instead of each, as the kernel's `hist` triggers do:
    /// `keys=FIELD[.FORM],...[:vals=FIELD,...][:sort=FIELD[.descending],...][:size=N] [if FILTER]`, such as
    /// `keys=comm,count.log2:vals=count`; repeatable
    #[arg(long, value_name = "HISTOGRAM", conflicts_with = "hits")]
    hist: Vec<String>,

    /// Draw bars
    #[arg(long, conflicts_with = "json")]
    bars: bool,

    /// Count hits by task and kernel stack, and print a line for each that differs, as flamegraph.pl and
    /// inferno read it: `COMM;OUTERMOST;...;INNERMOST HITS`
    #[arg(long, conflicts_with_all = ["hist", "bars", "json", "hits"])]
    folded: bool,

    /// Count hits by task and kernel stack, and draw them as a flame graph into this file (SVG), which is
    /// replaced; for an hvprobe built with the cargo feature `flame`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["hist", "bars", "json", "hits"])]
    flame: Option<PathBuf>,

    /// Print them every so many seconds, too, and not only at the end
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    interval: Option<u64>,
}

impl HistogramArgs {
    /// Whether anything is to be counted.
    pub(crate) fn is_given(&self) -> bool {
        self.by_stack() || !self.hist.is_empty()
    }

    /// Whether hits are counted by task and stack.
    fn by_stack(&self) -> bool {
        self.folded || self.flame.is_some()
    }

    /// What is to be counted by what.
    fn histograms(&self) -> &[String] {
        static FOLDED: LazyLock<[String; 1]> = LazyLock::new(|| [FOLDED_BY.to_owned()]);
        match self.by_stack() {
            true => &*FOLDED,
            false => &self.hist,
        }
    }

    /// Whether hits are told apart by their stacks, which probes have to record then.
    pub(crate) fn need_stacks(&self) -> bool {
        let mut read = self.histograms().iter().map(|text| read_histogram(text));
        read.any(|read| read.is_ok_and(|histogram| histogram.needs_stacks()))
    }

    /// Refuses what is no histogram, where it is wrong, and what this program cannot draw.
    pub(crate) fn check(&self) -> Result<(), WrongUsage> {
        if self.flame.is_some() {
            flame::check()?;
        }
        for text in &self.hist {
            read_histogram(text).map_err(|error| bad_option("hist", text, &error))?;
        }
        Ok(())
    }

    /// Refuses to show histograms if there are none, here or `in_files`.
    pub(crate) fn check_shown(&self, in_files: &[FileHistogram]) -> Result<(), WrongUsage> {
        if !self.is_given() && in_files.is_empty() && (self.bars || self.interval.is_some()) {
            let message = "--bars and --interval go with histograms: give --hist, or --events with a file \
                           that has `hist` triggers";
            return Err(WrongUsage(message.to_owned()));
        }
        Ok(())
    }
}

/// Of which of `probes` events are printed, an empty list being all; `None` if all of them are only counted,
/// by `args` or by `in_files`.
pub(crate) fn printed(
    probes: &[Probe],
    args: &HistogramArgs,
    in_files: &[FileHistogram],
) -> Option<Vec<u32>> {
    if args.is_given() {
        return None;
    }
    if in_files.is_empty() {
        return Some(Vec::new());
    }
    let counted = |probe: &Probe| in_files.iter().any(|it| it.counts(&probe.name));
    let left = probes.iter().filter(|probe| !counted(probe));
    let left: Vec<_> = left.map(|probe| probe.id).collect();
    Some(left).filter(|left| !left.is_empty())
}

/// The histograms of one command.
#[derive(Debug)]
pub(crate) struct Histograms {
    all: Vec<Counting>,
    look: Look,
    machine: String,
    ticks: Option<Interval>,
    names: Names,
    /// Where stacks are drawn.
    flame: Option<PathBuf>,
}

/// A histogram that the server fills.
#[derive(Debug)]
pub(crate) struct Counting {
    /// The one event that is counted, if it is one.
    event: Option<String>,
    commands: mpsc::Sender<AggregateRequest>,
    answers: tonic::Streaming<AggregateResponse>,
    /// How it is read.
    pub(crate) schema: HistogramSchema,
}

impl Histograms {
    /// Has the events of `probes` counted on `machine`, as `args` say, and as `in_files` is said of some of
    /// them; `None` if nothing asks for that.
    pub(crate) async fn begin(
        client: &mut Client,
        machine: &str,
        probes: &[Probe],
        args: &HistogramArgs,
        in_files: &[FileHistogram],
        format: Format,
    ) -> anyhow::Result<Option<Self>> {
        let mut all = Vec::new();
        for text in args.histograms() {
            let ids = probes.iter().map(|probe| probe.id).collect();
            let counting = Counting::begin(client, machine, ids, text).await;
            all.push(
                counting.map_err(|wrong| wrong.told(|error| bad_option("hist", text, &error)))?,
            );
        }
        for histogram in in_files {
            let of_event = probes.iter().filter(|it| histogram.counts(&it.name));
            let ids: Vec<_> = of_event.map(|probe| probe.id).collect();
            if ids.is_empty() {
                // It was told why it is not there.
                continue;
            }
            let counting = Counting::begin(client, machine, ids, histogram.text()).await;
            let counting =
                counting.map_err(|wrong| wrong.told(|error| histogram.refused(error)))?;
            all.push(Counting {
                event: Some(histogram.event().to_owned()),
                ..counting
            });
        }
        if all.is_empty() {
            return Ok(None);
        }
        let mut names = Names::default();
        let mut keys = all
            .iter()
            .flat_map(|counting: &Counting| &counting.schema.keys);
        if keys.any(|key| key.form() == HistogramForm::Stacktrace) {
            symbolize::know_functions(&mut names, client, machine).await;
        }
        let ticks = args.interval.map(|seconds| {
            let period = Duration::from_secs(seconds);
            let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            ticks
        });
        Ok(Some(Self {
            all,
            look: match (format, args.bars) {
                _ if args.folded => Look::Folded,
                (Format::Json, _) => Look::Json,
                (_, true) => Look::Bars,
                (_, false) => Look::Entries,
            },
            machine: machine.to_owned(),
            ticks,
            names,
            flame: args.flame.clone(),
        }))
    }

    /// Returns when they are to be printed again; never, if only at the end.
    pub(crate) async fn tick(&mut self) {
        or_never(self.ticks.as_mut().map(Interval::tick)).await;
    }

    /// Prints what was counted until now, or draws it.
    pub(crate) async fn print(&mut self, client: &mut Client) -> anyhow::Result<()> {
        for counting in &mut self.all {
            let (entries, totals) = counting.read().await?;
            let keys = &counting.schema.keys;
            let addresses = entries.iter().flat_map(|entry| addresses(keys, entry));
            let addresses = addresses.collect();
            symbolize::look_up(&mut self.names, client, &self.machine, addresses).await;
            let schema = &counting.schema;
            let event = counting.event.as_deref();
            // Those of files were not asked for by --flame.
            let picture = self.flame.as_ref().filter(|_| event.is_none());
            let look = picture.map_or(self.look, |_| Look::Folded);
            let text = histogram::text(look, event, schema, &entries, &totals, &self.names)?;
            if let Some(path) = picture {
                flame::draw(&text, path)?;
            }
            // What is drawn is printed only if lines of stacks were asked for, too.
            if look == self.look {
                crate::follow::emit(&mut io::stdout().lock(), &text)?;
            }
        }
        Ok(())
    }
}

/// Prints what was counted until now, if anything is counted.
pub(crate) async fn print(
    histograms: &mut Option<Histograms>,
    client: &mut Client,
) -> anyhow::Result<()> {
    match histograms {
        Some(histograms) => histograms.print(client).await,
        None => Ok(()),
    }
}

/// The addresses in `entry` that may have names.
fn addresses(keys: &[HistogramKey], entry: &HistogramEntry) -> Vec<u64> {
    let keys = keys.iter().zip(&entry.keys);
    keys.flat_map(|(key, value)| match &value.what {
        Some(What::Number(number)) if is_symbol(key) => vec![*number],
        Some(What::StackTrace(stack)) => stack.addresses.clone(),
        Some(What::Number(_) | What::Text(_)) | None => Vec::new(),
    })
    .collect()
}

impl Counting {
    /// Has the events of `probes` counted on `machine`, as `text` says.
    pub(crate) async fn begin(
        client: &mut Client,
        machine: &str,
        probes: Vec<u32>,
        text: &str,
    ) -> Result<Self, Uncounted> {
        let wanted = AggregateFor {
            machine: machine.to_owned(),
            probes,
            histogram: text.to_owned(),
        };
        let (commands, stream) = mpsc::channel(COMMANDS);
        // There is room, and the stream is there.
        let _sent = commands
            .send(request(aggregate_request::What::AggregateFor(wanted)))
            .await;
        let stream = ReceiverStream::new(stream);
        let answers = client.histograms.aggregate(stream).await;
        let mut counting = Self {
            event: None,
            commands,
            answers: answers.map_err(Uncounted::Refused)?.into_inner(),
            schema: HistogramSchema::default(),
        };
        let schema = counting.next().await.map_err(Uncounted::Gone)?;
        if let aggregate_response::What::Schema(schema) = schema {
            counting.schema = schema;
        }
        Ok(counting)
    }

    /// What was counted until now.
    pub(crate) async fn read(&mut self) -> anyhow::Result<(Vec<HistogramEntry>, HistogramTotals)> {
        let command = aggregate_request::What::Command(HistogramCommand::Read.into());
        // The answer tells when the server is gone.
        let _sent = self.commands.send(request(command)).await;
        let mut entries = Vec::new();
        loop {
            match self.next().await? {
                // The module came whose arguments are counted.
                aggregate_response::What::Schema(schema) => self.schema = schema,
                aggregate_response::What::Part(part) => {
                    entries.extend(part.entries);
                    if let Some(totals) = part.totals {
                        if totals.incomplete {
                            output::tell(format_args!(
                                "hits that had happened are not counted: the host is kept from finishing one"
                            ));
                        }
                        return Ok((entries, totals));
                    }
                }
                aggregate_response::What::Changed(_) => {}
            }
        }
    }

    /// Begins anew.
    pub(crate) async fn clear(&mut self) -> anyhow::Result<()> {
        let command = aggregate_request::What::Command(HistogramCommand::Clear.into());
        // The answer tells when the server is gone.
        let _sent = self.commands.send(request(command)).await;
        self.next().await.map(|_changed| ())
    }

    async fn next(&mut self) -> anyhow::Result<aggregate_response::What> {
        let answer = self.answers.message().await.map_err(Refused::from)?;
        let what = answer.and_then(|answer| answer.what);
        what.ok_or_else(|| anyhow::anyhow!("the server went away"))
    }
}

/// Why the server does not count something.
#[derive(Debug)]
pub(crate) enum Uncounted {
    /// It does not take it.
    Refused(tonic::Status),
    /// It does not answer.
    Gone(anyhow::Error),
}

impl Uncounted {
    /// What to tell, `wrong` being for what is wrong with the text.
    pub(crate) fn told(self, wrong: impl Fn(ParseError) -> WrongUsage) -> anyhow::Error {
        let status = match self {
            Self::Refused(status) => status,
            Self::Gone(error) => return error,
        };
        match mistake(&status) {
            Some(error) => wrong(error).into(),
            None => Refused::from(status).into(),
        }
    }
}

fn request(what: aggregate_request::What) -> AggregateRequest {
    AggregateRequest { what: Some(what) }
}
