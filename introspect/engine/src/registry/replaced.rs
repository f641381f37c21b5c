//! Another kernel in the place of the one that was booted: kexec, and the crash kernel after a panic.
//!
//! ```text
//!             `machine_kexec` is reached
//!   ours ───► our patches are taken out ───► another
//!    └────── found out in a stop ──────────────┘
//! ```
//! Everything we know of the guest is of the first kernel: where its text is, by which page tables,
//! and what we have changed of it. Invariant: once another one runs, nothing is read or written by
//! addresses of the first, none of its int3s is taken for ours, and no probe is planted: where its
//! text is, and when that is final, nothing tells.
//!
//! As long as a probe is planted, the engine watches the function that leaves for the other kernel,
//! which is called when all other processors have stopped, and takes its patches out there. What
//! comes to another kernel without it (there is no such symbol, or nothing was planted) is found out
//! in the next stop, before anything else is done in it: a virtual CPU runs kernel text that lies
//! elsewhere than ours does; or the entry that leads to the hidden region is not what we made it, nor
//! is the text of any site, as a kernel overwrites both that is put where the first one was; or the
//! first one's constant data is not there any more.

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::ProbeTable;
use tracing::{info, warn};

use super::commit::CommitError;
use crate::guest::banner::Banner;
use crate::registry::hook_state::Patches;
use crate::registry::state::Registry;
use crate::sites::site::{Place, SiteState};
use crate::world::{Standing, StopError, World};

impl Registry {
    /// Whether the guest runs another kernel than the one it was booted with: all probes are gone,
    /// and no more can be planted.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.replaced
    }

    /// The guest's kernel is about to make way for another: takes everything out of it.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped; then everything is as it was.
    pub fn kernel_leaves(&mut self, world: &dyn World) -> Result<(), StopError> {
        self.probes.leave(self.probes.ids());
        for site in self.sites.values_mut() {
            site.internal = None;
        }
        let changed = self.commit_at_hook(world);
        self.probes.stay();
        match changed {
            Ok(()) => {}
            Err(CommitError::Stop(error)) => {
                self.provide_hooks(world.memory());
                return Err(error);
            }
            Err(CommitError::Sites(obstacles)) => {
                let obstacle = obstacles.first();
                warn!(at = %obstacle.at, why = %obstacle.why, "patches stay in a kernel that is left");
            }
        }
        if self.live.is_some() {
            world.stopped(&mut |_, _| Some(self.abandon()))?;
            self.forget_records(world);
        }
        Ok(())
    }

    /// Stops the virtual CPUs to find out whether another kernel runs, and lets go of everything if
    /// so. When they cannot be stopped it is not known, and so is tried again another time.
    pub(crate) fn find_out_replaced(&mut self, world: &dyn World) -> bool {
        if self.live.is_some() {
            let _ = world.stopped(&mut |mem, standing| self.abandon_replaced(mem, standing));
            if self.replaced {
                self.forget_records(world);
            }
        }
        self.replaced
    }

    /// Lets go of everything, if another kernel runs: the table the virtual CPUs have from then on.
    /// They must stand still.
    pub(crate) fn abandon_replaced(
        &mut self,
        mem: &dyn PhysMemory,
        standing: &[Standing],
    ) -> Option<Arc<ProbeTable>> {
        self.runs_another(mem, standing).then(|| self.abandon())
    }

    fn runs_another(&self, mem: &dyn PhysMemory, standing: &[Standing]) -> bool {
        let Some(live) = &self.live else {
            return false;
        };
        let is_elsewhere = |cpu: &Standing| {
            cpu.text.is_some_and(|text| {
                let ours = live.view.tables.translate(mem, cpu.rip());
                !ours.is_ok_and(|mapping| mapping.gpa == text)
            })
        };
        standing.iter().any(is_elsewhere) || self.is_overwritten(mem)
    }

    /// Whether nothing is left of what we made of the guest, as far as it sees that, or something else
    /// is where the kernel keeps what never changes.
    pub(crate) fn is_overwritten(&self, mem: &dyn PhysMemory) -> bool {
        let is_lost = self.code.region.is_lost(mem) && !self.holds_any(mem);
        is_lost || self.has_another_banner(mem)
    }

    fn has_another_banner(&self, mem: &dyn PhysMemory) -> bool {
        self.live.as_ref().is_some_and(|live| {
            let now = || Banner::read(&self.kernel.image, &live.view.tables, mem);
            live.banner.is_some() && live.banner != now()
        })
    }

    /// Whether the text of some armed site is as we left it.
    pub(crate) fn holds_any(&self, mem: &dyn PhysMemory) -> bool {
        let mut armed = self.sites.values().filter(|site| SiteState::is_armed(site));
        armed.any(|site| !self.is_rewritten(site, mem))
    }

    /// Marks every probe as gone and forgets all that is of the kernel, without a word to the guest.
    fn abandon(&mut self) -> Arc<ProbeTable> {
        let mut gone = 0_usize;
        for (_, probe) in self.probes.iter_mut() {
            if !matches!(probe.place, Place::Refused(_)) {
                probe.place = Place::Gone;
                gone += 1;
            }
        }
        info!(gone, "the guest runs another kernel: its probes are gone");
        self.replaced = true;
        self.live = None;
        self.sites.clear();
        self.code.abandon();
        self.kernel.forget_modules();
        self.kprobes.registered.clear();
        self.shared.retired = Arc::default();
        self.shared.vacated = Arc::default();
        self.hooks.ftrace.patches = Patches::No;
        self.hooks.ftrace.watched = false;
        Arc::default()
    }

    /// Hands on what the probes had recorded, when the kernel they were in is abandoned.
    pub(crate) fn forget_records(&mut self, world: &dyn World) {
        world.collect();
        self.code.forget_sources(self.probes.ids());
        self.code.ghost_sources.clear();
    }
}
