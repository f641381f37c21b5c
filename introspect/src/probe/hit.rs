//! One virtual CPU's side of a hit.
//!
//! ```text
//!            hit: emulated                      hit: foreign int3
//!          ┌──────────────┐                   ┌──────────────────┐
//!          ▼              │                   ▼                  │
//!        idle ────────────┴───────────────── idle ───────────────┘
//!          │  hit: stepped                    ▲
//!          ▼                                  │ stepped: done / abandoned
//!       stepping(site, registers at the hit) ─┘
//!          │ hit while stepping: the inner instruction takes effect, no handler runs, `missed`
//!          └──────────► stepping, one deeper
//! ```
//! Invariants: the probe table is replaced only when nothing is being stepped; handlers see the
//! registers as they were at the probepoint; every hit of an enabled probe is counted, as a hit or
//! as missed. Budget of a hit: no lock, no allocation, no formatting; two clock readings.

use std::sync::Arc;

use hvprobe_arch::insn::{Action, Stack, StackFault, StepEnd};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::{Gva, Regs};

use super::table::{ProbeTable, Site};
use crate::event::{Event, EventProducer};
use crate::image::TaskLayout;
use crate::world::Clock;

/// How many hits may nest: one in a step, one in a fault, one in an NMI inside it, one to spare.
const MAX_DEPTH: usize = 4;

/// How to read the guest's kernel at a hit.
#[derive(Clone, Copy, Debug)]
pub struct KernelView {
    /// The kernel's own page tables, which do not depend on the running process.
    pub tables: PageTables,
    /// Where to find the current task; `None` leaves it out of events.
    pub task: Option<TaskLayout>,
}

/// What the virtual CPU has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The int3 is not ours: the guest must get it.
    Foreign,
    /// The int3 needs no handling any more: it was ours until a moment ago, or ends a slot. Go on
    /// with the changed RIP.
    Retry,
    /// The displaced instruction took effect; go on with the changed registers.
    Resume,
    /// RIP is an out-of-line slot: execute one instruction there with interrupts blocked, then call
    /// [`HitHandler::stepped`].
    Step,
    /// The displaced instruction faults: raise a page fault at RIP, the probepoint, for this
    /// access.
    Fault(Access),
}

/// A memory access that the guest's kernel could not have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The address accessed.
    pub at: Gva,
    /// Whether it was a write.
    pub write: bool,
}

/// What follows a single-step exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// The displaced instruction took effect. With `more`, an outer hit is still being stepped.
    Done {
        /// Whether single-stepping must go on for an outer hit.
        more: bool,
    },
    /// The instruction has not completed: step again.
    Again,
    /// Nothing is being stepped: the trap belongs to the guest.
    NotStepping,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    site: u32,
    /// As at the probepoint.
    regs: Regs,
    /// Whether handlers ran: not for a hit nested in another.
    handled: bool,
    taken: Taken,
}

/// When and for whom a hit was taken up.
#[derive(Clone, Copy, Debug)]
struct Taken {
    host_ns: u64,
    guest_tsc: u64,
    gs_base: u64,
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
    vcpu: u32,
    table: Arc<ProbeTable>,
    view: Option<KernelView>,
    events: EventProducer,
    in_flight: [Option<InFlight>; MAX_DEPTH],
    depth: usize,
}

struct GuestStack<'a, M: ?Sized> {
    tables: &'a PageTables,
    mem: &'a M,
    /// Whether the last access was a write.
    wrote: bool,
}

