//! `--hist`: events counted by the server, and shown as what they amount to.

use std::io;
use std::time::Duration;

use clap::Args;
use hvprobe_proto::v1::{
    AggregateFor, AggregateRequest, AggregateResponse, HistogramCommand, HistogramEntry,
    HistogramKey, HistogramSchema, HistogramTotals, aggregate_request, aggregate_response,
    histogram_key_value,
};
use hvprobe_spec::ParseError;
use hvprobe_spec::histogram::read_histogram;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;

use crate::client::Client;
use crate::failure::{Refused, WrongUsage, detail};
use crate::follow::Format;
use crate::output::histogram::{self, Look};
use crate::output::histogram_key::is_symbol;
use crate::output::names::Names;
use crate::symbolize;
use crate::typed::bad_option;

/// Commands that wait for the server.
const COMMANDS: usize = 1;

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
    #[arg(long, requires = "hist", conflicts_with = "json")]
    bars: bool,

    /// Print them every so many seconds, too, and not only at the end
    #[arg(long, value_name = "SECONDS", requires = "hist", value_parser = clap::value_parser!(u64).range(1..=86400))]
    interval: Option<u64>,
}

impl HistogramArgs {
    /// Whether anything is to be counted.
    pub(crate) fn is_given(&self) -> bool {
        !self.hist.is_empty()
    }

    /// Refuses what is no histogram, where it is wrong.
    pub(crate) fn check(&self) -> Result<(), WrongUsage> {
        for text in &self.hist {
            read_histogram(text).map_err(|error| bad_option("hist", text, &error))?;
        }
        Ok(())
    }
}

/// The histograms of one command.
#[derive(Debug)]
pub(crate) struct Histograms {
    all: Vec<Counting>,
    look: Look,
    machine: String,
    ticks: Option<Interval>,
    names: Names,
}

/// A histogram that the server fills.
#[derive(Debug)]
struct Counting {
    commands: mpsc::Sender<AggregateRequest>,
    answers: tonic::Streaming<AggregateResponse>,
    schema: HistogramSchema,
}

impl Histograms {
    /// Has the events of `probes` counted on `machine`, as `args` say; `None` if they ask for nothing.
    pub(crate) async fn begin(
        client: &mut Client,
        machine: &str,
        probes: &[u32],
        args: &HistogramArgs,
        format: Format,
    ) -> anyhow::Result<Option<Self>> {
        if !args.is_given() {
            return Ok(None);
        }
        let mut all = Vec::new();
        for histogram in &args.hist {
            let wanted = AggregateFor {
                machine: machine.to_owned(),
                probes: probes.to_vec(),
                histogram: histogram.clone(),
            };
            all.push(Counting::begin(client, wanted).await?);
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
                (Format::Json, _) => Look::Json,
                (_, true) => Look::Bars,
                (_, false) => Look::Entries,
            },
            machine: machine.to_owned(),
            ticks,
            names: Names::default(),
        }))
    }

    /// Returns when they are to be printed again; never, if only at the end.
    pub(crate) async fn tick(&mut self) {
        match &mut self.ticks {
            Some(ticks) => {
                ticks.tick().await;
            }
            None => std::future::pending().await,
        }
    }

    /// Prints what was counted until now.
    pub(crate) async fn print(&mut self, client: &mut Client) -> anyhow::Result<()> {
        for counting in &mut self.all {
            let (entries, totals) = counting.read().await?;
            let keys = &counting.schema.keys;
            let addresses = entries.iter().flat_map(|entry| addresses(keys, entry));
            let addresses = addresses.collect();
            symbolize::look_up(&mut self.names, client, &self.machine, addresses).await;
            let schema = &counting.schema;
            let text = histogram::text(self.look, schema, &entries, &totals, &self.names)?;
            crate::follow::emit(&mut io::stdout().lock(), &text)?;
        }
        Ok(())
    }
}

/// The addresses in `entry` that may have names.
fn addresses(keys: &[HistogramKey], entry: &HistogramEntry) -> Vec<u64> {
    let keys = keys.iter().zip(&entry.keys);
    let named = keys.filter(|(key, _)| is_symbol(key));
    let number = |what| match what {
        histogram_key_value::What::Number(number) => Some(number),
        histogram_key_value::What::Text(_) => None,
    };
    named
        .filter_map(|(_, value)| value.what.clone().and_then(number))
        .collect()
}

impl Counting {
    async fn begin(client: &mut Client, wanted: AggregateFor) -> anyhow::Result<Self> {
        let text = wanted.histogram.clone();
        let (commands, stream) = mpsc::channel(COMMANDS);
        // There is room, and the stream is there.
        let _sent = commands
            .send(request(aggregate_request::What::AggregateFor(wanted)))
            .await;
        let stream = ReceiverStream::new(stream);
        let answers = client.histograms.aggregate(stream).await;
        let mut counting = Self {
            commands,
            answers: answers
                .map_err(|status| refused(&text, status))?
                .into_inner(),
            schema: HistogramSchema::default(),
        };
        if let aggregate_response::What::Schema(schema) = counting.next().await? {
            counting.schema = schema;
        }
        Ok(counting)
    }

    async fn read(&mut self) -> anyhow::Result<(Vec<HistogramEntry>, HistogramTotals)> {
        let command = aggregate_request::What::Command(HistogramCommand::Read.into());
        // The answer tells when the server is gone.
        let _sent = self.commands.send(request(command)).await;
        let mut entries = Vec::new();
        loop {
            if let aggregate_response::What::Part(part) = self.next().await? {
                entries.extend(part.entries);
                if let Some(totals) = part.totals {
                    return Ok((entries, totals));
                }
            }
        }
    }

    async fn next(&mut self) -> anyhow::Result<aggregate_response::What> {
        let answer = self.answers.message().await.map_err(Refused::from)?;
        let what = answer.and_then(|answer| answer.what);
        what.ok_or_else(|| anyhow::anyhow!("the server went away"))
    }
}

/// Why the server does not count what `text` asks for, and where that is wrong if it says so.
fn refused(text: &str, status: tonic::Status) -> anyhow::Error {
    let column = detail(&status).and_then(|detail| detail.column);
    match column.and_then(|column| usize::try_from(column).ok()) {
        Some(column) => {
            let message = status.message().to_owned();
            bad_option("hist", text, &ParseError { column, message }).into()
        }
        None => Refused::from(status).into(),
    }
}

fn request(what: aggregate_request::What) -> AggregateRequest {
    AggregateRequest { what: Some(what) }
}
