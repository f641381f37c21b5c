//! Probes that exist only while a command runs.

use std::process;

use anyhow::bail;
use hvprobe_proto::v1::{DisableRequest, ProbeSpec, RegisterRequest};
use hvprobe_spec::bounded;

use crate::client::Client;
use crate::client::session::Session;
use crate::definitions::debug_info::Theirs;
use crate::definitions::events_file::FileHistogram;
use crate::definitions::perf_probe::{self, Made};
use crate::definitions::probes;
use crate::failure::{Origins, Sent, WrongUsage, as_sent};
use crate::options::probes::hits::{ActArgs, HoldArgs};
use crate::options::probes::plant::PlantArgs;
use crate::output::{self, skipped};
use crate::script::Script;

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

/// Planted probes, which the server removes when the session ends.
#[derive(Debug)]
pub(crate) struct Planted {
    pub(crate) session: Session,
    pub(crate) ids: Vec<u32>,
    /// For each of `ids`, the index of its entry in the request.
    pub(crate) entries: Vec<u32>,
}

/// Returns the default owner of the probes.
fn owner() -> String {
    format!("trace-{}", process::id())
}

impl ToPlant {
    /// Returns the probes of `script` to plant, and the debug information.
    pub(crate) fn of_script(args: PlantArgs, script: &Script) -> anyhow::Result<(Self, Theirs)> {
        let Made { theirs, .. } = perf_probe::of_any(&args.debug, Vec::new())?;
        let to_plant = Self {
            probes: script.specs(&args.acts.into(), &args.hold)?,
            origins: Origins::default(),
            histograms: Vec::new(),
            skip_refused: args.skip_refused || script.has_patterns(),
            owner: args.owner.unwrap_or_else(owner),
        };
        Ok((to_plant, theirs))
    }

    /// Returns the probes to plant, or `None` if no definition was given, and the debug information.
    pub(crate) fn read(args: PlantArgs) -> anyhow::Result<(Option<Self>, Theirs)> {
        let PlantArgs {
            definitions,
            events,
            debug,
            skip_refused,
            owner,
            acts,
            hold,
        } = args;
        if definitions.is_empty() && events.is_empty() {
            let idle = acts == ActArgs::default() && hold == HoldArgs::default();
            if idle && !skip_refused && owner.is_none() {
                return Ok((None, perf_probe::of_any(&debug, Vec::new())?.theirs));
            }
            let message = "what probes do at hits, and whose they are, goes with probes to plant: give -p, \
                           or --events";
            return Err(WrongUsage(message.to_owned()).into());
        }
        let Made {
            definitions,
            theirs,
        } = perf_probe::of_any(&debug, definitions)?;
        let probes = probes::specs(&definitions, &events, false, &acts.into(), &hold);
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
        let to_plant = Self {
            probes,
            origins: definitions.origins,
            histograms,
            skip_refused,
            owner: owner.unwrap_or_else(self::owner),
        };
        Ok((Some(to_plant), theirs))
    }

    /// Plants the probes on `machine`. If the server refuses them, `refused` makes the error, from the status and
    /// the definitions that were sent.
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
        Ok(Planted {
            session,
            ids: registered.ids,
            entries: registered.entries,
        })
    }
}

/// Disables the probes `ids`, so that their counters no longer change.
pub(crate) async fn turn_off(client: &mut Client, machine: &str, ids: Vec<u32>) {
    let machine = machine.to_owned();
    if !ids.is_empty() {
        // An error means that the probes are gone with the machine, or will be removed with their session.
        let _ended = client.probes.disable(DisableRequest { machine, ids }).await;
    }
}

impl Planted {
    /// Runs `work` and ends the session. If the server ends the session first, and so removes the probes, returns
    /// its reason as an error instead of the result of `work`.
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
