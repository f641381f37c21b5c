//! `hvprobe.v1.Probes`.

use std::sync::Arc;

use hvprobe_proto::v1::{
    ArmAllRequest, ArmAllResponse, DisableRequest, DisableResponse, DisarmAllRequest,
    DisarmAllResponse, EnableRequest, EnableResponse, ListProbesRequest, ListProbesResponse,
    RegisterRequest, RegisterResponse, SetOptimizationRequest, SetOptimizationResponse,
    UnregisterRequest, UnregisterResponse,
    probes_server::{self, ProbesServer},
};
use hvprobe_proto::wire::probe_spec;
use hvprobe_spec::ProbeId;
use tonic::{Request, Response, Status};

use crate::bounds::limits;
use crate::machines::{Fleet, Handle, Port};
use crate::sessions::keeper::Sessions;
use crate::wire::page;
use crate::wire::registration::{refusals, response};

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    sessions: Sessions<Handle>,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(fleet: Fleet, sessions: Sessions<Handle>) -> ProbesServer<Self> {
        ProbesServer::new(Self { fleet, sessions }).max_decoding_message_size(limits::MESSAGE)
    }

    /// Returns the port to `machine`, and the ids. Fails if there are too many ids.
    fn probes_of(&self, machine: &str, ids: Vec<u32>) -> Result<(Port, Vec<ProbeId>), Status> {
        limits::at_most("the number of probes", ids.len(), limits::BATCH)?;
        let ids = ids.into_iter().map(ProbeId).collect();
        Ok((self.fleet.get(machine)?.port()?, ids))
    }

    /// Sets the global switch of `machine`.
    async fn set_armed(&self, machine: &str, armed: bool) -> Result<(), Status> {
        let handle = self.fleet.get(machine)?;
        handle.port()?.set_armed(armed).await?;
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
        let request = request.into_inner();
        probe_spec::bounded(&request.probes)?;
        let handle = self.fleet.get(&request.machine)?;
        let requests = Arc::clone(&handle.requests);
        let sessions = self.sessions.clone();
        // A repeated request is answered as before, whether or not its session still exists.
        let answer = requests.once(request, move |request| async move {
            let ticket = sessions.begin(&request.session, &handle)?;
            let refusals = refusals(request.skip_refused);
            let port = handle.port()?;
            let registered = port.register(request.probes, refusals, ticket).await?;
            Ok(response(&registered))
        });
        Ok(Response::new(answer.await?))
    }

    async fn unregister(
        &self,
        request: Request<UnregisterRequest>,
    ) -> Result<Response<UnregisterResponse>, Status> {
        let UnregisterRequest { machine, ids } = request.into_inner();
        let (port, ids) = self.probes_of(&machine, ids)?;
        port.unregister(ids).await?;
        Ok(Response::new(UnregisterResponse {}))
    }

    async fn enable(
        &self,
        request: Request<EnableRequest>,
    ) -> Result<Response<EnableResponse>, Status> {
        let EnableRequest { machine, ids } = request.into_inner();
        let (port, ids) = self.probes_of(&machine, ids)?;
        port.enable(ids).await?;
        Ok(Response::new(EnableResponse {}))
    }

    async fn disable(
        &self,
        request: Request<DisableRequest>,
    ) -> Result<Response<DisableResponse>, Status> {
        let DisableRequest { machine, ids } = request.into_inner();
        let (port, ids) = self.probes_of(&machine, ids)?;
        port.disable(ids).await?;
        Ok(Response::new(DisableResponse {}))
    }

    async fn arm_all(
        &self,
        request: Request<ArmAllRequest>,
    ) -> Result<Response<ArmAllResponse>, Status> {
        let ArmAllRequest { machine } = request.into_inner();
        self.set_armed(&machine, true).await?;
        Ok(Response::new(ArmAllResponse {}))
    }

    async fn disarm_all(
        &self,
        request: Request<DisarmAllRequest>,
    ) -> Result<Response<DisarmAllResponse>, Status> {
        let DisarmAllRequest { machine } = request.into_inner();
        self.set_armed(&machine, false).await?;
        Ok(Response::new(DisarmAllResponse {}))
    }

    async fn set_optimization(
        &self,
        request: Request<SetOptimizationRequest>,
    ) -> Result<Response<SetOptimizationResponse>, Status> {
        let SetOptimizationRequest { machine, on } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        handle.port()?.set_optimization(on).await?;
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
            owner,
        } = request.into_inner();
        page::last::<u32>(&page_token)?;
        let handle = self.fleet.get(&machine)?;
        let page = handle.probes(move |mut probes| {
            probes.retain(|probe| owner.is_empty() || probe.owner == owner);
            page::of_probes(probes, page_size, &page_token)
        });
        let (probes, next_page_token) = page.await??;
        Ok(Response::new(ListProbesResponse {
            probes,
            disarmed: handle.describe().disarmed,
            next_page_token,
        }))
    }
}
