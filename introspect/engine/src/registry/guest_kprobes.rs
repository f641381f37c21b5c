//! Coexistence of the guest's own kprobes and our patches.
//!
//! A kprobe of the guest keeps a copy of the instruction at which it was registered. When it is armed or
//! disarmed, at any time, it writes the first byte of that copy, and a hit resumes after the copied
//! instruction, in its place. An optimized kprobe writes a jump over at most [`REACH`](crate::guest::kprobes)
//! bytes. None of this checks the text again (kernel/kprobes.c, arch/x86/kernel/kprobes/opt.c). If the guest
//! writes its int3 over one of ours, the int3 belongs to the guest from then on, and our probe is gone. Under a
//! jump, or the rest of a removed one, the guest would resume in the middle of an instruction.
//!
//! Invariant: no jump of ours is where a kprobe of the guest is registered, armed or not, and the guest
//! registers none where a jump is. So the engine reads the guest's table of kprobes in the stop in which a jump
//! is to be written, and does not write the jump while the table's mutex is held: then a kprobe may be about to
//! be added to the table. And the engine holds the guest where it is about to copy an instruction, until no
//! jump is there any more. If a jump cannot be removed, the copying function fails at once, and with it the
//! guest's registration.
//!
//! Invariant: no int3 of ours is planted where a registered kprobe of the guest may write its jump. The guest
//! decides on that jump when the kprobe is registered. When it writes the jump it saves the text there, and it
//! would restore a saved int3 after we have forgotten it. If an int3 of ours is there when the guest decides,
//! it writes no jump; the kprobe is in the table by then.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::{Decision, Then};
use tracing::{info, warn};

use super::commit::CommitError;
use crate::code::jump::Jump;
use crate::guest::kprobes::{Known, PREPARES, Unknown, first_that_meets, meets, one_over};
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registry::state::Registry;
use crate::sites::site::{Patch, SiteState};
use crate::unoptimized::Unoptimized;
use crate::world::World;

/// Error that [`PREPARES`] returns when it must not copy (include/uapi/asm-generic/errno-base.h).
const EBUSY: u64 = 16;

impl Registry {
    /// Returns whether the guest has to be watched at [`PREPARES`].
    pub(crate) fn has_to_know_kprobes(&self) -> bool {
        let jumps = self.sites.values().any(|site| {
            site.point.span.is_ok() && site.members.iter().any(|id| !self.probes.is_leaving(*id))
        });
        let possible = self.switches.optimize && self.code.has_detours();
        possible && jumps && matches!(self.kprobes.known, Known::Table(_))
    }

    /// Reads the addresses of the guest's registered kprobes.
    pub(crate) fn read_kprobes(&mut self, mem: &dyn PhysMemory) {
        if let Some(live) = &self.live {
            self.kprobes.read(&live.view.tables, mem);
        }
    }

    /// Retires those of the prepared `jumps` that would meet a kprobe of the guest. The virtual CPUs must be
    /// stopped.
    pub(crate) fn retire_at_kprobes(
        &mut self,
        jumps: &mut BTreeMap<Gva, Jump>,
        mem: &dyn PhysMemory,
    ) {
        let (Known::Table(layout), Some(live)) = (&self.kprobes.known, &self.live) else {
            return;
        };
        if jumps.is_empty() {
            return;
        }
        let registered = layout.settled(&live.view.tables, mem);
        let unused = jumps.extract_if(.., |at, _| {
            let site = self.sites.get_mut(at);
            let why = match (&registered, site.as_deref()) {
                // The jump replaces another, so the guest has no kprobe there.
                (Err(Unknown), Some(site)) if site.jump().is_some() => None,
                (Err(Unknown), _) => Some(Unoptimized::KprobesChange),
                (Ok(registered), site) => site
                    .and_then(|site| first_that_meets(site.point.span.as_ref().ok()?, registered))
                    .map(|at| Unoptimized::Kprobe { at }),
            };
            let is_unused = why.is_some();
            if let Some(site) = site.filter(|_| is_unused) {
                site.unprepared = why;
            }
            is_unused
        });
        self.code.retire_jumps(unused);
    }

