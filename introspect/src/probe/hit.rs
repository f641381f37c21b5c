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
//! [`super::window`], what return probes do in [`super::returns`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use hvprobe_linux::image::TaskLayout;
use hvprobe_linux::task::TaskUnknown;
use hvprobe_spec::{Decision, Hold, ProbeId};

use super::act::{Seen, Taken};
use super::scene::{Kernel, Scene};
use super::table::{ProbeTable, Role, Site};
use crate::event::{Event, EventKind, EventProducer};
use crate::world::Clock;

/// How to read the guest's kernel at a hit.
#[derive(Clone, Copy, Debug)]
pub struct KernelView {
    /// The kernel's own page tables, which do not depend on the running process.
    pub tables: PageTables,
    /// Where to find the current task; if nothing tells, it is left out of events.
    pub task: Result<TaskLayout, TaskUnknown>,
    /// What to add, modulo 2^64, to a CPU's per-CPU base for the address of its number, an `i32`, if that
    /// can be told.
    pub cpu_number: Option<u64>,
    /// The kernel's interrupt descriptor table.
    pub idt: Gva,
}

/// What the virtual CPU has to do next. After every outcome it also sees to it that its IDTR is
/// [`HitHandler::window`]'s, or the guest's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The int3 is not ours: the guest must get it.
    Foreign,
    /// Go on with the changed registers; with `shadow`, interrupts stay held off for one more
    /// instruction, as after `sti`.
    Resume {
        /// Whether to hold interrupts off.
        shadow: bool,
    },
    /// The displaced instruction faults: raise this exception at RIP, the probepoint.
    Fault(Fault),
    /// The virtual CPU waits, with these registers (RIP is the probepoint), for what the hold says;
    /// then it calls [`HitHandler::resume`].
    Hold(Held),
}

/// An exception that an emulated instruction raises (SDM vol. 3, chapter 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Its number.
    pub vector: u8,
    /// Its error code, if it has one.
    pub error_code: Option<u32>,
    /// For a page fault that the processor has not met itself: the address accessed, which goes to
    /// CR2.
    pub address: Option<Gva>,
}

/// What a virtual CPU waits for at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The machine is to be paused, for this probe, until a client resumes it.
    Stop(ProbeId),
    /// A client is to be asked for a decision; [`HitHandler::question`] has the details.
    Ask(ProbeId),
    /// The module whose `struct module` is there was loaded, or is about to be unloaded: the
    /// registry has to look.
    Modules(Gva),
    /// The guest is about to register its kprobe whose `struct kprobe` is there.
    Kprobe(Gva),
    /// The guest's kernel is about to make way for another.
    Kexec,
    /// The guest's ftrace is about to patch text, or has done so.
    Ftrace {
        /// Whether it is about to.
        begins: bool,
    },
}

/// What a client is asked at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// The hit, without the position and the cost that its streamed event has.
    pub event: Event,
    /// How long the client has, from the event's host time.
    pub deadline: Duration,
    /// What is done when it does not answer.
    pub default: Decision,
}

/// A stepped instruction that has not come to its end.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) site: u32,
    /// The stack pointer at the probepoint.
    pub(super) rsp: u64,
    /// RFLAGS.IF at the probepoint, in its place.
    pub(super) interrupts: u64,
    pub(super) taken: Taken,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) at: Gva,
    /// The member that holds; those behind it have not run.
    pub(super) probe: ProbeId,
    pub(super) taken: Taken,
}

/// What a hit is given by the virtual CPU it happened on.
pub struct Surroundings<'a, M: ?Sized, C> {
    /// Guest memory.
    pub mem: &'a M,
    /// The clocks.
    pub clock: &'a C,
    /// GS base: the per-CPU base while the kernel runs.
    pub gs_base: u64,
    /// Tells CR3. It is asked when a handler reaches for memory of the process, once in a hit; to be
    /// given where [`HitHandler::reaches_memory`] says so.
    pub cr3: Option<&'a dyn Fn() -> Option<u64>>,
}

impl<M: ?Sized, C> fmt::Debug for Surroundings<'_, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surroundings")
            .field("gs_base", &self.gs_base)
            .finish_non_exhaustive()
    }
}

/// The hit path of one virtual CPU.
#[derive(Debug)]
pub struct HitHandler {
    table: Arc<ProbeTable>,
    kernel: Option<Kernel>,
    state: State,
}

