//! What the engine itself watches in the guest, with int3s of its own:
//!
//! | where            | while there are                     | why                                   |
//! |------------------|-------------------------------------|---------------------------------------|
//! | `do_task_dead`   | return probes                       | calls of a dead task are orphans      |
//! | `__put_task_struct` | return probes on `__schedule` | so are those that it made after that |
//! | `do_init_module` | probes of modules                   | pending ones can be planted now       |
//! | `free_module`    | probes of modules                   | the text under them is about to go    |
//! | `ftrace_arch_code_modify_prepare`, `…_post_process` | probes of entry nops | ftrace compares what it patches: our int3s must be away meanwhile |
//! | `fixup_exception`, `page_fault_oops` | copies that may fault run without us | a fault in one is the probepoint's |
//! | `machine_kexec`  | probes that are planted             | another kernel is about to run ([`super::replaced`]) |
//! | `arch_prepare_kprobe` | jumps may be written             | a kprobe of the guest's must not meet one ([`crate::registry::guest_kprobes`]) |
//!
//! `do_init_module` runs when a module's text is final and before any of it has run; `free_module`
//! before its text is unmapped (kernel/module/main.c). A kernel without one of these functions loses
//! what they are for, and that is logged.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::Internal;
use hvprobe_spec::definition::{Definition, Kind, Target};
use hvprobe_spec::{ProbeId, ProbeSpec};
use tracing::{info, warn};

use super::commit::CommitError;
use crate::plan::probepoint::Probepoint;
use crate::refusal::{Obstacle, Refused};
use crate::registry::guest_kprobes::PREPARES;
use crate::registry::state::Registry;
use crate::sites::site::{Place, SiteState};
use crate::world::{StopError, World};

const TASK_DEAD: &str = "do_task_dead";
/// What frees a task, its first argument, when nobody refers to it any more (kernel/fork.c): it has been
/// switched away from for the last time long before.
const TASK_FREED: &str = "__put_task_struct";
/// The function that a task enters after [`TASK_DEAD`] and never returns from (kernel/sched/core.c). All
/// others that it enters there return.
const LAST_ENTERED: &str = "__schedule";
const FTRACE_HOOKS: [(&str, Internal); 2] = [
    ("ftrace_arch_code_modify_prepare", Internal::FtraceBegins),
    ("ftrace_arch_code_modify_post_process", Internal::FtraceEnds),
];
const MODULE_HOOKS: [&str; 2] = ["do_init_module", "free_module"];
/// What the kernel calls for a fault of its own, before it complains of one, with the registers at the
/// fault as its first argument: to look for an entry of the exception table
/// (arch/x86/mm/extable.c), and for page faults that can have none, with SMAP at addresses of user
/// space (arch/x86/mm/fault.c).
const FAULTS: [&str; 2] = ["fixup_exception", "page_fault_oops"];
/// The function that runs last, for every kexec and for a crash kernel
/// (arch/x86/kernel/machine_kexec_64.c).
const LEAVES: &str = "machine_kexec";
const ALL_HOOKS: [&str; 10] = [
    FAULTS[0],
    FAULTS[1],
    LEAVES,
    TASK_FREED,
    TASK_DEAD,
    FTRACE_HOOKS[0].0,
    FTRACE_HOOKS[1].0,
    MODULE_HOOKS[0],
    MODULE_HOOKS[1],
    PREPARES,
];

impl Registry {
    /// Makes sites for what the engine has to watch, and lets the others
    /// go with the next change.
    pub(crate) fn provide_internal(&mut self, mem: &dyn PhysMemory) {
        if self.live.is_none() {
            return;
        }
        let mut wanted = BTreeMap::new();
        if self.has_return_probes() {
            wanted.insert(TASK_DEAD, Internal::TaskDead);
        }
        if self.has_last_entered() {
            wanted.insert(TASK_FREED, Internal::TaskFreed);
        }
        if self.has_module_probes() {
            wanted.extend(MODULE_HOOKS.map(|name| (name, Internal::Modules)));
        }
        for site in self.sites.values_mut() {
            site.internal = None;
        }
        for (name, internal) in wanted {
            self.watch_function(name, internal, mem);
        }
        if self.sites.values().any(|site| self.has_enabled(site)) {
            self.watch_function(LEAVES, Internal::Kexec, mem);
        }
        let is_used = |site: &SiteState| {
            site.internal.is_some() || site.members.iter().any(|id| !self.probes.is_leaving(*id))
        };
        if self.sites.values().any(|site| site.ftrace && is_used(site)) {
            for (name, internal) in FTRACE_HOOKS {
                self.watch_function(name, internal, mem);
            }
        }
        if self.has_copies_that_may_fault() {
            // Kernels before 5.12 have no second one, and call the first for all.
            let there = |name: &&str| self.kernel.image.symbols().address_of(name).is_some();
            let [always, later] = FAULTS;
            let later = Some(later).filter(there);
            for name in [Some(always), later].into_iter().flatten() {
                self.watch_function(name, Internal::Fault, mem);
            }
        }
        if self.has_to_know_kprobes() {
            self.watch_function(PREPARES, Internal::Kprobe, mem);
        }
        self.drop_idle_internal();
    }

    /// Whether tasks make calls after their end that a return probe follows.
    fn has_last_entered(&self) -> bool {
        let returns = |id: &ProbeId| {
            let probe = self
                .probes
                .get(*id)
                .filter(|_| !self.probes.is_leaving(*id));
            probe.is_some_and(|probe| probe.pool.is_some())
        };
        self.sites.values().any(|site| {
            // The compiler may have made a clone of it.
            let (name, _) = site
                .symbol
                .0
                .split_once('.')
                .unwrap_or((&site.symbol.0, ""));
            name == LAST_ENTERED && site.members.iter().any(returns)
        })
    }

