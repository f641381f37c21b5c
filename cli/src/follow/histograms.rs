//! `--hist`: the server counts events, and the client prints the resulting histograms.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_proto::v1::{
    AggregateFor, AggregateRequest, AggregateResponse, HistogramCommand, HistogramEntry,
    HistogramForm, HistogramTotals, Probe, aggregate_request, aggregate_response,
    histogram_key_value::What,
};
use hvprobe_spec::ParseError;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;

use super::optional_future::or_never;
use super::printer::{Format, emit};
use super::{flame, symbolize};
use crate::client::Client;
use crate::definitions::events_file::FileHistogram;
use crate::failure::typed::bad_option;
use crate::failure::{Refused, WrongUsage, mistake};
use crate::options::histograms::HistogramArgs;
use crate::output;
use crate::output::histograms::{self, Key, Look, Schema};
use crate::output::values::names::Names;

/// Capacity of the queue of commands to the server.
const COMMANDS: usize = 1;

/// Returns the ids of the probes whose events are printed; an empty list means all. Returns `None` if no event is
/// printed, because the histograms of `args` or of `in_files` count the events of all probes.
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

/// Histograms of one command.
#[derive(Debug)]
pub(crate) struct Histograms {
    all: Vec<Counting>,
    look: Look,
    machine: String,
    ticks: Option<Interval>,
    names: Names,
    /// File for the flame graph.
    flame: Option<PathBuf>,
}

/// Histogram that the server fills.
#[derive(Debug)]
pub(crate) struct Counting {
    /// Name of the event, if the histogram is from a file and counts only that event.
    event: Option<String>,
    commands: mpsc::Sender<AggregateRequest>,
    answers: tonic::Streaming<AggregateResponse>,
    /// Description of the keys and values.
    pub(crate) schema: Arc<Schema>,
}

impl Histograms {
    /// Starts the histograms on `machine`. Those of `args` count the events of all `probes`, those of `in_files`
    /// only the events of the probes that they name. Returns `None` if there are no histograms.
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
                counting
                    .map_err(|wrong| wrong.into_error(|error| bad_option("hist", text, &error)))?,
            );
        }
        for histogram in in_files {
            let of_event = probes.iter().filter(|it| histogram.counts(&it.name));
            let ids: Vec<_> = of_event.map(|probe| probe.id).collect();
            if ids.is_empty() {
                // The reason why the probe is missing has already been printed.
                continue;
            }
            let counting = Counting::begin(client, machine, ids, histogram.text()).await;
            let counting =
                counting.map_err(|wrong| wrong.into_error(|error| histogram.refused(error)))?;
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
        if keys.any(|key| key.form == HistogramForm::Stacktrace) {
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

    /// Waits until the next periodic output is due; forever if no interval was set.
    pub(crate) async fn tick(&mut self) {
        or_never(self.ticks.as_mut().map(Interval::tick)).await;
    }

    /// Prints or draws the current counts.
    pub(crate) async fn print(&mut self, client: &mut Client) -> anyhow::Result<()> {
        for counting in &mut self.all {
            let (entries, totals) = counting.read().await?;
            let keys = &counting.schema.keys;
            let addresses = entries.iter().flat_map(|entry| addresses(keys, entry));
            let addresses = addresses.collect();
            symbolize::look_up(&mut self.names, client, &self.machine, addresses).await;
            let schema = &counting.schema;
            let event = counting.event.as_deref();
            // `--flame` draws the histogram by stack, not the histograms of files.
            let picture = self.flame.as_ref().filter(|_| event.is_none());
            let look = picture.map_or(self.look, |_| Look::Folded);
            let text = histograms::text(look, event, schema, &entries, &totals, &self.names)?;
            if let Some(path) = picture {
                flame::draw(&text, path)?;
            }
            // A drawn histogram is printed only if `--folded` was also given.
            if look == self.look {
                emit(&mut io::stdout().lock(), &text)?;
            }
        }
        Ok(())
    }
}

/// Prints the current counts, if there are histograms.
pub(crate) async fn print(
    histograms: &mut Option<Histograms>,
    client: &mut Client,
) -> anyhow::Result<()> {
    match histograms {
        Some(histograms) => histograms.print(client).await,
        None => Ok(()),
    }
}

/// Returns the addresses in `entry` that may have names.
fn addresses(keys: &[Key], entry: &HistogramEntry) -> Vec<u64> {
    let keys = keys.iter().zip(&entry.keys);
    keys.flat_map(|(key, value)| match &value.what {
        Some(What::Number(number)) if key.is_symbol() => vec![*number],
        Some(What::StackTrace(stack)) => stack.addresses.clone(),
        Some(What::Number(_) | What::Text(_)) | None => Vec::new(),
    })
    .collect()
}

impl Counting {
    /// Makes the server count the events of `probes` on `machine` in the histogram that `text` describes.
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
        // The queue has room and its receiver exists, so this cannot fail.
        let _sent = commands
            .send(request(aggregate_request::What::AggregateFor(wanted)))
            .await;
        let stream = ReceiverStream::new(stream);
        let answers = client.histograms.aggregate(stream).await;
        let mut counting = Self {
            event: None,
            commands,
            answers: answers.map_err(Uncounted::Refused)?.into_inner(),
            schema: Arc::default(),
        };
        let schema = counting.next().await.map_err(Uncounted::Gone)?;
        if let aggregate_response::What::Schema(schema) = schema {
            counting.schema = Arc::new(schema.into());
        }
        Ok(counting)
    }

    /// Reads the current counts.
    pub(crate) async fn read(&mut self) -> anyhow::Result<(Vec<HistogramEntry>, HistogramTotals)> {
        let command = aggregate_request::What::Command(HistogramCommand::Read.into());
        // If the server is gone, this fails, and so does the read of the answer below.
        let _sent = self.commands.send(request(command)).await;
        let mut entries = Vec::new();
        loop {
            match self.next().await? {
                // If the counted arguments are those of a module, another schema arrives when the module is loaded.
                aggregate_response::What::Schema(schema) => {
                    self.schema = Arc::new(schema.into());
                }
                aggregate_response::What::Part(part) => {
                    entries.extend(part.entries);
                    if let Some(totals) = part.totals {
                        if totals.incomplete {
                            output::notice(format_args!(
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

    /// Clears the counts.
    pub(crate) async fn clear(&mut self) -> anyhow::Result<()> {
        let command = aggregate_request::What::Command(HistogramCommand::Clear.into());
        // If the server is gone, this fails, and so does the read of the answer below.
        let _sent = self.commands.send(request(command)).await;
        self.next().await.map(|_changed| ())
    }

    async fn next(&mut self) -> anyhow::Result<aggregate_response::What> {
        let answer = self.answers.message().await.map_err(Refused::from)?;
        let what = answer.and_then(|answer| answer.what);
        what.ok_or_else(|| anyhow::anyhow!("the server went away"))
    }
}

/// Reason why the server does not count.
#[derive(Debug)]
pub(crate) enum Uncounted {
    /// The server refused the histogram.
    Refused(tonic::Status),
    /// The server does not answer.
    Gone(anyhow::Error),
}

impl Uncounted {
    /// Converts the reason into an error. `wrong` converts a mistake in the histogram's text.
    pub(crate) fn into_error(self, wrong: impl Fn(ParseError) -> WrongUsage) -> anyhow::Error {
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
