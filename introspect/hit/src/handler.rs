//! One virtual CPU's side of a hit.
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
//! While *stepping* the guest runs a copy with interrupts held off and inside the exception window,
//! so nothing but the copy runs before we are back. Invariants: the probe table is replaced only when
//! nothing is being stepped or put off; pre-handlers see the registers as they were at the
//! probepoint, and run once for each time the guest comes there; every hit of an enabled probe is
//! counted, as a hit or as missed. Budget of a hit: no lock, no allocation, no formatting; two clock
//! readings. What handlers do is in [`super::handlers`], how a stepped copy ends in
//! [`super::step`], what return probes do in [`super::returns`].

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::{Decision, Hold};

use super::clock::Clock;
use super::context::{KernelReader, Scene};
use super::event::{EventKind, EventProducer, Room};
use super::outcome::{Inquiry, Outcome};
use super::sample::Seen;
use super::state::{HitState, Waiting};
use super::step::come_back;
use super::table::{ProbeTable, Role};
use super::view::{KernelView, Surroundings};

/// The hit path of one virtual CPU.
#[derive(Debug)]
pub struct HitHandler {
    table: Arc<ProbeTable>,
    kernel: Option<KernelReader>,
    state: HitState,
}

impl HitHandler {
    /// The hit path of virtual CPU `vcpu`, with no probes yet.
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

    /// Takes over a new table and view of the kernel. Call only while stopped. Allocates.
    pub fn adopt(&mut self, table: Arc<ProbeTable>, view: Option<KernelView>) {
        self.table = table;
        self.kernel = view.map(KernelReader::new);
    }

    /// Whether there is anything to hit.
    #[must_use]
    pub fn can_hit(&self) -> bool {
        !self.table.is_empty()
    }

    /// Whether the guest's kernel can be read.
    #[must_use]
    pub fn knows_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Whether a hit may open the exception window.
    #[must_use]
    pub fn can_step(&self) -> bool {
        self.table.steps()
    }

    /// Whether handlers read or write memory by addresses that may be the process's.
    #[must_use]
    pub fn reaches_process(&self) -> bool {
        self.table.reaches_process()
    }

    /// Whether a hit may want to wait for room rather than be lost.
    #[must_use]
    pub fn waits_for_room(&self) -> bool {
        self.table.waits_for_room()
    }

    /// How much room there is for events of the next hits.
    #[must_use]
    pub fn room(&self) -> Room {
        self.state.events.room()
    }

    /// Whether an instruction is half carried out, so that this virtual CPU must not be stopped
    /// yet.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.state.is_stepping()
    }

    /// The interrupt descriptor table the virtual CPU must run with now, if not the guest's own.
    #[must_use]
    pub fn window(&self) -> Option<Gva> {
        self.state
            .flight
            .and(self.table.fixtures())
            .map(|fixtures| fixtures.idt())
    }

    /// Gives up on the instruction that is half carried out, because it does not come to its end:
    /// the guest has changed what it would have run there, or its handler of an NMI stays away. A
    /// copy that has not run, or is being repeated, is taken back to the probepoint, and who comes back there from
    /// an NMI does so with interrupts as they were: it is a hit like any other then. Outside of the exception window
    /// [`HitHandler::window`] tells of from then on, nothing of the guest's is changed.
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

    /// The vector whose stub RIP has reached: [`HitHandler::exception`] is to be called.
    #[must_use]
    pub fn vector(&self, rip: Gva) -> Option<u8> {
        self.state.flight?;
        self.table.fixtures()?.vector(rip)
    }

    /// The trampoline, if RIP has reached it: [`HitHandler::hit`] is to be called with it.
    #[must_use]
    pub fn trampoline(&self, rip: Gva) -> Option<Gva> {
        let fixtures = self.table.fixtures()?;
        fixtures.at_trampoline(rip).then(|| fixtures.trampoline())
    }

    /// Fills `into` with what the kernel has at `at`; whether it could be read. Hit path: what is read
    /// here is likely to be looked at by the hit too.
    pub fn read<M: PhysMemory + ?Sized>(&self, mem: &M, at: Gva, into: &mut [u8]) -> bool {
        self.kernel
            .as_ref()
            .is_some_and(|kernel| kernel.read(mem, at, into))
    }

    /// An int3 at `at`, or the trampoline there, stopped the virtual CPU in kernel mode; `regs` are as
    /// at the probepoint, except that RIP may be anything. They stay what they are if the outcome is
    /// [`Outcome::Foreign`].
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

    /// Goes on after an [`Outcome::Hold`], with what was decided; `regs` are the registers the
    /// virtual CPU was held with.
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

    /// The stub of exception `vector` was reached in the exception window; the processor has pushed
    /// its frame. `own_idt` is the guest's interrupt descriptor table. Sends the guest to its own
    /// handler, with everything as if the instruction had raised the exception in its place.
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

    /// Whether the instruction before the probepoint of the last hit may have been `sti`, whose
    /// interrupt shadow is over now (and without which no processor may enter with interrupts held
    /// off, SDM vol. 3, 26.3.1.5). Asking resets it.
    pub fn ends_shadow(&mut self) -> bool {
        std::mem::take(&mut self.state.after_sti)
    }

    /// What this virtual CPU is to ask a client; `regs` are the registers it is held with. `None`
    /// when it is not held to ask, or the probe that asks is gone.
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
