//! `hvprobe.v1.Probes`.

use std::sync::Arc;

use hvprobe_engine::ChangeError;
use hvprobe_machine::Machine;
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
use crate::machines::{Fleet, Handle};
use crate::sessions::keeper::{Sessions, Ticket};
use crate::status::{change_error, register_error};
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

    /// Calls `change` for these probes of a machine.
    async fn change(
        &self,
        machine: &str,
        ids: Vec<u32>,
        change: fn(&Machine, &[ProbeId]) -> Result<(), ChangeError>,
    ) -> Result<(), Status> {
        limits::at_most("the number of probes", ids.len(), limits::BATCH)?;
        let ids: Vec<_> = ids.into_iter().map(ProbeId).collect();
        let handle = self.fleet.get(machine)?;
        let changed = handle
            .blocking(move |machine| change(machine, &ids))
            .await?;
        changed.map_err(|error| change_error(machine, &error))
    }

    /// Sets a switch of a machine.
    async fn switch(
        &self,
        machine: &str,
        on: bool,
        switch: fn(&Machine, bool) -> Result<(), ChangeError>,
    ) -> Result<(), Status> {
        let handle = self.fleet.get(machine)?;
        let switched = handle.blocking(move |machine| switch(machine, on)).await?;
        switched.map_err(|error| change_error(machine, &error))?;
        handle.touch();
        Ok(())
    }
}

/// Registers the requested probes, in the name of the session of `ticket`.
async fn register(
    handle: Handle,
    request: RegisterRequest,
    ticket: Option<Ticket<Handle>>,
) -> Result<RegisterResponse, Status> {
    let refusals = refusals(request.skip_refused);
    let registered = handle
        .blocking(move |machine| {
            // Parsing the maximum number of definitions takes a while, too.
            let specs = probe_spec::specs(request.probes)?;
            // The ticket keeps the session from ending before its probes are known to belong to it.
            let owner = ticket.as_ref().map(|ticket| ticket.owner);
            let registered = machine.register_for(owner, &specs, refusals);
            registered.map_err(|error| register_error(&request.machine, &error))
        })
        .await??;
    Ok(response(&registered))
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
            register(handle, request, ticket).await
        });
        Ok(Response::new(answer.await?))
    }

    async fn unregister(
        &self,
        request: Request<UnregisterRequest>,
    ) -> Result<Response<UnregisterResponse>, Status> {
        let UnregisterRequest { machine, ids } = request.into_inner();
        self.change(&machine, ids, Machine::unregister).await?;
        Ok(Response::new(UnregisterResponse {}))
    }

    async fn enable(
        &self,
        request: Request<EnableRequest>,
    ) -> Result<Response<EnableResponse>, Status> {
        let EnableRequest { machine, ids } = request.into_inner();
        self.change(&machine, ids, Machine::enable).await?;
        Ok(Response::new(EnableResponse {}))
    }

    async fn disable(
        &self,
        request: Request<DisableRequest>,
    ) -> Result<Response<DisableResponse>, Status> {
        let DisableRequest { machine, ids } = request.into_inner();
        self.change(&machine, ids, Machine::disable).await?;
        Ok(Response::new(DisableResponse {}))
    }

    async fn arm_all(
        &self,
        request: Request<ArmAllRequest>,
    ) -> Result<Response<ArmAllResponse>, Status> {
        let ArmAllRequest { machine } = request.into_inner();
        self.switch(&machine, true, Machine::set_armed).await?;
        Ok(Response::new(ArmAllResponse {}))
    }

    async fn disarm_all(
        &self,
        request: Request<DisarmAllRequest>,
    ) -> Result<Response<DisarmAllResponse>, Status> {
        let DisarmAllRequest { machine } = request.into_inner();
        self.switch(&machine, false, Machine::set_armed).await?;
        Ok(Response::new(DisarmAllResponse {}))
    }

    async fn set_optimization(
        &self,
        request: Request<SetOptimizationRequest>,
    ) -> Result<Response<SetOptimizationResponse>, Status> {
        let SetOptimizationRequest { machine, on } = request.into_inner();
        self.switch(&machine, on, Machine::set_optimization).await?;
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
