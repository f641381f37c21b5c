//! The hit path of one vCPU.
//!
//! ```text
//!                       hit: emulated, boosted, foreign
//!                      ┌──────────────┐
//!                      ▼              │
//!   ┌──────────────► idle ────────────┘
//!   │ hit at its end,  │  │ hit: a handler holds
//!   │ or exception     │  └────────► held ──────── resume ──► as after a hit
//!   │                  │ hit: stepped
//!   └── stepping ◄─────┘
//!          │ NMI before the copy ran            ▲ hit at the probepoint again
//!          └────────► put off ──────────────────┘
//! ```
//! While *stepping*, the guest runs a copy with interrupts held off and inside the exception window, so nothing but
//! the copy runs before the next exit. Invariants: the probe table is replaced only when nothing is being stepped
//! or put off; pre-handlers see the registers as they were at the probepoint, and run once for each time the guest
//! reaches it; every hit of an enabled probe is counted, as a hit or as missed. Budget of a hit: no lock, no
//! allocation, no formatting; two clock readings. [`super::handlers`] contains what handlers do, [`super::step`]
//! how a stepped copy ends, and [`super::returns`] what return probes do.

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::{Decision, Hold};

use super::clock::Clock;
use super::context::{KernelReader, Scene};
use super::event::{EventKind, EventProducer, Headroom};
use super::outcome::{Inquiry, Outcome};
use super::report::Seen;
use super::state::{HitState, Waiting};
use super::step::come_back;
use super::table::{ProbeTable, Role};
use super::view::{KernelView, Surroundings};

/// The hit path of one vCPU.
#[derive(Debug)]
pub struct HitHandler {
    table: Arc<ProbeTable>,
    kernel: Option<KernelReader>,
    state: HitState,
}

impl HitHandler {
    /// Creates the hit path of vCPU `vcpu`, with no probes yet.
    #[must_use]
    pub fn new(vcpu: u32, events: EventProducer) -> Self {
        Self {
            table: Arc::default(),
            kernel: None,
            state: HitState {
                vcpu,
                events,
                flight: None,
                put_off: None,
                waiting: None,
                after_sti: false,
            },
        }
    }

    /// Adopts another table and view of the kernel. Call only while the vCPU is stopped. Allocates.
    pub fn adopt(&mut self, table: Arc<ProbeTable>, view: Option<KernelView>) {
        self.table = table;
        self.kernel = view.map(KernelReader::new);
    }

    /// Returns whether any probepoint is armed.
    #[must_use]
    pub fn can_hit(&self) -> bool {
        !self.table.is_empty()
    }

    /// Returns whether the guest's kernel can be read.
    #[must_use]
    pub fn knows_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Returns whether a hit may open the exception window.
    #[must_use]
    pub fn can_step(&self) -> bool {
        self.table.steps()
    }

    /// Returns whether handlers read or write memory at addresses that may belong to the process.
    #[must_use]
    pub fn reaches_process(&self) -> bool {
        self.table.reaches_process()
    }

    /// Returns whether any probe asks that its hits wait for room for their events rather than lose them.
    #[must_use]
    pub fn waits_for_room(&self) -> bool {
        self.table.waits_for_room()
    }

    /// Returns how much room there is for events of the next hits.
    #[must_use]
    pub fn room(&self) -> Headroom {
        self.state.events.room()
    }

