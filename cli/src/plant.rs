//! Probes that exist only while a command runs.

use std::path::PathBuf;
use std::process;

use anyhow::bail;
use clap::{Args, ValueHint};
use hvprobe_proto::v1::{DisableRequest, ProbeSpec, RegisterRequest};
use hvprobe_spec::bounded;

use crate::client::Client;
use crate::definition;
use crate::events_file::FileHistogram;
use crate::failure::{Sent, WrongUsage, as_sent};
use crate::histogram::HistogramArgs;
use crate::hit_args::{ActArgs, HoldArgs};
use crate::origins::Origins;
use crate::output::{self, skipped};
use crate::perf_probe::{DebugArgs, Made, Theirs};
use crate::script::Script;
use crate::session::Session;

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
    definitions: Vec<String>,

    /// File with definitions, one per line as in kprobe_events, and with `echo` lines that write filters and
    /// `hist` triggers of their events; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    events: Vec<PathBuf>,

    #[command(flatten)]
    debug: DebugArgs,

    /// Skip definitions that are refused, and report them, instead of failing
    #[arg(long)]
    skip_refused: bool,

    /// Name of the session that owns the probes, as `probe list` shows it [default: `trace-` and the process id]
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,

    #[command(flatten)]
    acts: ActArgs,

    #[command(flatten)]
    hold: HoldArgs,
}

/// Probes to plant.
#[derive(Debug)]
pub(crate) struct ToPlant {
    probes: Vec<ProbeSpec>,
    /// What the user typed for the probes.
    origins: Origins,
    /// Histograms from files of definitions.
    pub(crate) histograms: Vec<FileHistogram>,
    skip_refused: bool,
    owner: String,
}

/// Planted probes, which leave when the session ends.
#[derive(Debug)]
pub(crate) struct Planted {
    pub(crate) session: Session,
    pub(crate) ids: Vec<u32>,
}

impl PlantArgs {
    /// Makes the probes record the data that `histograms` need, if there are any probes.
    pub(crate) fn count(&mut self, histograms: &HistogramArgs) {
        if !self.definitions.is_empty() || !self.events.is_empty() {
            let (are_counted, by_stack) = (histograms.is_given(), histograms.need_stacks());
            self.acts.count(are_counted, by_stack);
        }
    }

    /// Returns the probes of `script` to plant, and the debug information.
    pub(crate) fn read_script(self, script: &Script) -> anyhow::Result<(ToPlant, Theirs)> {
        let Made { theirs, .. } = self.debug.of_any(Vec::new())?;
        let to_plant = ToPlant {
            probes: script.specs(&self.acts.into(), &self.hold)?,
            origins: Origins::default(),
            histograms: Vec::new(),
            skip_refused: self.skip_refused || script.has_patterns(),
            owner: self.owner.unwrap_or_else(owner),
        };
        Ok((to_plant, theirs))
    }

    /// Returns the probes to plant, if any, and the debug information.
    pub(crate) fn read(self) -> anyhow::Result<(Option<ToPlant>, Theirs)> {
        let Self {
            definitions,
            events,
            debug,
            skip_refused,
            owner,
            acts,
            hold,
        } = self;
        if definitions.is_empty() && events.is_empty() {
            let idle = acts == ActArgs::default() && hold == HoldArgs::default();
            if idle && !skip_refused && owner.is_none() {
                return Ok((None, debug.of_any(Vec::new())?.theirs));
            }
            let message = "what probes do at hits, and whose they are, goes with probes to plant: give -p, \
                           or --events";
            return Err(WrongUsage(message.to_owned()).into());
        }
        let Made {
            definitions,
            theirs,
        } = debug.of_any(definitions)?;
        let probes = definition::specs(&definitions, &events, false, &acts.into(), &hold);
        let (probes, histograms) = probes.map_err(|WrongUsage(message)| {
            let named = definitions
                .texts
                .iter()
                .find(|it| !it.contains([' ', ':', '\t']));
            WrongUsage(match named {
                Some(name) => {
                    let name = bounded(name);
                    format!("{message}\n`--probe {name}` is a probe that is there already")
                }
                None => message,
            })
        })?;
        let to_plant = ToPlant {
            probes,
            origins: definitions.origins,
            histograms,
            skip_refused,
            owner: owner.unwrap_or_else(self::owner),
        };
        Ok((Some(to_plant), theirs))
    }
}

/// Returns the default owner of the probes.
fn owner() -> String {
    format!("trace-{}", process::id())
}

impl ToPlant {
    /// Plants the probes on `machine`. `refused` converts a refusal, given the definitions.
    pub(crate) async fn plant(
        self,
        client: &mut Client,
        machine: &str,
        refused: impl Fn(tonic::Status, &Sent) -> anyhow::Error,
    ) -> anyhow::Result<Planted> {
        let session = Session::open(client, self.owner).await?;
        let definitions = as_sent(&self.probes, &self.origins);
        let request = RegisterRequest {
            machine: machine.to_owned(),
            probes: self.probes,
            skip_refused: self.skip_refused,
            session: session.id.clone(),
            ..Default::default()
        };
        let answer = client.probes.register(request).await;
        let registered = answer
            .map_err(|status| refused(status, &definitions))?
            .into_inner();
        if let Some(skipped) = skipped::text(&registered.skipped) {
            output::notice(format_args!("{skipped}"));
        }
        if registered.ids.is_empty() {
            bail!("no probe was planted");
        }
        let ids = registered.ids;
        Ok(Planted { session, ids })
    }
}

/// Disables the probes `ids`, so that their counters no longer change.
pub(crate) async fn turn_off(client: &mut Client, machine: &str, ids: Vec<u32>) {
    let machine = machine.to_owned();
    if !ids.is_empty() {
        // An error means that they have left with the machine, or leave with their session.
        let _ended = client.probes.disable(DisableRequest { machine, ids }).await;
    }
}

impl Planted {
    /// Returns the result of `work`, or the reason why the server has removed the probes, and ends the session.
    pub(crate) async fn during<T>(
        planted: Option<Self>,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let Some(Self { mut session, .. }) = planted else {
            return work.await;
        };
        let outcome = tokio::select! {
            outcome = work => outcome,
            why = session.lost() => Err(why),
        };
        let closed = session.close().await;
        // The earlier error is more informative.
        outcome.and_then(|done| closed.map(|()| done))
    }
}
