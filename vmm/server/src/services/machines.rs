//! `hvprobe.v1.Machines`.

use hvprobe_arch::Gva;
use hvprobe_machine::{Bounds, Console, MachineConfig, Printed};
use hvprobe_proto::v1::{
    self, BootRequest, ConsoleOutput, ConsoleRequest, ConsoleWriteRequest, ConsoleWriteResponse,
    DeleteMachineRequest, DeleteMachineResponse, GetMachineRequest, InjectNmiRequest,
    InjectNmiResponse, ListMachinesRequest, ListMachinesResponse, MachineState, PauseRequest,
    ReadKernelRequest, ReadKernelResponse, ResumeRequest, StopRequest, WaitRequest,
    WatchMachinesRequest, WatchMachinesResponse, WatchRequest,
    machines_server::{self, MachinesServer},
};
use hvprobe_proto::wire::probe_spec;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::watcher::Watcher;
use crate::bounds::limits;
use crate::bounds::threads::Lane;
use crate::calls::panics;
use crate::listen::caller::Caller;
use crate::machines::identity::{self, Asked, few_labels};
use crate::machines::{Fleet, Handle};
use crate::sessions::keeper::Sessions;
use crate::wire::mask::Mask;
use crate::wire::page;
use crate::wire::registration;

/// Number of virtual CPUs if none is requested.
const DEFAULT_CPUS: u32 = 1;
/// Memory if none is requested, in bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;
/// Maximum bytes of a kernel command line. Kernels take 2047 (`COMMAND_LINE_SIZE`); the loader checks how many this
/// kernel's image takes.
const CMDLINE: usize = 64 << 10;
/// Maximum words of a guest's command.
const COMMAND_WORDS: usize = 4096;
/// Maximum bytes of a guest's command.
const COMMAND_BYTES: usize = 128 << 10;
/// Maximum number of boot requests that are parsed at a time.
const READS: usize = 4;
/// Maximum bytes of console output in one message.
const CONSOLE_PIECE: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    sessions: Sessions<Handle>,
    /// Limits the number of boot requests that are parsed at a time: each may have many definitions.
    reads: Lane,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(fleet: Fleet, sessions: Sessions<Handle>) -> MachinesServer<Self> {
        let service = Self {
            fleet,
            sessions,
            reads: Lane::new("a request for a machine", READS),
        };
        MachinesServer::new(service).max_decoding_message_size(limits::MESSAGE)
    }
}

type Machines = ReceiverStream<Result<v1::Machine, Status>>;
type Changes = ReceiverStream<Result<WatchMachinesResponse, Status>>;
type Output = ReceiverStream<Result<ConsoleOutput, Status>>;

#[tonic::async_trait]
impl machines_server::Machines for Service {
    type WatchStream = Machines;
    type WatchMachinesStream = Changes;
    type ConsoleStream = Output;

    async fn boot(&self, request: Request<BootRequest>) -> Result<Response<v1::Machine>, Status> {
        let caller = Caller::of(&request)?;
        let mut request = request.into_inner();
        let request_id = std::mem::take(&mut request.request_id);
        let labels = std::mem::take(&mut request.labels);
        // Checked before the request waits for its turn, so that an oversized request does not delay those after
        // it.
        identity::bounded(&request_id, labels.len())?;
        bounded(&request)?;
        let read = self.reads.run(move || {
            let asked = Asked::new(request_id, labels, &request)?;
            Ok::<_, Status>((asked, config(request)?))
        });
        let (asked, config) = read.await??;
        let handle = self.fleet.boot(config, asked).await?;
        tracing::debug!(machine = handle.name(), %caller, "booted");
        let registered = handle.registered();
        Ok(Response::new(v1::Machine {
            skipped: registered.skipped,
            probe_ids: registered.ids,
            probe_entries: registered.entries,
            ..handle.describe()
        }))
    }

    async fn list_machines(
        &self,
        request: Request<ListMachinesRequest>,
    ) -> Result<Response<ListMachinesResponse>, Status> {
        let ListMachinesRequest {
            labels,
            states,
            page_size,
            page_token,
            read_mask,
        } = request.into_inner();
        let mask = Mask::new(read_mask)?;
        limits::at_most("the number of states", states.len(), limits::STATES)?;
        let labels = few_labels(labels)?;
        let last = page::last_name(page_token)?;
        let handles = self.fleet.all();
        let following = handles
            .iter()
            .filter(|handle| handle.name() > last.as_str() && handle.has(&labels))
            .map(|handle| (handle.name(), handle.describe()))
            .filter(|(_, machine)| states.is_empty() || states.contains(&machine.state))
            .map(|(name, machine)| (name, mask.of(machine)));
        let (machines, next_page_token) = page::first(following, page_size);
        Ok(Response::new(ListMachinesResponse {
            machines,
            next_page_token,
        }))
    }

