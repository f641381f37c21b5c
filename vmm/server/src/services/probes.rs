//! `hvprobe.v1.Probes`.

use std::sync::Arc;

use hvprobe_proto::v1::{
    ArmAllRequest, ArmAllResponse, DisableRequest, DisableResponse, DisarmAllRequest,
    DisarmAllResponse, EnableRequest, EnableResponse, ListProbesRequest, ListProbesResponse,
    RegisterRequest, RegisterResponse, SetOptimizationRequest, SetOptimizationResponse,
    UnregisterRequest, UnregisterResponse, probes_server,
};
use hvprobe_spec::ProbeId;
use tonic::{Request, Response, Status};

use crate::fleet::{Fleet, Handle};
use crate::limits;
use crate::status::{change_error, register_error};
use crate::wire::page;
use crate::wire::registration::{refusals, response, specs};

/// The service.
#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
}

impl Service {
    pub(crate) fn new(fleet: Fleet) -> Self {
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

async fn register(handle: Handle, request: RegisterRequest) -> Result<RegisterResponse, Status> {
    let specs = specs(request.probes)?;
    let refusals = refusals(request.skip_refused);
    let registered = handle
        .blocking(move |machine| machine.register_batch(&specs, refusals))
        .await?
        .map_err(|error| register_error(&request.machine, &error))?;
    Ok(response(&registered))
}

#[tonic::async_trait]
impl probes_server::Probes for Service {
    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<RegisterResponse>, Status> {
        let request = request.into_inner();
        let handle = self.fleet.get(&request.machine)?;
        let requests = Arc::clone(&handle.requests);
        let answer = requests.once(request, |request| register(handle, request));
        Ok(Response::new(answer.await?))
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
        let ListProbesRequest {
            machine,
            page_size,
            page_token,
        } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        let (probes, next_page_token) =
            page::of_probes(handle.probes().await?, page_size, &page_token)?;
        Ok(Response::new(ListProbesResponse {
            probes,
            disarmed: handle.describe().disarmed,
            next_page_token,
        }))
    }
}
