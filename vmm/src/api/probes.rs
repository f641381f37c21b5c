//! `hvprobe.v1.Probes`.

use hvprobe_engine::{ChangeError, Refusals, RegisterError, Registered, Skipped, StopError};
use hvprobe_proto::v1::{
    self, ArmAllRequest, ArmAllResponse, DisableRequest, DisableResponse, DisarmAllRequest,
    DisarmAllResponse, EnableRequest, EnableResponse, ErrorKind, ListProbesRequest,
    ListProbesResponse, RegisterRequest, RegisterResponse, SetOptimizationRequest,
    SetOptimizationResponse, UnregisterRequest, UnregisterResponse, probes_server,
};
use hvprobe_spec::{ProbeId, ProbeSpec, definition};
use tonic::{Code, Request, Response, Status};

use super::actions::{self, Meaningless};
use super::error::{self, Failure, chain};
use super::fleet::{Fleet, Handle};
use super::{budget, limits};

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    fleet: Fleet,
}

impl Service {
    pub(super) fn new(fleet: Fleet) -> Self {
        Self { fleet }
    }

    /// The machine, and the ids as the engine has them.
    fn change(&self, machine: &str, ids: Vec<u32>) -> Result<(Handle, Vec<ProbeId>), Status> {
        limits::at_most("the number of probes", ids.len(), limits::BATCH)?;
        let ids = ids.into_iter().map(ProbeId).collect();
        Ok((self.fleet.get(machine)?, ids))
    }

    /// Turns the global switch of a machine.
    async fn switch(&self, machine: &str, on: bool) -> Result<(), Status> {
        let handle = self.fleet.get(machine)?;
        handle
            .blocking(move |machine| machine.set_armed(on))
            .await?
            .map_err(|error| change_error(machine, &error))?;
        handle.touch();
        Ok(())
    }
}

#[tonic::async_trait]
impl probes_server::Probes for Service {
    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<RegisterResponse>, Status> {
        let RegisterRequest {
            machine,
            probes,
            skip_refused,
        } = request.into_inner();
        let specs = specs(probes)?;
        let handle = self.fleet.get(&machine)?;
        let registered = handle
            .blocking(move |machine| machine.register_batch(&specs, refusals(skip_refused)))
            .await?
            .map_err(|error| register_error(&machine, &error))?;
        Ok(Response::new(response(&registered)))
    }

    async fn unregister(
        &self,
        request: Request<UnregisterRequest>,
    ) -> Result<Response<UnregisterResponse>, Status> {
        let UnregisterRequest { machine, ids } = request.into_inner();
        let (handle, ids) = self.change(&machine, ids)?;
        handle
            .blocking(move |machine| machine.unregister(&ids))
            .await?
            .map_err(|error| change_error(&machine, &error))?;
        Ok(Response::new(UnregisterResponse {}))
    }

    async fn enable(
        &self,
        request: Request<EnableRequest>,
    ) -> Result<Response<EnableResponse>, Status> {
        let EnableRequest { machine, ids } = request.into_inner();
        let (handle, ids) = self.change(&machine, ids)?;
        handle
            .blocking(move |machine| machine.enable(&ids))
            .await?
            .map_err(|error| change_error(&machine, &error))?;
        Ok(Response::new(EnableResponse {}))
    }

    async fn disable(
        &self,
        request: Request<DisableRequest>,
    ) -> Result<Response<DisableResponse>, Status> {
        let DisableRequest { machine, ids } = request.into_inner();
        let (handle, ids) = self.change(&machine, ids)?;
        handle
            .blocking(move |machine| machine.disable(&ids))
            .await?
            .map_err(|error| change_error(&machine, &error))?;
        Ok(Response::new(DisableResponse {}))
    }

    async fn arm_all(
        &self,
        request: Request<ArmAllRequest>,
    ) -> Result<Response<ArmAllResponse>, Status> {
        self.switch(&request.into_inner().machine, true).await?;
        Ok(Response::new(ArmAllResponse {}))
    }

    async fn disarm_all(
        &self,
        request: Request<DisarmAllRequest>,
    ) -> Result<Response<DisarmAllResponse>, Status> {
        self.switch(&request.into_inner().machine, false).await?;
        Ok(Response::new(DisarmAllResponse {}))
    }

    async fn set_optimization(
        &self,
        request: Request<SetOptimizationRequest>,
    ) -> Result<Response<SetOptimizationResponse>, Status> {
        let SetOptimizationRequest { machine, on } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        handle
            .blocking(move |machine| machine.set_optimization(on))
            .await?
            .map_err(|error| change_error(&machine, &error))?;
        handle.touch();
        Ok(Response::new(SetOptimizationResponse {}))
    }

    async fn list_probes(
        &self,
        request: Request<ListProbesRequest>,
    ) -> Result<Response<ListProbesResponse>, Status> {
        let handle = self.fleet.get(&request.into_inner().machine)?;
        let probes = handle.probes().await?;
        let disarmed = handle.describe().await?.disarmed;
        Ok(Response::new(ListProbesResponse { probes, disarmed }))
    }
}

