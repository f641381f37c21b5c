//! The port to a live machine: everything that the server asks of it.
//!
//! Invariants: outside this file only the boot, and the conversion of a listing, name a [`Machine`]. Clients' calls
//! that may block run on the machine's own threads for calls, and continue even if nobody waits for them any more.
//! A port keeps the memory of its machine, so only the machine's handle holds a port for longer than a call. Most
//! calls pass plain values; [`Port::image`], [`Port::listen`], [`Port::attach`], [`Port::console`] and
//! [`Port::aggregate`] pass objects of this process.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_engine::{ChangeError, Refusals, Refused, Registered, StopError};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::types::Types;
use hvprobe_machine::{Aggregation, Asker, Console, LetGo, Listen, Machine, Owner, State};
use hvprobe_proto::v1;
use hvprobe_proto::wire::probe_spec;
use hvprobe_spec::ProbeId;
use hvprobe_spec::histogram::Histogram;
use tonic::Status;

use crate::bounds::threads::Lane;
use crate::sessions::keeper::{Place, Ticket};
use crate::status;
use crate::wire::convert;

/// A live machine. Clones are ports to the same machine.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    name: Arc<str>,
    machine: Arc<Machine>,
    /// Threads for calls that may block.
    calls: Arc<Lane>,
}

/// Calls that are answered at once.
impl Port {
    /// Creates the port to `machine`, which clients know by `name`.
    pub(crate) fn new(name: Arc<str>, machine: Arc<Machine>, calls: Arc<Lane>) -> Self {
        Self {
            name,
            machine,
            calls,
        }
    }

    /// Describes the machine, without the data that only its handle has.
    pub(crate) fn describe(&self) -> v1::Machine {
        convert::machine(&self.machine)
    }

    /// Returns the owners of the machine's pauses.
    pub(crate) fn paused_by(&self) -> Vec<Owner> {
        self.machine.paused_by()
    }

    /// Returns whether `owner` has a probe or a pause.
    pub(crate) fn belongs_to(&self, owner: Owner) -> bool {
        self.machine.belongs_to(owner)
    }

    /// Returns the kernel's image.
    pub(crate) fn image(&self) -> Arc<KernelImage> {
        Arc::clone(self.machine.image())
    }

    /// Returns the result of registering the configuration's probes, which happens before the guest runs.
    pub(crate) fn registered(&self) -> &Registered {
        self.machine.registered()
    }

    /// Passes events to `listener` from now on.
    pub(crate) fn listen(&self, listener: Box<dyn Listen>) {
        self.machine.listen(listener);
    }

    /// Attaches a client that decides at hits of `probes`.
    pub(crate) fn attach(&self, probes: impl IntoIterator<Item = ProbeId>) -> Asker {
        self.machine.decisions().attach(probes)
    }

    /// Returns a listener to the console.
    pub(crate) fn console(&self) -> Console {
        self.machine.console()
    }

    /// Returns the console output that is kept.
    pub(crate) fn console_kept(&self) -> Vec<u8> {
        self.machine.console_kept()
    }
}

/// Calls that block the calling thread.
impl Port {
    /// Lists the probes.
    pub(crate) fn probes(&self) -> Vec<v1::Probe> {
        convert::probes(&self.machine)
    }

    /// Returns the probes that have an owner, with their owners.
    pub(crate) fn owners(&self) -> BTreeMap<ProbeId, Owner> {
        self.machine.owners()
    }

    /// Calls `changed` at each change of the status, until the machine has ended.
    pub(crate) fn follow(&self, changed: impl Fn()) {
        let mut status = self.machine.status();
        // Followers that read the state before this may not know the first status.
        changed();
        while !matches!(status.state, State::Stopped(_)) {
            status = self.machine.wait_change(&status);
            changed();
        }
    }

    /// Disables all probes, so that their counters are final.
    pub(crate) fn disable_all(&self) -> Result<(), ChangeError> {
        let probes = self.machine.probes();
        let ids: Vec<_> = probes.iter().map(|probe| probe.id).collect();
        self.machine.disable(&ids)
    }

    /// Ends the machine, and waits until it has ended.
    pub(crate) fn stop(&self) {
        self.machine.stop();
    }
}