impl<M: PhysMemory + ?Sized> Stack for GuestStack<'_, M> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, StackFault> {
        self.wrote = false;
        self.tables
            .read_u64(self.mem, at)
            .map_err(|cause| StackFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), StackFault> {
        self.wrote = true;
        self.tables
            .write(self.mem, at, &value.to_le_bytes())
            .map_err(|cause| StackFault { at, cause })
    }
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
            in_flight: [None; MAX_DEPTH],
            depth: 0,
        }
    }

    /// Takes over a new table and view of the kernel. Call only while stopped.
    pub fn adopt(&mut self, table: Arc<ProbeTable>, view: Option<KernelView>) {
        self.table = table;
        self.view = view;
    }

    /// Whether an instruction is being stepped, so that this virtual CPU must not be stopped yet.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.depth > 0
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
        let Some(index) = self.table.find(at) else {
            return self.not_found(at, regs, &view, around.mem);
        };
        let taken = Taken {
            host_ns: around.clock.host_ns(),
            guest_tsc: around.clock.guest_tsc(),
            gs_base: around.gs_base,
        };
        if self.depth == MAX_DEPTH {
            // Deeper than interrupts, faults and NMIs can nest: the outermost step never came
            // back. Forget it rather than stop the guest.
            self.abandon();
        }
        let Some(site) = self.table.site(index) else {
            return Outcome::Foreign;
        };
        regs.rip = at.0;
        let entry = *regs;
        let handled = self.depth == 0;
        match (site.displaced.action(), &site.slot) {
            (Action::Step, Some(slot)) => {
                self.in_flight[self.depth] = Some(InFlight {
                    site: index,
                    regs: entry,
                    handled,
                    taken,
                });
                self.depth += 1;
                regs.rip = slot.at().0;
                Outcome::Step
            }
            _ => {
                let mut stack = GuestStack {
                    tables: &view.tables,
                    mem: around.mem,
                    wrote: false,
                };
                if let Err(fault) = site.displaced.emulate(regs, &mut stack) {
                    for member in &site.members {
                        member.counters.fault(self.vcpu);
                    }
                    return Outcome::Fault(Access {
                        at: fault.at,
                        write: stack.wrote,
                    });
                }
                let hit = InFlight {
                    site: index,
                    regs: entry,
                    handled,
                    taken,
                };
                conclude(self.vcpu, &mut self.events, site, &hit, &view, around);
                Outcome::Resume
            }
        }
    }

    fn not_found<M: PhysMemory + ?Sized>(
        &self,
        at: Gva,
        regs: &mut Regs,
        view: &KernelView,
        mem: &M,
    ) -> Outcome {
        if let Some(site) = self.table.fell_out(at) {
            regs.rip = site.displaced.next().0;
            return Outcome::Retry;
        }
        let mut byte = [0];
        let gone = self.table.was_ours(at)
            && view.tables.read(mem, at, &mut byte).is_ok()
            && byte != [0xcc];
        if gone {
            regs.rip = at.0;
            Outcome::Retry
        } else {
            Outcome::Foreign
        }
    }

    /// A single-step trap stopped the virtual CPU.
    pub fn stepped<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        regs: &mut Regs,
        around: &Surroundings<'_, M, C>,
    ) -> Stepped {
        let Some(flight) = self
            .depth
            .checked_sub(1)
            .and_then(|top| self.in_flight[top])
        else {
            return Stepped::NotStepping;
        };
        let (Some(view), Some(site)) = (self.view, self.table.site(flight.site)) else {
            self.abandon();
            return Stepped::NotStepping;
        };
        let mut stack = GuestStack {
            tables: &view.tables,
            mem: around.mem,
            wrote: false,
        };
        let end = match &site.slot {
            Some(slot) => site.displaced.after_step(slot, regs, &mut stack),
            None => Ok(StepEnd::Done),
        };
        match end {
            Ok(StepEnd::StillInSlot) => Stepped::Again,
            Ok(StepEnd::Done) => {
                self.depth -= 1;
                self.in_flight[self.depth] = None;
                conclude(self.vcpu, &mut self.events, site, &flight, &view, around);
                Stepped::Done {
                    more: self.depth > 0,
                }
            }
            // The copy faulted: the guest handles that, and should it come back to the slot, the
            // int3 after the copy leads it on. Or the pushed return address could be neither read
            // nor mended a moment after the processor wrote it: the guest took its own stack away,
            // and nothing more can be done for it than to count it.
            Ok(StepEnd::Diverted) | Err(_) => {
                self.abandon();
                Stepped::Done { more: false }
            }
        }
    }

    /// Whether RIP has left the slot that is being stepped, so that no step can end there.
    #[must_use]
    pub fn left_slot(&self, rip: u64) -> bool {
        self.depth
            .checked_sub(1)
            .and_then(|top| self.table.site(self.in_flight[top]?.site)?.slot.as_ref())
            .is_some_and(|slot| rip.wrapping_sub(slot.at().0) > slot.instruction().len() as u64)
    }

    /// Gives up every step in flight, because the guest went elsewhere: the copy faulted. Counts a
    /// fault for each probe concerned.
    pub fn abandon(&mut self) {
        for flight in self.in_flight.iter_mut().filter_map(Option::take) {
            if let Some(site) = self.table.site(flight.site) {
                for member in &site.members {
                    member.counters.fault(self.vcpu);
                }
            }
        }
        self.depth = 0;
    }
}

/// Counts a hit whose instruction took effect and queues its events.
fn conclude<M: PhysMemory + ?Sized, C: Clock>(
    vcpu: u32,
    events: &mut EventProducer,
    site: &Site,
    hit: &InFlight,
    view: &KernelView,
    around: &Surroundings<'_, M, C>,
) {
    if !hit.handled {
        for member in &site.members {
            member.counters.miss(vcpu);
        }
        return;
    }
    let task = view
        .task
        .and_then(|layout| layout.current(&view.tables, around.mem, hit.taken.gs_base));
    let cost_ns = around.clock.host_ns().saturating_sub(hit.taken.host_ns);
    for member in &site.members {
        member.counters.hit(vcpu);
        events.push(Event {
            seq: 0,
            probe: member.id,
            vcpu,
            host_ns: hit.taken.host_ns,
            guest_tsc: hit.taken.guest_tsc,
            regs: hit.regs,
            task,
            cost_ns,
        });
    }
}