/// The probes asked for, if all of them can be read.
pub(super) fn specs(probes: Vec<v1::ProbeSpec>) -> Result<Vec<ProbeSpec>, Status> {
    limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
    let mut specs = Vec::with_capacity(probes.len());
    for (index, probe) in probes.into_iter().enumerate() {
        limits::at_most("a definition", probe.definition.len(), limits::DEFINITION)?;
        let definition = definition::parse(&probe.definition).map_err(|error| {
            let message = format!("probe {index}, column {}: {error}", error.column);
            Failure::new(Code::InvalidArgument, ErrorKind::Definition, message)
                .at_index(index)
                .at_column(error.column)
        })?;
        let bad = |error: Meaningless| {
            let message = format!("probe {index} ({definition}): {error}");
            Failure::new(Code::InvalidArgument, ErrorKind::BadActions, message).at_index(index)
        };
        specs.push(ProbeSpec {
            mechanism: actions::mechanism(probe.mechanism).map_err(bad)?,
            actions: actions::actions(probe.actions.unwrap_or_default()).map_err(bad)?,
            disabled: probe.disabled,
            maxactive_auto: probe.maxactive_auto,
            budget: probe.budget.map(budget::budget).transpose().map_err(bad)?,
            definition,
        });
    }
    Ok(specs)
}

/// What becomes of a batch when a probe of it is refused.
pub(super) fn refusals(skip: bool) -> Refusals {
    if skip { Refusals::Skip } else { Refusals::Fail }
}

fn response(registered: &Registered) -> RegisterResponse {
    RegisterResponse {
        ids: registered.probes.iter().map(|(_, id)| id.0).collect(),
        entries: registered
            .probes
            .iter()
            .map(|(index, _)| entry(*index))
            .collect(),
        skipped: skipped(&registered.skipped),
        stopped_ns: u64::try_from(registered.stopped_for.as_nanos()).unwrap_or(u64::MAX),
    }
}

/// What was left out, for clients.
pub(super) fn skipped(skipped: &[Skipped]) -> Vec<v1::SkippedProbe> {
    let one = |skipped: &Skipped| v1::SkippedProbe {
        entry: entry(skipped.index),
        symbol: skipped.target.clone(),
        reason: chain(&skipped.why),
    };
    skipped.iter().map(one).collect()
}

/// A position in a batch, which has far fewer entries than this can count.
fn entry(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Why a batch was not registered, for clients.
pub(super) fn register_error(machine: &str, error: &RegisterError) -> Status {
    match error {
        RegisterError::Refused { index, source, .. } => {
            error::refused(chain(error), source).at_index(*index).into()
        }
        RegisterError::SomeRefused { index, first, .. } => {
            let why = &first.why;
            error::refused(chain(error), why).at_index(*index).into()
        }
        RegisterError::Unplanted { source } => error::refused(chain(error), source).into(),
        RegisterError::Spec { index, .. } => {
            Failure::new(Code::InvalidArgument, ErrorKind::BadActions, chain(error))
                .at_index(*index)
                .into()
        }
        RegisterError::Stop(stop) => stop_error(machine, stop),
    }
}

fn change_error(machine: &str, error: &ChangeError) -> Status {
    match error {
        ChangeError::NoSuchProbe { index, .. } => {
            Failure::new(Code::NotFound, ErrorKind::NoSuchProbe, chain(error))
                .at_index(*index)
                .into()
        }
        ChangeError::Refused { source, .. } => error::refused(chain(error), source).into(),
        ChangeError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Why the virtual CPUs of a machine could not be stopped, for clients.
pub(super) fn stop_error(machine: &str, error: &StopError) -> Status {
    match error {
        StopError::Ended => error::ended(machine),
        StopError::Unresponsive { .. } => {
            Failure::new(Code::Internal, ErrorKind::Host, chain(error)).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hvprobe_engine::Refused;

    use super::*;

    fn read(definitions: &[&str]) -> Result<Vec<ProbeSpec>, Status> {
        let probes = definitions.iter().map(|definition| v1::ProbeSpec {
            definition: (*definition).to_owned(),
            disabled: true,
            ..Default::default()
        });
        specs(probes.collect())
    }

    #[test]
    fn definitions_keep_their_order_and_flags() {
        let specs = read(&["p vfs_read", "p:w vfs_write+4"]).unwrap();
        let texts: Vec<_> = specs
            .iter()
            .map(|spec| spec.definition.to_string())
            .collect();
        assert_eq!(texts, ["p vfs_read", "p:w vfs_write+0x4"]);
        assert!(specs.iter().all(|spec| spec.disabled));
    }

    #[test]
    fn answer_says_what_came_of_each_entry_and_what_was_left_out() {
        let answer = response(&Registered {
            probes: vec![(0, ProbeId(7)), (2, ProbeId(8)), (2, ProbeId(9))],
            skipped: vec![Skipped {
                index: 1,
                definition: "p ext4:x".to_owned(),
                target: "ext4:x".to_owned(),
                why: Refused::ModuleNotLoaded {
                    module: "ext4".to_owned(),
                },
            }],
            stopped_for: Duration::from_micros(3),
        });
        assert_eq!(answer.ids, [7, 8, 9]);
        assert_eq!(answer.entries, [0, 2, 2]);
        assert_eq!(answer.stopped_ns, 3000);
        let [skipped] = answer.skipped.as_slice() else {
            panic!("{:?}", answer.skipped);
        };
        assert_eq!((skipped.entry, skipped.symbol.as_str()), (1, "ext4:x"));
        assert_eq!(skipped.reason, "module ext4 is not loaded");
    }

    #[test]
    fn bad_definition_and_oversized_batch_are_refused() {
        assert_eq!(
            read(&["p a", "p"]).unwrap_err().code(),
            Code::InvalidArgument
        );
        let many = vec!["p a"; limits::BATCH + 1];
        assert_eq!(read(&many).unwrap_err().code(), Code::InvalidArgument);
        let long = format!("p {}", "a".repeat(limits::DEFINITION));
        assert_eq!(read(&[&long]).unwrap_err().code(), Code::InvalidArgument);
    }
}