/// Calls that run on the machine's threads for calls. They consume the port: if it is the last one, the machine's
/// memory is freed on such a thread, and not by the task that waits.
impl Port {
    async fn call<T: Send + 'static>(
        self,
        call: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let Self { machine, calls, .. } = self;
        calls.run(move || call(&machine)).await
    }

    /// Pauses the machine, in the name of the session of `ticket`.
    pub(crate) async fn pause<P: Place>(self, ticket: Option<Ticket<P>>) -> Result<(), Status> {
        let name = Arc::clone(&self.name);
        let paused = self.call(move |machine| {
            let owner = ticket.as_ref().map(|ticket| ticket.owner);
            machine.pause_for(owner)
        });
        let paused = paused.await?;
        paused.map_err(|error| status::pause_error(&name, &error))
    }

    /// Lets the machine continue.
    pub(crate) async fn resume(self) -> Result<(), Status> {
        let name = Arc::clone(&self.name);
        let resumed = self.call(Machine::resume).await?;
        resumed.map_err(|error| status::pause_error(&name, &error))
    }

    /// Sends an NMI to one vCPU, or to all.
    pub(crate) async fn inject_nmi(self, cpu: Option<u32>) -> Result<(), Status> {
        let name = Arc::clone(&self.name);
        let sent = self.call(move |machine| machine.inject_nmi(cpu)).await?;
        sent.map_err(|error| status::nmi_error(&name, &error))
    }

    /// Reads `length` bytes of kernel memory.
    pub(crate) async fn read_kernel(self, at: Gva, length: usize) -> Result<Vec<u8>, Status> {
        let read = self.call(move |machine| {
            let mut data = vec![0; length];
            let read = machine.read_kernel(at, &mut data);
            read.map(|()| data)
        });
        read.await?.map_err(|error| status::read_error(&error))
    }

    /// Types `bytes` on the console; returns how many of them fitted.
    pub(crate) async fn console_input(self, bytes: Vec<u8>) -> Result<usize, Status> {
        self.call(move |machine| machine.console_input(&bytes))
            .await
    }

    /// Registers probes, in the name of the session of `ticket`.
    pub(crate) async fn register<P: Place>(
        self,
        probes: Vec<v1::ProbeSpec>,
        refusals: Refusals,
        ticket: Option<Ticket<P>>,
    ) -> Result<Registered, Status> {
        let name = Arc::clone(&self.name);
        let registered = self.call(move |machine| {
            // Parsed here, because parsing the maximum number of definitions takes a while.
            let specs = probe_spec::specs(probes)?;
            // The ticket keeps the session from ending before its probes are known to belong to it.
            let owner = ticket.as_ref().map(|ticket| ticket.owner);
            Ok::<_, Status>(machine.register_for(owner, &specs, refusals))
        });
        let registered = registered.await??;
        registered.map_err(|error| status::register_error(&name, &error))
    }

    /// Unregisters probes, all or none.
    pub(crate) async fn unregister(self, ids: Vec<ProbeId>) -> Result<(), Status> {
        self.change(move |machine| machine.unregister(&ids)).await
    }

    /// Enables probes, all or none.
    pub(crate) async fn enable(self, ids: Vec<ProbeId>) -> Result<(), Status> {
        self.change(move |machine| machine.enable(&ids)).await
    }

    /// Disables probes, all or none.
    pub(crate) async fn disable(self, ids: Vec<ProbeId>) -> Result<(), Status> {
        self.change(move |machine| machine.disable(&ids)).await
    }

    /// Sets the global switch.
    pub(crate) async fn set_armed(self, armed: bool) -> Result<(), Status> {
        self.change(move |machine| machine.set_armed(armed)).await
    }

    /// Turns optimization on or off.
    pub(crate) async fn set_optimization(self, on: bool) -> Result<(), Status> {
        self.change(move |machine| machine.set_optimization(on))
            .await
    }

    async fn change(
        self,
        change: impl FnOnce(&Machine) -> Result<(), ChangeError> + Send + 'static,
    ) -> Result<(), Status> {
        let name = Arc::clone(&self.name);
        let changed = self.call(change).await?;
        changed.map_err(|error| status::change_error(&name, &error))
    }

    /// Unregisters the probes and ends the pauses of `owners`. Returns `None` if the machine has ended.
    pub(crate) async fn let_go(self, owners: Vec<Owner>) -> Result<Option<LetGo>, Status> {
        let name = Arc::clone(&self.name);
        match self.call(move |machine| machine.let_go(&owners)).await? {
            Ok(let_go) => Ok(Some(let_go)),
            Err(ChangeError::Stop(StopError::Ended)) => Ok(None),
            Err(error) => Err(status::change_error(&name, &error)),
        }
    }

    /// Counts the events of `probes` in `histogram` from now on.
    pub(crate) async fn aggregate(
        self,
        probes: Vec<ProbeId>,
        histogram: Histogram,
    ) -> Result<Aggregation, Status> {
        let begun = self.call(move |machine| machine.aggregate(&probes, histogram));
        begun
            .await?
            .map_err(|error| status::aggregate_error(&error))
    }

    /// Waits until all listeners have got the events of all hits so far, but only for a few seconds. Returns
    /// whether they have.
    pub(crate) async fn flush_events(self) -> Result<bool, Status> {
        self.call(Machine::flush_events).await
    }

    /// Returns the symbol that contains `at`, if `at` is in a module that is loaded at the moment.
    pub(crate) async fn module_symbol(self, at: Gva) -> Result<Option<v1::Symbol>, Status> {
        let found = self.call(move |machine| {
            let module = machine.module_at(at)?;
            let mut symbol = convert::module_symbol(&module, at)?;
            symbol.module_build_id = machine.build_id(&module);
            Some(symbol)
        });
        found.await
    }

    /// Returns the types of the loaded modules that `wanted` names, by module name. Each name comes with its
    /// position in the request. The error is that of the first module whose types are unknown, with its position.
    pub(crate) async fn module_types(
        self,
        wanted: Vec<(usize, String)>,
    ) -> Result<Result<BTreeMap<String, Arc<Types>>, (usize, Refused)>, Status> {
        self.call(move |machine| machine.module_types(&wanted))
            .await
    }
}
