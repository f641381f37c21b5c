//! The stages of a hit, in their order: the address is looked up in the table, the time is taken
//! ([`super::report`]), the handlers run ([`super::handlers`]), and the displaced instruction takes effect
//! ([`super::step`]). Each stage returns a value, which the code here passes to the next stage.
//!
//! Invariants: pre-handlers see the registers as they were at the probepoint, and run once for each time the
//! guest reaches it; every hit of an enabled probe is counted, as a hit or as missed.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::{Decision, Hold, ProbeId};

use super::changes::apply;
use super::clock::Clock;
use super::context::Scene;
use super::handlers::Handled;
use super::outcome::Outcome;
use super::report::Taken;
use super::state::{HitState, Waiting};
use super::table::{Role, Site};

impl HitState {
    #[inline]
    pub(super) fn hit<M: PhysMemory + ?Sized, C: Clock>(
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

    /// Runs the pre-handlers of the members after `after` (of all members if it is `None`), and then the displaced
    /// instruction, unless a handler holds the vCPU or sends the guest elsewhere.
    #[inline]
    fn handle<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        index: u32,
        site: &Site,
        after: Option<ProbeId>,
        mut taken: Taken,
        regs: &mut Regs,
    ) -> Outcome {
        match self.pre_handlers(scene, site, after, &mut taken, regs) {
            Handled::Proceed => self.carry_out(scene, index, site, &taken, regs),
            Handled::Diverted => Outcome::Resume { shadow: false },
            Handled::Hold(held) => Outcome::Hold(held),
        }
    }

    pub(super) fn resume<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        decision: &Decision,
        regs: &mut Regs,
    ) -> Outcome {
        let Some(Waiting {
            at,
            probe,
            taken: earlier,
        }) = self.waiting.take()
        else {
            return Outcome::Resume { shadow: false };
        };
        let Some((index, site)) = scene.table.at(at) else {
            // The last probe here was detached meanwhile: the instruction is back in its place.
            return Outcome::Resume { shadow: false };
        };
        let taken = Taken::now(scene.around).again(earlier);
        if let Some(member) = site.members.iter().find(|member| member.id == probe) {
            if !apply(&decision.changes, regs, scene) {
                member.counters.error(self.vcpu);
            }
            // If the probe stopped the machine, the probe's own definition says where the guest continues, and not
            // the decision.
            let then = match &member.role {
                Role::Probe(actions) if actions.hold == Some(Hold::Stop) => actions.then,
                _ => decision.then,
            };
            if self.diverts(scene, then, member, regs) {
                self.miss_behind(site, probe);
                return Outcome::Resume { shadow: false };
            }
        }
        self.handle(scene, index, site, Some(probe), taken, regs)
    }

    /// Handles a hit while a stepped instruction has not ended. Returns `None` if the handlers are to run.
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
            // The guest has left the exception window without an exit. No processor does that for this instruction.
            regs.rflags |= flight.interrupts;
        } else if regs.rflags & rflags::IF != 0 {
            // Interrupts are on, and no handler of an NMI turns them on. So the guest is not in an NMI, and will
            // not come back to the instruction that was put off.
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

    /// Handles an int3 at none of the table's probepoints.
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