    /// Returns whether a stepped instruction has not ended, so that this vCPU must not be stopped yet.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.state.is_stepping()
    }

    /// Returns the interrupt descriptor table that the vCPU must run with now, if that is not the guest's own.
    #[must_use]
    pub fn window(&self) -> Option<Gva> {
        self.state
            .flight
            .and(self.table.fixtures())
            .map(|fixtures| fixtures.idt())
    }

    /// Abandons a step that does not end, because the guest has changed the code that was to run, or because its
    /// NMI handler does not return. If RIP is in the copy, moves it to where it would be without the copy: to the
    /// probepoint, or to the next instruction if the copy is complete. If the step was interrupted by an NMI,
    /// restores the guest's IF flag for its return to the probepoint; that return is then a hit like any other.
    /// Closes the exception window, see [`HitHandler::window`]. Changes nothing else of the guest.
    pub fn abandon<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) {
        let table = &*self.table;
        if let Some(flight) = self.state.put_off.take()
            && let Some(kernel) = &self.kernel
        {
            let scene = Scene::new(table, kernel, around);
            come_back(&scene, &flight, regs);
        }
        if let Some(flight) = self.state.flight.take()
            && let Some(site) = table.site(flight.site)
            && let Some(slot) = &site.slot
            && let Some(at) = site.displaced.in_place(slot, Gva(regs.rip))
        {
            regs.rip = at.0;
            regs.rflags |= flight.interrupts;
        }
    }

    /// Returns the vector whose stub RIP has reached. The caller must then call [`HitHandler::exception`] with it.
    /// `None` if the exception window is closed, or if RIP is at no stub.
    #[must_use]
    pub fn vector(&self, rip: Gva) -> Option<u8> {
        self.state.flight?;
        self.table.fixtures()?.vector(rip)
    }

    /// Returns the address of the trampoline if RIP has reached it. The caller must then call [`HitHandler::hit`]
    /// with that address.
    #[must_use]
    pub fn trampoline(&self, rip: Gva) -> Option<Gva> {
        let fixtures = self.table.fixtures()?;
        fixtures.at_trampoline(rip).then(|| fixtures.trampoline())
    }

    /// Fills `into` with the kernel's memory at `at`, before a hit. Returns whether it could be read. Hit path: the
    /// walk is remembered, because the hit is likely to read the same page.
    pub fn read<M: PhysMemory + ?Sized>(&self, mem: &M, at: Gva, into: &mut [u8]) -> bool {
        self.kernel
            .as_ref()
            .is_some_and(|kernel| kernel.read(mem, at, into))
    }

    /// Handles an int3 or the trampoline at `at`, which stopped the vCPU in kernel mode. `regs` are the registers
    /// at the probepoint, but RIP may have any value. They are unchanged if the outcome is [`Outcome::Foreign`].
    pub fn hit<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        at: Gva,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let (table, Some(kernel)) = (&*self.table, &self.kernel) else {
            return Outcome::Foreign;
        };
        let scene = Scene::new(table, kernel, around);
        let before = cfg!(debug_assertions).then_some(*regs);
        self.state.events.turn();
        let outcome = self.state.hit(&scene, at, regs);
        self.state.events.turn();
        if outcome == Outcome::Foreign {
            debug_assert_eq!(before, Some(*regs));
        }
        outcome
    }

    /// Continues after an [`Outcome::Hold`] with `decision`. `regs` are the registers with which the vCPU was held.
    pub fn resume<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        decision: &Decision,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let (table, Some(kernel)) = (&*self.table, &self.kernel) else {
            return Outcome::Resume { shadow: false };
        };
        let scene = Scene::new(table, kernel, around);
        self.state.resume(&scene, decision, regs)
    }

    /// Handles exception `vector`, whose stub was reached in the exception window; the processor has pushed its
    /// frame. `own_idt` is the guest's interrupt descriptor table. Sends the guest to its own handler, as if the
    /// instruction had raised the exception in its place.
    pub fn exception<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        vector: u8,
        own_idt: Gva,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let (table, Some(kernel)) = (&*self.table, &self.kernel) else {
            return Outcome::Foreign;
        };
        let scene = Scene::new(table, kernel, around);
        self.state.events.turn();
        let outcome = self.state.exception(&scene, vector, own_idt, regs);
        self.state.events.turn();
        outcome
    }

    /// Returns whether the instruction before the probepoint of the last hit may have been `sti`, and clears this
    /// information. If so, the interrupt shadow must be ended: it covers only the displaced instruction, and no
    /// processor may enter with a shadow while interrupts are held off (SDM vol. 3, 26.3.1.5).
    pub fn ends_shadow(&mut self) -> bool {
        std::mem::take(&mut self.state.after_sti)
    }

    /// Returns the question that this vCPU has to ask a client; `None` if it is not held to ask, or if the probe
    /// that asks is gone. `regs` are the registers with which it is held.
    pub fn question<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        regs: &Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Option<Inquiry> {
        let Waiting { at, probe, taken } = self.state.waiting?;
        let scene = Scene::new(&self.table, self.kernel.as_ref()?, around);
        let (_, site) = scene.table.at(at)?;
        let member = site.members.iter().find(|member| member.id == probe)?;
        let Role::Probe(actions) = &member.role else {
            return None;
        };
        let Some(Hold::Ask { deadline, default }) = &actions.hold else {
            return None;
        };
        let seen = Seen::new(self.state.vcpu, probe, actions, regs, &taken);
        Some(Inquiry {
            event: seen.event_now(&scene, EventKind::Hit, &actions.capture),
            deadline: *deadline,
            default: default.clone(),
        })
    }
}
