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
//! readings.

use std::sync::Arc;

use hvprobe_arch::insn::{Effect, Memory, MemoryFault, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gpr, Gva, Regs};

use super::ProbeId;
use super::act::{Taken, apply, event, report};
use super::spec::{Decision, Hold, Then};
use super::table::{Internal, Member, ProbeTable, Role, Site};
use crate::event::{EventKind, EventProducer};
use crate::image::TaskLayout;
use crate::world::Clock;

/// How to read the guest's kernel at a hit.
#[derive(Clone, Copy, Debug)]
pub struct KernelView {
    /// The kernel's own page tables, which do not depend on the running process.
    pub tables: PageTables,
    /// Where to find the current task; `None` leaves it out of events.
    pub task: Option<TaskLayout>,
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
    /// The displaced instruction faults: raise a page fault at RIP, the probepoint, for this
    /// access.
    Fault(Access),
    /// The virtual CPU waits, with these registers (RIP is the probepoint), for what the hold says;
    /// then it calls [`HitHandler::resume`].
    Hold(Held),
}

/// A memory access that the guest's kernel could not have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The address accessed.
    pub at: Gva,
    /// Whether it was a write.
    pub write: bool,
}

/// What a virtual CPU waits for at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The machine is to be paused, for this probe, until a client resumes it.
    Stop(ProbeId),
    /// A client is to be asked for a decision; [`HitHandler::question`] has the details.
    Ask(ProbeId),
    /// The guest's modules changed: the registry has to look at them.
    Modules,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    site: u32,
    /// At the probepoint, after the pre-handlers.
    regs: Regs,
    taken: Taken,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    at: Gva,
    /// The member that holds; those behind it have not run.
    probe: ProbeId,
}

/// What a hit is given by the virtual CPU it happened on.
#[derive(Debug)]
pub struct Surroundings<'a, M: ?Sized, C> {
    /// Guest memory.
    pub mem: &'a M,
    /// The clocks.
    pub clock: &'a C,
    /// GS base: the per-CPU base while the kernel runs.
    pub gs_base: u64,
}

/// The hit path of one virtual CPU.
#[derive(Debug)]
pub struct HitHandler {
    pub(super) vcpu: u32,
    pub(super) table: Arc<ProbeTable>,
    view: Option<KernelView>,
    pub(super) events: EventProducer,
    flight: Option<InFlight>,
    put_off: Option<InFlight>,
    waiting: Option<Waiting>,
}

/// The guest's memory as the kernel sees it.
pub(super) struct GuestMemory<'a, M: ?Sized> {
    pub(super) tables: &'a PageTables,
    pub(super) mem: &'a M,
    /// Whether the last access was a write.
    wrote: bool,
}

impl<'a, M: PhysMemory + ?Sized> GuestMemory<'a, M> {
    pub(super) fn new(tables: &'a PageTables, mem: &'a M) -> Self {
        Self {
            tables,
            mem,
            wrote: false,
        }
    }
}

impl<M: PhysMemory + ?Sized> Memory for GuestMemory<'_, M> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.wrote = false;
        self.tables
            .read_u64(self.mem, at)
            .map_err(|cause| MemoryFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault> {
        self.wrote = true;
        self.tables
            .write(self.mem, at, &value.to_le_bytes())
            .map_err(|cause| MemoryFault { at, cause })
    }
}

/// What the pre-handlers of a site came to.
enum Handled {
    /// The displaced instruction is next.
    Proceed,
    /// A handler sent the guest elsewhere.
    Diverted,
    /// A handler holds the virtual CPU.
    Hold(Held),
}

impl HitHandler {
    /// The hit path of virtual CPU `vcpu`, with no probes yet.
    #[must_use]
    pub fn new(vcpu: u32, events: EventProducer) -> Self {
        Self {
            vcpu,
            table: Arc::default(),
            view: None,
            events,
            flight: None,
            put_off: None,
            waiting: None,
        }
    }

    /// Takes over a new table and view of the kernel. Call only while stopped.
    pub fn adopt(&mut self, table: Arc<ProbeTable>, view: Option<KernelView>) {
        self.table = table;
        self.view = view;
    }