/// What changes from hit to hit.
#[derive(Debug)]
pub(super) struct State {
    pub(super) vcpu: u32,
    pub(super) events: EventProducer,
    pub(super) flight: Option<InFlight>,
    pub(super) put_off: Option<InFlight>,
    pub(super) waiting: Option<Waiting>,
    after_sti: bool,
}

impl HitHandler {
    /// The hit path of virtual CPU `vcpu`, with no probes yet.
    #[must_use]
    pub fn new(vcpu: u32, events: EventProducer) -> Self {
        Self {
            table: Arc::default(),
            kernel: None,
            state: State {
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
        self.kernel = view.map(Kernel::new);
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
    pub fn reaches_memory(&self) -> bool {
        self.table.reaches_memory()
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
    /// copy that has not run, or is being repeated, is taken back to the probepoint. Outside of the
    /// exception window [`HitHandler::window`] tells of from then on, the guest is as it made
    /// itself.
    pub fn abandon(&mut self, regs: &mut Regs) {
        let table = &*self.table;
        self.state.put_off = None;
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

impl State {
    #[inline]
    fn hit<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        at: Gva,
        regs: &mut Regs,
    ) -> Outcome {
        let table = scene.table;
        let Some((index, site)) = table.at(at) else {
            return self.elsewhere(scene, at, regs);
        };
        self.at_site(scene, index, site, regs)
    }

    #[inline]
    fn at_site<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        index: u32,
        site: &Site,
        regs: &mut Regs,
    ) -> Outcome {
        regs.rip = site.displaced.at().0;
        self.after_sti = site.after_sti;
        let taken = Taken::now(scene.around);
        if self.is_stepping()
            && let Some(outcome) = self.again(scene, index, site, &taken, regs)
        {
            return outcome;
        }
        self.handle(scene, index, site, None, taken, regs)
    }

    fn is_stepping(&self) -> bool {
        self.flight.is_some() || self.put_off.is_some()
    }

    /// A hit while an instruction is half carried out, if its handlers are not to run.
    #[inline(never)]
    fn again<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        index: u32,
        site: &Site,
        taken: &Taken,
        regs: &mut Regs,
    ) -> Option<Outcome> {
        if let Some(flight) = self.put_off.take_if(|flight| {
            flight.site == index && flight.rsp == regs.rsp && regs.rflags & rflags::IF == 0
        }) {
            regs.rflags |= flight.interrupts;
            return Some(self.carry_out(scene, index, site, &flight.taken, regs));
        }
        if let Some(flight) = self.flight.take() {
            // The copy left the exception window on its own: nothing the instruction does on any
            // processor.
            regs.rflags |= flight.interrupts;
        } else if regs.rflags & rflags::IF != 0 {
            // No handler of an NMI turns interrupts on: the guest is elsewhere, for good.
            self.put_off = None;
            return None;
        }
        // A hit within another runs no handlers.
        let mut taken = *taken;
        for (number, member) in site.members.iter().enumerate() {
            match &member.role {
                Role::Internal(internal) if !internal.holds() => {
                    self.other(scene, site, member, &taken, regs);
                }
                _ => {
                    member.counters.miss(self.vcpu);
                    taken.mute(number);
                }
            }
        }
        Some(self.carry_out(scene, index, site, &taken, regs))
    }

    /// An int3 that is at no probepoint.
    #[inline(never)]
    fn elsewhere<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        at: Gva,
        regs: &mut Regs,
    ) -> Outcome {
        let table = scene.table;
        if table.is_trampoline(at) {
            return self.returned(scene, regs);
        }
        if let Some(index) = table.escape(at) {
            let Some(site) = table.site(index) else {
                return Outcome::Foreign;
            };
            return self.at_site(scene, index, site, regs);
        }
        if let Some(to) = table.inside_jump(at) {
            regs.rip = to.0;
            return Outcome::Resume { shadow: false };
        }
        if let Some((index, slot)) = table.slot_around(at) {
            return self.slot_end(scene, index, slot, at, regs);
        }
        let mut byte = [0];
        let gone =
            table.was_ours(at) && scene.memory().read(at, &mut byte).is_ok() && byte != [0xcc];
        if gone {
            regs.rip = at.0;
            Outcome::Resume { shadow: false }
        } else {
            Outcome::Foreign
        }
    }
}