    async fn watch_machines(
        &self,
        request: Request<WatchMachinesRequest>,
    ) -> Result<Response<Changes>, Status> {
        let WatchMachinesRequest { labels, read_mask } = request.into_inner();
        let mask = Mask::new(read_mask)?.with(["name", "uid"]);
        let labels = few_labels(labels)?;
        let watch = |to_client| Watcher::new(&self.fleet, labels, mask, to_client).run();
        Ok(Response::new(panics::stream(1, watch)))
    }

    async fn get_machine(
        &self,
        request: Request<GetMachineRequest>,
    ) -> Result<Response<v1::Machine>, Status> {
        let handle = self.fleet.get(&request.into_inner().machine)?;
        Ok(Response::new(handle.describe()))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Machines>, Status> {
        let handle = self.fleet.get(&request.into_inner().machine)?;
        let watch = |to_client| watch(handle, to_client);
        Ok(Response::new(panics::stream(1, watch)))
    }

    async fn pause(&self, request: Request<PauseRequest>) -> Result<Response<v1::Machine>, Status> {
        let PauseRequest { machine, session } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        let ticket = self.sessions.begin(&session, &handle)?;
        handle.port()?.pause(ticket).await?;
        handle.touch();
        Ok(Response::new(handle.describe()))
    }

    async fn resume(
        &self,
        request: Request<ResumeRequest>,
    ) -> Result<Response<v1::Machine>, Status> {
        let handle = self.fleet.get(&request.into_inner().machine)?;
        handle.port()?.resume().await?;
        handle.touch();
        Ok(Response::new(handle.describe()))
    }

    async fn inject_nmi(
        &self,
        request: Request<InjectNmiRequest>,
    ) -> Result<Response<InjectNmiResponse>, Status> {
        let InjectNmiRequest { machine, cpu } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        handle.port()?.inject_nmi(cpu).await?;
        Ok(Response::new(InjectNmiResponse {}))
    }

    async fn stop(&self, request: Request<StopRequest>) -> Result<Response<v1::Machine>, Status> {
        let caller = Caller::of(&request)?;
        let handle = self.fleet.get(&request.into_inner().machine)?;
        tracing::debug!(machine = handle.name(), %caller, "to be stopped");
        Ok(Response::new(handle.stop().await?.machine.clone()))
    }

    async fn delete_machine(
        &self,
        request: Request<DeleteMachineRequest>,
    ) -> Result<Response<DeleteMachineResponse>, Status> {
        let caller = Caller::of(&request)?;
        let DeleteMachineRequest { machine } = request.into_inner();
        self.fleet.forget(&machine)?;
        tracing::debug!(machine, %caller, "deleted");
        Ok(Response::new(DeleteMachineResponse {}))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<v1::Machine>, Status> {
        let handle = self.fleet.get(&request.into_inner().machine)?;
        Ok(Response::new(handle.ended().await.machine.clone()))
    }

    async fn console(&self, request: Request<ConsoleRequest>) -> Result<Response<Output>, Status> {
        let ConsoleRequest { machine, kept_only } = request.into_inner();
        let handle = self.fleet.get(&machine)?;
        let kept = match handle.remains() {
            Some(remains) => Some(remains.console.clone()),
            None if kept_only => Some(handle.port()?.console_kept()),
            None => None,
        };
        Ok(Response::new(if let Some(kept) = kept {
            panics::stream(1, |to_client| show(kept, to_client))
        } else {
            let console = handle.port()?.console();
            panics::stream(1, |to_client| follow(console, to_client))
        }))
    }

    async fn read_kernel(
        &self,
        request: Request<ReadKernelRequest>,
    ) -> Result<Response<ReadKernelResponse>, Status> {
        let ReadKernelRequest {
            machine,
            address,
            length,
        } = request.into_inner();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        limits::at_most("the memory to read", length, limits::READ)?;
        let handle = self.fleet.get(&machine)?;
        let data = handle.port()?.read_kernel(Gva(address), length).await?;
        Ok(Response::new(ReadKernelResponse { data }))
    }

    async fn console_write(
        &self,
        request: Request<ConsoleWriteRequest>,
    ) -> Result<Response<ConsoleWriteResponse>, Status> {
        let ConsoleWriteRequest { machine, data } = request.into_inner();
        limits::at_most("the console input", data.len(), limits::CONSOLE_WRITE)?;
        let handle = self.fleet.get(&machine)?;
        let accepted = handle.port()?.console_input(data).await?;
        // At most the number of bytes in the request, which is far less than a `u32` can count.
        let accepted = u32::try_from(accepted).unwrap_or(u32::MAX);
        Ok(Response::new(ConsoleWriteResponse { accepted }))
    }
}

/// Sends the kept output of a console.
async fn show(kept: Vec<u8>, to_client: mpsc::Sender<Result<ConsoleOutput, Status>>) {
    for piece in kept.chunks(CONSOLE_PIECE) {
        let data = piece.to_vec();
        let output = ConsoleOutput { data, dropped: 0 };
        if to_client.send(Ok(output)).await.is_err() {
            return;
        }
    }
}

/// Sends a console's output until the machine has ended or the client is gone.
async fn follow(mut console: Console, to_client: mpsc::Sender<Result<ConsoleOutput, Status>>) {
    loop {
        let printed = tokio::select! {
            printed = console.next() => printed,
            () = to_client.closed() => return,
        };
        let Some(Printed { bytes, lost }) = printed else {
            return;
        };
        let output = ConsoleOutput {
            data: bytes,
            dropped: lost,
        };
        if to_client.send(Ok(output)).await.is_err() {
            return;
        }
    }
}

/// Sends the machine whenever it changes, until it has ended or the client is gone.
async fn watch(handle: Handle, to_client: mpsc::Sender<Result<v1::Machine, Status>>) {
    let mut changes = handle.follow();
    let mut last = None;
    loop {
        changes.mark_unchanged();
        let machine = handle.describe();
        let ended = machine.state() == MachineState::Stopped;
        if last.as_ref() != Some(&machine) {
            if to_client.send(Ok(machine.clone())).await.is_err() {
                return;
            }
            last = Some(machine);
        }
        if ended {
            return;
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = to_client.closed() => return,
        }
    }
}

/// Checks that nothing in `request` is too long, as far as possible without parsing its definitions.
fn bounded(request: &BootRequest) -> Result<(), Status> {
    if !request.name.is_empty() {
        limits::machine_name(&request.name).map_err(|bad| bad.on("name"))?;
    }
    limits::at_most("the kernel command line", request.cmdline.len(), CMDLINE)?;
    limits::at_most("the guest's command", request.command.len(), COMMAND_WORDS)?;
    let bytes = request.command.iter().map(String::len).sum();
    limits::at_most("the guest's command", bytes, COMMAND_BYTES)?;
    probe_spec::bounded(&request.probes).map_err(Status::from)
}

/// Converts the request to a configuration. Checks everything that does not depend on the host.
fn config(request: BootRequest) -> Result<MachineConfig, Status> {
    bounded(&request)?;
    let initrd = match request.initrd {
        none if none.is_empty() => None,
        path => Some(limits::path("the initrd", "initrd", path)?),
    };
    Ok(MachineConfig {
        name: request.name,
        kernel: limits::path("the kernel", "kernel", request.kernel)?,
        initrd,
        cmdline: request.cmdline,
        cpus: match request.cpus {
            0 => DEFAULT_CPUS,
            cpus => cpus,
        },
        memory: match request.memory {
            0 => DEFAULT_MEMORY,
            memory => memory,
        },
        command: request.command,
        probes: probe_spec::specs(request.probes)?,
        refusals: registration::refusals(request.skip_refused),
        paused: false,
        optimize: true,
        bounds: Bounds::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_stand_in_for_what_is_not_asked_for() {
        let config = config(BootRequest {
            kernel: "/vmlinuz".into(),
            ..Default::default()
        })
        .unwrap();
        assert_eq!((config.cpus, config.memory), (1, 256 << 20));
        assert_eq!(config.initrd, None);
    }

    #[test]
    fn requests_that_no_machine_can_come_of_are_refused() {
        let good = BootRequest {
            kernel: "/vmlinuz".into(),
            ..Default::default()
        };
        for bad in [
            BootRequest::default(),
            BootRequest {
                kernel: "vmlinuz".into(),
                ..good.clone()
            },
            BootRequest {
                initrd: "initrd".into(),
                ..good.clone()
            },
            BootRequest {
                name: "../etc".into(),
                ..good.clone()
            },
            BootRequest {
                command: vec!["x".repeat(1 << 20)],
                ..good.clone()
            },
            BootRequest {
                probes: vec![v1::ProbeSpec::default()],
                ..good
            },
        ] {
            assert!(config(bad.clone()).is_err(), "{bad:?}");
        }
    }
}