    /// Whether an instruction is half carried out, so that this virtual CPU must not be stopped
    /// yet.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.flight.is_some() || self.put_off.is_some()
    }

    /// The interrupt descriptor table the virtual CPU must run with now, if not the guest's own.
    #[must_use]
    pub fn window(&self) -> Option<Gva> {
        self.flight
            .and(self.table.fixtures())
            .map(|fixtures| fixtures.idt())
    }

    /// An int3 at `at` stopped the virtual CPU in kernel mode; `regs` are as at the probepoint,
    /// except that RIP may be anything.
    pub fn hit<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        at: Gva,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let Some(view) = self.view else {
            return Outcome::Foreign;
        };
        let table = Arc::clone(&self.table);
        let Some(index) = table.find(at) else {
            return self.elsewhere(&table, at, regs, &view, around);
        };
        let Some(site) = table.site(index) else {
            return Outcome::Foreign;
        };
        regs.rip = at.0;
        if let Some(flight) = self.put_off.take_if(|flight| {
            flight.site == index && flight.regs.rsp == regs.rsp && regs.rflags & rflags::IF == 0
        }) {
            regs.rflags |= flight.regs.rflags & rflags::IF;
            return self.carry_out(index, site, flight.taken, regs, &view, around);
        }
        let taken = Taken::now(around);
        if self.flight.take().is_some() {
            // The copy left the exception window on its own: nothing the instruction does on any
            // processor. The hit it meets is nested and runs no handlers.
            for member in &site.members {
                member.counters.miss(self.vcpu);
            }
            return self.carry_out(index, site, taken, regs, &view, around);
        }
        match self.pre_handlers(site, None, &taken, regs, &view, around) {
            Handled::Proceed => self.carry_out(index, site, taken, regs, &view, around),
            Handled::Diverted => Outcome::Resume { shadow: false },
            Handled::Hold(held) => Outcome::Hold(held),
        }
    }

    /// Goes on after an [`Outcome::Hold`], with what was decided; `regs` are the registers the
    /// virtual CPU was held with.
    pub fn resume<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        decision: &Decision,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let (Some(Waiting { at, probe }), Some(view)) = (self.waiting.take(), self.view) else {
            return Outcome::Resume { shadow: false };
        };
        let table = Arc::clone(&self.table);
        let Some((index, site)) = table
            .find(at)
            .and_then(|index| Some((index, table.site(index)?)))
        else {
            // The last probe here left meanwhile: the instruction is back in its place.
            return Outcome::Resume { shadow: false };
        };
        let taken = Taken::now(around);
        if let Some(member) = site.members.iter().find(|member| member.id == probe) {
            let memory = &mut GuestMemory::new(&view.tables, around.mem);
            if !apply(&decision.changes, regs, memory) {
                member.counters.error(self.vcpu);
            }
            if self.diverts(decision.then, member, regs, &view, around) {
                self.miss_behind(site, probe);
                return Outcome::Resume { shadow: false };
            }
        }
        match self.pre_handlers(site, Some(probe), &taken, regs, &view, around) {
            Handled::Proceed => self.carry_out(index, site, taken, regs, &view, around),
            Handled::Diverted => Outcome::Resume { shadow: false },
            Handled::Hold(held) => Outcome::Hold(held),
        }
    }

    /// The deadline and the default of the question this virtual CPU is held with.
    #[must_use]
    pub fn question(&self) -> Option<Hold> {
        let Waiting { at, probe } = self.waiting?;
        let site = self.table.site(self.table.find(at)?)?;
        let member = site.members.iter().find(|member| member.id == probe)?;
        match &member.role {
            Role::Probe(actions) => actions.hold.clone(),
            _ => None,
        }
    }

    /// Runs the handlers of the members behind `after`, in the order of their registration.
    fn pre_handlers<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        site: &Site,
        after: Option<ProbeId>,
        taken: &Taken,
        regs: &mut Regs,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) -> Handled {
        let behind = |member: &&Member| after.is_none_or(|after| member.id > after);
        for member in site.members.iter().filter(behind) {
            let actions = match &member.role {
                Role::Probe(actions) => actions,
                Role::Return { actions, pool } => {
                    self.enter(member, actions, pool, taken, regs, view, around);
                    continue;
                }
                Role::Internal(Internal::TaskDead) => {
                    self.task_dead(taken, view, around);
                    continue;
                }
                Role::Internal(Internal::Modules) => {
                    self.waiting = Some(Waiting {
                        at: site.displaced.at(),
                        probe: member.id,
                    });
                    return Handled::Hold(Held::Modules);
                }
            };
            member.counters.hit(self.vcpu);
            let memory = &mut GuestMemory::new(&view.tables, around.mem);
            let seen = event(EventKind::Hit, self.vcpu, member.id, actions, regs, taken);
            report(&mut self.events, seen, &actions.capture, memory, view, taken, around.clock);
            if !apply(&actions.changes, regs, memory) {
                member.counters.error(self.vcpu);
            }
            if let Some(hold) = &actions.hold {
                self.waiting = Some(Waiting {
                    at: site.displaced.at(),
                    probe: member.id,
                });
                return Handled::Hold(match hold {
                    Hold::Stop => Held::Stop(member.id),
                    Hold::Ask { .. } => Held::Ask(member.id),
                });
            }
            if self.diverts(actions.then, member, regs, view, around) {
                self.miss_behind(site, member.id);
                return Handled::Diverted;
            }
        }
        Handled::Proceed
    }

    /// Counts the hit as missed for the members behind the one that changed the execution path.
    fn miss_behind(&self, site: &Site, probe: ProbeId) {
        for member in site.members.iter().filter(|member| member.id > probe) {
            member.counters.miss(self.vcpu);
        }
    }

    /// Sends the guest where `then` says; whether it is elsewhere than at the probepoint.
    fn diverts<M: PhysMemory + ?Sized, C>(
        &self,
        then: Then,
        member: &Member,
        regs: &mut Regs,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) -> bool {
        match then {
            Then::Proceed => return false,
            Then::Jump(to) => regs.rip = to.0,
            Then::Return(value) => {
                let Ok(to) = view.tables.read_u64(around.mem, Gva(regs.rsp)) else {
                    member.counters.error(self.vcpu);
                    return false;
                };
                regs.set(Gpr::Rax, value);
                regs.rsp = regs.rsp.wrapping_add(8);
                regs.rip = to;
            }
        }
        true
    }

    /// Lets the displaced instruction take effect.
    fn carry_out<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        index: u32,
        site: &Site,
        taken: Taken,
        regs: &mut Regs,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let Some(slot) = &site.slot else {
            let mut memory = GuestMemory::new(&view.tables, around.mem);
            return match site.displaced.emulate(regs, &mut memory) {
                Ok(effect) => {
                    self.post_handlers(site, regs, &taken, view, around);
                    Outcome::Resume {
                        shadow: effect == Effect::Shadow,
                    }
                }
                Err(fault) => {
                    let access = Access {
                        at: fault.at,
                        write: memory.wrote,
                    };
                    let kind = EventKind::Fault {
                        vector: PAGE_FAULT,
                        error_code: Some(access.error_code()),
                    };
                    self.faulted(site, kind, regs, &taken, view, around);
                    Outcome::Fault(access)
                }
            };
        };
        if slot.kind() == SlotKind::Trapped {
            self.flight = Some(InFlight {
                site: index,
                regs: *regs,
                taken,
            });
            // Whatever interrupted the copy would find the guest in a place it does not know, and
            // another hit there would be nested.
            regs.rflags &= !rflags::IF;
        }
        regs.rip = slot.at().0;
        Outcome::Resume { shadow: false }
    }

    /// An int3 that is at no probepoint.
    fn elsewhere<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        table: &ProbeTable,
        at: Gva,
        regs: &mut Regs,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        if table.is_trampoline(at) {
            return self.returned(regs, view, around);
        }
        if let Some((index, slot)) = table.slot_around(at) {
            return self.slot_end(table, index, slot, at, regs, view, around);
        }
        let mut byte = [0];
        let gone = table.was_ours(at)
            && view.tables.read(around.mem, at, &mut byte).is_ok()
            && byte != [0xcc];
        if gone {
            regs.rip = at.0;
            Outcome::Resume { shadow: false }
        } else {
            Outcome::Foreign
        }
    }

    /// The int3 at the end of a slot: the copy ran.
    #[allow(clippy::too_many_arguments, reason = "one call, all of it needed")]
    fn slot_end<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        table: &ProbeTable,
        index: u32,
        slot: &SlotCode,
        at: Gva,
        regs: &mut Regs,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) -> Outcome {
        let Some(site) = table.site(index) else {
            return Outcome::Foreign;
        };
        let Some(end) = site.displaced.trap_end(slot, at) else {
            return Outcome::Foreign;
        };
        regs.rip = end.0;
        if let Some(flight) = self.flight.take_if(|flight| flight.site == index) {
            regs.rflags |= flight.regs.rflags & rflags::IF;
            self.post_handlers(site, regs, &flight.taken, view, around);
        }
        Outcome::Resume { shadow: false }
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
        let (Some(flight), Some(view)) = (self.flight, self.view) else {
            return Outcome::Foreign;
        };
        let table = Arc::clone(&self.table);
        let Some((site, slot)) = table
            .site(flight.site)
            .and_then(|site| Some((site, site.slot.as_ref()?)))
        else {
            return Outcome::Foreign;
        };
        let read = |at: Gva| view.tables.read_u64(around.mem, at);
        let frame = Gva(regs.rsp).wrapping_add(if has_error_code(vector) { 8 } else { 0 });
        let (Ok(rip), Ok(flags), Ok(rsp), Ok(handler)) = (
            read(frame),
            read(frame.wrapping_add(FRAME_RFLAGS)),
            read(frame.wrapping_add(FRAME_RSP)),
            gate_handler(read, own_idt, vector),
        ) else {
            return Outcome::Foreign;
        };
        let before = Regs {
            rip,
            rflags: flags,
            rsp,
            ..*regs
        };
        let int3 = Gva(rip.wrapping_sub(1));
        if vector == BREAKPOINT && site.displaced.trap_end(slot, int3).is_some() {
            *regs = before;
            return self.slot_end(&table, flight.site, slot, int3, regs, &view, around);
        }
        let in_place = site.displaced.in_place(slot, Gva(rip)).unwrap_or(Gva(rip));
        self.flight = None;
        let mut flags = flags | flight.regs.rflags & rflags::IF;
        let began = in_place == site.displaced.at();
        if !began {
            // The copy was complete; the exception came before its end was reached.
            let mut after = Regs {
                rip: in_place.0,
                rflags: flags,
                ..before
            };
            self.post_handlers(site, &mut after, &flight.taken, &view, around);
        } else if vector == NMI || vector == MACHINE_CHECK {
            // The guest comes back to the probepoint with interrupts still held off, so straight to
            // its int3; the handlers have run.
            flags &= !rflags::IF;
            self.put_off = Some(flight);
        } else {
            let error_code = has_error_code(vector)
                .then(|| read(Gva(regs.rsp)).ok())
                .flatten()
                .and_then(|code| u32::try_from(code & u64::from(u32::MAX)).ok());
            let kind = EventKind::Fault { vector, error_code };
            let at = Regs {
                rip: in_place.0,
                rflags: flags,
                ..before
            };
            self.faulted(site, kind, &at, &flight.taken, &view, around);
        }
        let memory = &mut GuestMemory::new(&view.tables, around.mem);
        // The processor wrote there a moment ago; should the guest have taken the page away
        // meanwhile, it sees the slot's address.
        let _ = memory.write_u64(frame, in_place.0);
        let _ = memory.write_u64(frame.wrapping_add(FRAME_RFLAGS), flags);
        regs.rip = handler;
        Outcome::Resume { shadow: false }
    }

    /// Reports the state after the displaced instruction to those who asked for it.
    fn post_handlers<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        site: &Site,
        regs: &Regs,
        taken: &Taken,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) {
        for member in &site.members {
            if let Role::Probe(actions) = &member.role
                && actions.post
            {
                let memory = &mut GuestMemory::new(&view.tables, around.mem);
                let seen = event(EventKind::Post, self.vcpu, member.id, actions, regs, taken);
                report(&mut self.events, seen, &actions.capture, memory, view, taken, around.clock);
            }
        }
    }

    /// Counts a fault of the displaced instruction, and reports it to those who asked for it.
    fn faulted<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        site: &Site,
        kind: EventKind,
        regs: &Regs,
        taken: &Taken,
        view: &KernelView,
        around: &Surroundings<'_, M, C>,
    ) {
        for member in &site.members {
            member.counters.fault(self.vcpu);
            if let Role::Probe(actions) = &member.role
                && actions.faults
            {
                let memory = &mut GuestMemory::new(&view.tables, around.mem);
                let seen = event(kind, self.vcpu, member.id, actions, regs, taken);
                report(&mut self.events, seen, &actions.capture, memory, view, taken, around.clock);
            }
        }
    }
}

