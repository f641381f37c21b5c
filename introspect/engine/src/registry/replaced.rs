//! Detection of another kernel in place of the booted one: by kexec, or a crash kernel after a panic.
//!
//! ```text
//!             `machine_kexec` is reached
//!   ours ───► our patches are removed ───► another
//!    └────── found in a stop ────────────────┘
//! ```
//! Everything we know about the guest is about the first kernel: the addresses of its text, its page tables,
//! and our changes to it. Invariant: once another kernel runs, no address of the first kernel is read or
//! written, no int3 is treated as ours, and no probe is planted, because nothing says where the new kernel's
//! text is and when it is final.
//!
//! While a probe is planted, the engine watches the function that starts the other kernel. It is called when
//! all other processors have stopped, and the engine removes its patches there. A replacement without that hook
//! (there is no such symbol, or nothing was planted) is found in the next stop, before anything else is done in
//! it, by one of these signs: a virtual CPU runs kernel text at another physical address than ours; neither the
//! page-table entry of the hidden region nor the text of any site is as we wrote it, because a kernel placed
//! where the first one was overwrites both; or the constant data of the first kernel is gone.

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::ProbeTable;
use tracing::{info, warn};

use super::commit::CommitError;
use crate::guest::banner::Banner;
use crate::registry::hook_state::Patches;
use crate::registry::state::Registry;
use crate::sites::site::{Placement, SiteState};
use crate::world::{Standing, StopError, World};

impl Registry {
    /// Returns whether the guest runs another kernel than the one it was booted with. Then all probes are gone,
    /// and no more can be planted.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.replaced
    }

    /// Removes everything of ours from the guest's kernel, which is about to start another one.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped; then either everything is still there, or everything has been
    /// removed.
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
            world.stopped(&mut |_, _| Some(self.forget_kernel()))?;
            self.drain_sources(world);
        }
        Ok(())
    }

    /// Stops the virtual CPUs to find out whether another kernel runs. If so, forgets the first one and returns
    /// true. If they cannot be stopped, returns the answer known so far; the next call tries again.
    pub(crate) fn find_out_replaced(&mut self, world: &dyn World) -> bool {
        if self.live.is_some() {
            let _ = world.stopped(&mut |mem, standing| self.forget_replaced(mem, standing));
            if self.replaced {
                self.drain_sources(world);
            }
        }
        self.replaced
    }

    /// Forgets the first kernel if another one runs, and returns the table that the virtual CPUs use from then
    /// on. They must be stopped.
    pub(crate) fn forget_replaced(
        &mut self,
        mem: &dyn PhysMemory,
        standing: &[Standing],
    ) -> Option<Arc<ProbeTable>> {
        self.runs_another(mem, standing)
            .then(|| self.forget_kernel())
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

    /// Returns whether all that we wrote into the guest is gone, or the kernel's constant data has changed.
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

    /// Returns whether the text of any armed site is as we left it.
    pub(crate) fn holds_any(&self, mem: &dyn PhysMemory) -> bool {
        let mut armed = self.sites.values().filter(|site| SiteState::is_armed(site));
        armed.any(|site| !self.is_rewritten(site, mem))
    }

    /// Marks every probe as gone and forgets all data about the kernel, without writing to the guest.
    fn forget_kernel(&mut self) -> Arc<ProbeTable> {
        let mut gone = 0_usize;
        for (_, probe) in self.probes.iter_mut() {
            if !matches!(probe.placement, Placement::Refused(_)) {
                probe.placement = Placement::Gone;
                gone += 1;
            }
        }
        info!(gone, "the guest runs another kernel: its probes are gone");
        self.replaced = true;
        self.live = None;
        self.sites.clear();
        self.code.forget_ghosts();
        self.kernel.forget_modules();
        self.kprobes.registered.clear();
        self.shared.past_int3s = Arc::default();
        self.shared.restored_frames = Arc::default();
        self.hooks.ftrace.patches = Patches::No;
        self.hooks.ftrace.watched = false;
        Arc::default()
    }

    /// Passes on the records of all probes, after their kernel was forgotten, and removes the sources.
    pub(crate) fn drain_sources(&mut self, world: &dyn World) {
        world.collect();
        self.code.retire_sources(self.probes.ids());
        self.code.ghost_sources.clear();
    }
}