    /// Whether some instruction that may fault runs from a slot that jumps back, or from a detour, once
    /// `leaving` have left.
    fn has_copies_that_may_fault(&self) -> bool {
        let may_fault = |it: &Displaced| !matches!(it.action(), Action::Emulate(_));
        let jumps = self.switches.optimize && self.code.region.detours.is_some();
        self.sites.values().any(|site| {
            let mut members = self.enabled_members(site).peekable();
            let span = site.span.as_ref().ok().filter(|_| jumps);
            members.peek().is_some()
                && (may_fault(&site.displaced)
                    || span.is_some_and(|span| span.instructions().any(may_fault)))
        })
    }

    fn watch_function(&mut self, name: &'static str, internal: Internal, mem: &dyn PhysMemory) {
        let spec = |offset| {
            ProbeSpec::from(Definition {
                kind: Kind::Probe,
                name: None,
                target: Target::Symbol {
                    module: None,
                    name: name.to_owned(),
                    offset,
                },
            })
        };
        let behind = |point: &Probepoint| point.symbol.1 + point.displaced.bytes().len() as u64;
        let planned = match self.plan(&spec(0), mem) {
            // For its sake nobody needs to know what ftrace does.
            Ok(point) if point.ftrace && internal == Internal::Kexec => {
                self.plan(&spec(behind(&point)), mem)
            }
            planned => planned,
        };
        match planned {
            Ok(point) => self.site_of(point).internal = Some(internal),
            Err(why) if self.hooks.unwatched.insert(name) => {
                warn!(%why, "{name} cannot be watched");
            }
            Err(_) => {}
        }
    }

    /// Does without what the engine wanted to know where `obstacle` is, if that was it.
    pub(crate) fn watch_no_more(&mut self, obstacle: &Obstacle) -> bool {
        let Obstacle { at, why } = obstacle;
        let watched = self.sites.get_mut(at).filter(|site| !site.is_armed());
        let Some(site) = watched.filter(|site| site.internal.is_some()) else {
            return false;
        };
        site.internal = None;
        let name = ALL_HOOKS.into_iter().find(|name| *name == site.symbol.0);
        if site.members.is_empty() {
            self.sites.remove(at);
        }
        if let Some(name) = name
            && self.hooks.unwatched.insert(name)
        {
            warn!(%why, "{name} cannot be watched");
        }
        true
    }

    /// Forgets sites that neither a probe nor the engine wants and that were never armed.
    fn drop_idle_internal(&mut self) {
        self.sites.retain(|_, site| {
            !site.members.is_empty() || site.internal.is_some() || site.is_armed()
        });
    }

    /// The guest's ftrace is about to patch text, or has done so: takes our int3s off its sites, or
    /// puts them back where it left the nop.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn ftrace_patches(&mut self, begins: bool, world: &dyn World) -> Result<(), StopError> {
        self.hooks.ftrace_patches = begins;
        if !begins {
            for site in self.sites.values_mut() {
                site.occupied = false;
            }
        }
        loop {
            match self.commit(world) {
                Ok(()) => return Ok(()),
                Err(CommitError::Stop(error)) => return Err(error),
                Err(CommitError::Site(Obstacle { at, why })) => {
                    // Every round leaves one site more alone.
                    let Some(site) = self.sites.get_mut(&at).filter(|site| !site.occupied) else {
                        return Ok(());
                    };
                    info!(%at, %why, "left to the guest's ftrace");
                    site.occupied = true;
                }
            }
        }
    }

    pub(crate) fn has_module_probes(&self) -> bool {
        self.probes.iter().any(|(id, probe)| {
            let of_module = match &probe.place {
                Place::Pending => matches!(
                    probe.spec.definition.target,
                    Target::Symbol {
                        module: Some(_),
                        ..
                    }
                ),
                Place::At(at) => !self.kernel.image.is_text(*at),
                Place::Refused(_) | Place::Gone => false,
            };
            of_module && !self.probes.is_leaving(id)
        })
    }

    /// Reads the guest's modules.
    pub(crate) fn read_modules(&mut self, mem: &dyn PhysMemory) {
        if let Some(live) = &self.live {
            self.kernel.read_modules(&live.view.tables, mem);
        }
    }

    /// The guest's modules have changed, or are about to: plants what waits for a module that is
    /// there now, and takes everything out of those that leave. `formed` is where the module is
    /// that has just got its final text. Returns what turned out to be impossible.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn modules_changed(
        &mut self,
        formed: Option<Gva>,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        self.kernel.note_formed(formed);
        self.read_modules(world.memory());
        let leaving: Vec<(ProbeId, Gva)> = self
            .probes
            .iter()
            .filter_map(|(id, probe)| match probe.place {
                Place::At(at) if !self.kernel.image.is_text(at) => Some((id, at)),
                _ => None,
            })
            .filter(|(_, at)| self.kernel.is_unloaded(*at))
            .collect();
        for (id, at) in &leaving {
            if let Some(site) = self.sites.get_mut(at) {
                site.members.retain(|member| member != id);
            }
            if let Some(probe) = self.probes.get_mut(*id) {
                info!(probe = %id, %at, "the module under a probe is unloaded");
                probe.place = Place::Gone;
            }
        }
        self.settle_pending(world)
    }
}