/// Numbers of exceptions (SDM vol. 3, table 6-1).
const NMI: u8 = 2;
const BREAKPOINT: u8 = 3;
const PAGE_FAULT: u8 = 14;
const MACHINE_CHECK: u8 = 18;

/// Offsets in the frame the processor pushes in 64-bit mode (SDM vol. 3, 6.14.2).
const FRAME_RFLAGS: u64 = 16;
const FRAME_RSP: u64 = 24;

impl Access {
    /// The error code of the page fault it raises (SDM vol. 3, 4.7): in kernel mode, for a page
    /// that is not present.
    #[must_use]
    pub fn error_code(&self) -> u32 {
        if self.write { 1 << 1 } else { 0 }
    }
}

/// Whether the processor pushes an error code with exception `vector` (SDM vol. 3, table 6-1; 29
/// and 30 are AMD's, APM vol. 2, 8.2).
fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// The handler of `vector` in the interrupt descriptor table at `idt` (SDM vol. 3, 6.14.1).
fn gate_handler<E>(
    read: impl Fn(Gva) -> Result<u64, E>,
    idt: Gva,
    vector: u8,
) -> Result<u64, E> {
    let gate = idt.wrapping_add(u64::from(vector) * 16);
    let low = read(gate)?;
    let high = read(gate.wrapping_add(8))?;
    Ok(low & 0xffff | low >> 32 & 0xffff_0000 | high << 32)
}