    /// Checks that no jump of the guest may cover one of the sites `arming` that have no patch yet. The virtual
    /// CPUs must be stopped.
    ///
    /// # Errors
    /// The sites that one may cover.
    pub(crate) fn keep_from_kprobes(
        &self,
        arming: &[(Gva, Patch)],
        mem: &dyn PhysMemory,
    ) -> Result<(), Obstacles> {
        let is_new = |at: &Gva| self.sites.get(at).is_some_and(|site| !site.is_armed());
        let mut new = arming.iter().map(|(at, _)| *at).filter(is_new).peekable();
        let (Known::Table(layout), Some(live), Some(_)) =
            (&self.kprobes.known, &self.live, new.peek())
        else {
            return Ok(());
        };
        let Ok(registered) = layout.registered(&live.view.tables, mem) else {
            return Ok(());
        };
        let covered = new.filter_map(|at| {
            let kprobe = one_over(at, &registered)?;
            let why = Refused::UnderKprobe { at, kprobe };
            Some(Obstacle { at, why })
        });
        Obstacles::of(covered).map_or(Ok(()), Err)
    }

    /// Leaves to the guest the sites to be armed that have no patch yet and that a jump of the guest may cover.
    pub(crate) fn leave_covered(&mut self, mem: &dyn PhysMemory) {
        self.read_kprobes(mem);
        let is_covered = |(at, site): &(&Gva, &SiteState)| {
            let is_new = !site.is_armed() && !site.gone && self.probes.any_enabled(&site.members);
            is_new && one_over(**at, &self.kprobes.registered).is_some()
        };
        let covered: Vec<Gva> = self
            .sites
            .iter()
            .filter(is_covered)
            .map(|(at, _)| *at)
            .collect();
        for at in covered {
            if let Some(site) = self.sites.get_mut(&at) {
                warn!(%at, "a jump of the guest's own kprobe may come to cover a probe");
                site.gone = true;
            }
        }
    }

    /// Leaves to the guest the sites where its int3 has replaced ours. That happens if the guest had begun to
    /// register a kprobe there before we planted ours; a kprobe is in the table as long as it is armed. The
    /// virtual CPUs must be stopped.
    pub(crate) fn leave_to_kprobes(&mut self, mem: &dyn PhysMemory) {
        let (Known::Table(layout), Some(live)) = (&self.kprobes.known, &self.live) else {
            return;
        };
        let Ok(armed) = layout.armed(&live.view.tables, mem) else {
            return;
        };
        for at in armed {
            let site = self.sites.get_mut(&at);
            let is_int3 = |site: &&mut SiteState| matches!(site.patch, Patch::Breakpoint);
            if let Some(site) = site.filter(|site| is_int3(site) && !site.gone) {
                warn!(%at, "the guest has a kprobe of its own where one of ours was");
                site.gone = true;
                site.patch = Patch::None;
            }
        }
    }

    /// Handles the guest's registration of `kprobe`: removes our jumps from there. Returns how [`PREPARES`]
    /// continues: it fails if a jump may still be there.
    pub fn guest_registers(&mut self, kprobe: Gva, world: &dyn World) -> Decision {
        let then = match self.remove_jumps_near(kprobe, world) {
            Ok(()) => Then::Proceed,
            Err(why) => {
                warn!(%kprobe, why, "the guest must not register a kprobe");
                Then::Return(EBUSY.wrapping_neg())
            }
        };
        let changes = Vec::new();
        Decision { changes, then }
    }

    fn remove_jumps_near(&mut self, kprobe: Gva, world: &dyn World) -> Result<(), String> {
        let (Known::Table(layout), Some(live)) = (&self.kprobes.known, &self.live) else {
            return Ok(());
        };
        let field = kprobe.wrapping_add(layout.address);
        let address = live.view.tables.read_u64(world.memory(), field);
        let at =
            Gva(address.map_err(|error| format!("where it is to be cannot be read: {error}"))?);
        let here = |site: &SiteState| {
            let span = site.point.span.as_ref();
            site.jump().is_some() && span.is_ok_and(|span| meets(span, at))
        };
        let sites = self.sites.iter().filter(|(_, site)| here(site));
        let sites: Vec<Gva> = sites.map(|(at, _)| *at).collect();
        if sites.is_empty() {
            return Ok(());
        }
        info!(%at, "the guest registers a kprobe where a jump of ours is");
        self.kprobes.registering = Some(at);
        let changed = self.commit_at_hook(world);
        // From here on the guest holds the mutex until its kprobe is in the table.
        self.kprobes.registering = None;
        changed.map_err(|error| match error {
            CommitError::Stop(error) => format!("a jump at {at} stays: {error}"),
            CommitError::Sites(obstacles) => {
                let Obstacle { at, why } = obstacles.first();
                format!("a jump stays, because of what is at {at}: {why}")
            }
        })?;
        for site in sites {
            if let Some(site) = self.sites.get_mut(&site) {
                site.unprepared = Some(Unoptimized::Kprobe { at });
            }
        }
        Ok(())
    }
}
