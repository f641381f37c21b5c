//! Running the handlers of a site.
//!
//! Invariants: handlers run in the order of their registration, each at most once for a hit. If a handler holds the
//! vCPU, the handlers after it run when the vCPU resumes. If a handler sends the guest elsewhere, the handlers
//! after it do not run, and their probes count the hit as missed. Code for rare cases is in separate functions
//! where it would otherwise cost the common path registers.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::predicate::Predicate;
use hvprobe_spec::{Actions, Hold, ProbeId, Then};

use super::capture::{capture, passes};
use super::changes::apply;
use super::context::Scene;
use super::outcome::Held;
use super::report::{Seen, Taken};
use super::state::{HitState, Waiting};
use super::table::{Member, Role, Site};
use crate::clock::Clock;
use crate::event::{Captured, EventKind};

/// Result of the pre-handlers of a site.
pub(super) enum Handled {
    /// The displaced instruction is next.
    Proceed,
    /// A handler sent the guest elsewhere.
    Diverted,
    /// A handler holds the vCPU.
    Hold(Held),
}

impl HitState {
    /// Runs the pre-handlers of the members after `after`; of all members if it is `None`.
    #[inline]
    pub(super) fn pre_handlers<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        after: Option<ProbeId>,
        taken: &mut Taken,
        regs: &mut Regs,
    ) -> Handled {
        let first = after.map_or(0, |after| site.members.partition_point(|m| m.id <= after));
        let members = site.members.get(first..).unwrap_or_default();
        for (index, member) in (first..).zip(members) {
            let Role::Probe(actions) = &member.role else {
                if let Some(held) = self.other(scene, site, member, taken, regs) {
                    return Handled::Hold(held);
                }
                continue;
            };
            let counters = &member.counters;
            if !actions.apply_to(regs) {
                counters.veto(self.vcpu);
                taken.mute(index);
                continue;
            }
            if let Some(filter) = &actions.filter {
                let of = (member, actions.as_ref(), filter);
                match self.filtered(scene, site, of, (index, taken), regs) {
                    Some(handled) => return handled,
                    None => continue,
                }
            }
            let now = taken.at.host_ns;
            if counters.admit(self.vcpu, now) {
                counters.hit(self.vcpu);
                let seen = Seen::new(self.vcpu, member.id, actions, regs, taken);
                let items = &actions.capture;
                let cost_ns = seen.report(scene, &mut self.events, || EventKind::Hit, items);
                counters.charge(now, cost_ns);
            } else {
                taken.mute(index);
            }
            if actions.act()
                && let Some(handled) = self.act(scene, site, member, actions, taken, regs)
            {
                return handled;
            }
        }
        Handled::Proceed
    }

    /// Handles a hit of a probe with a filter, the member `index` of its site. Returns `None` if the next
    /// handler is to run. Cold, so that hits of other probes do not become slower.
    #[cold]
    #[inline(never)]
    fn filtered<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        (member, actions, filter): (&Member, &Actions, &Predicate),
        (index, taken): (usize, &mut Taken),
        regs: &mut Regs,
    ) -> Option<Handled> {
        let counters = &member.counters;
        let mut captured = Captured::nothing();
        capture(scene, &mut captured, &actions.capture, regs, None);
        let passes = passes(scene, self.vcpu, (actions, filter), &captured, (regs, None));
        if !counters.lets_pass(self.vcpu, passes) {
            taken.mute(index);
            return None;
        }
        let now = taken.at.host_ns;
        if counters.admit(self.vcpu, now) {
            counters.hit(self.vcpu);
            let seen = Seen::new(self.vcpu, member.id, actions, regs, taken);
            let kind = || EventKind::Hit;
            let cost_ns = seen.report_with(scene, &mut self.events, kind, &captured, &[]);
            counters.charge(now, cost_ns);
        } else {
            taken.mute(index);
        }
        if !actions.act() {
            return None;
        }
        self.act(scene, site, member, actions, taken, regs)
    }

    /// Carries out the actions of a probe besides observing. Returns `None` if the next handler is to run.
    #[inline(never)]
    fn act<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        member: &Member,
        actions: &Actions,
        taken: &Taken,
        regs: &mut Regs,
    ) -> Option<Handled> {
        if !apply(&actions.changes, regs, scene) {
            member.counters.error(self.vcpu);
        }
        if let Some(hold) = &actions.hold {
            self.wait(site, member, taken);
            return Some(Handled::Hold(match hold {
                Hold::Stop => Held::Stop(member.id),
                Hold::Ask { .. } => Held::Ask(member.id),
            }));
        }
        self.diverts(scene, actions.then, member, regs).then(|| {
            self.miss_behind(site, member.id);
            Handled::Diverted
        })
    }

    /// Handles a member that is not a kprobe: the entry of a return probe, or the engine's hooks. Returns what the
    /// vCPU must wait for, if anything.
    #[inline(never)]
    pub(super) fn other<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        member: &Member,
        taken: &Taken,
        regs: &Regs,
    ) -> Option<Held> {
        let internal = match &member.role {
            Role::Probe(_) => return None,
            Role::Return { actions, calls } => {
                self.enter(scene, member, actions, calls, taken, regs);
                return None;
            }
            Role::Internal(internal) => internal,
        };
        let argument = Gva(regs.rdi);
        if internal.task_dead
            && let Some(task) = scene.task()
        {
            self.task_dies(scene, task, Gva(regs.rsp));
        }
        if internal.task_freed {
            self.task_dead(scene, argument);
        }
        if internal.fault {
            self.fault_of_copy(scene, argument);
        }
        if !internal.holds() {
            return None;
        }
        let hooks = internal.notifies;
        self.wait(site, member, taken);
        Some(Held::Engine { hooks, argument })
    }

    /// Makes the vCPU wait at `site`, where `member` holds it.
    fn wait(&mut self, site: &Site, member: &Member, taken: &Taken) {
        self.waiting = Some(Waiting {
            at: site.displaced.at(),
            probe: member.id,
            taken: *taken,
        });
    }

    /// Counts the hit as missed for the members after the one that changed the execution path.
    pub(super) fn miss_behind(&self, site: &Site, probe: ProbeId) {
        for member in site.members.iter().filter(|member| member.id > probe) {
            member.counters.miss(self.vcpu);
        }
    }

    /// Sends the guest where `then` says. Returns whether the guest continues there, so that the displaced
    /// instruction is skipped.
    pub(super) fn diverts<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        then: Then,
        member: &Member,
        regs: &mut Regs,
    ) -> bool {
        match then {
            Then::Proceed => return false,
            Then::Jump(to) => regs.rip = to.0,
            Then::Return(value) => {
                let Some(to) = scene.read_u64(Gva(regs.rsp)) else {
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
}
