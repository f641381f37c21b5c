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
//!
//! Invariant: where ftrace patches the entry of one of them, the int3 is behind that. So nothing that the guest
//! traces makes the engine blind, and for the sake of its own int3s nobody needs to know what ftrace does. Arguments
//! and the return address are where they are at the entry: the instruction there does nothing, and a tracer keeps
//! them.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::{HookSet, Internal};
use hvprobe_spec::Then::Proceed;
use hvprobe_spec::definition::{Definition, Kind, Marks, Target};
use hvprobe_spec::{Decision, ProbeId, ProbeSpec};
use tracing::{info, warn};

use super::commit::CommitError;
use crate::refusal::{Obstacle, Refused};
use crate::registry::guest_kprobes::PREPARES;
use crate::registry::hook_state::Patches;
use crate::registry::state::Registry;
use crate::sites::site::{Place, SiteState, patched};
use crate::sites::text::Text;
use crate::world::{StopError, World};

/// One thing that the engine watches.
struct Hook {
    /// The functions at whose entries it is.
    functions: &'static [&'static str],
    /// Whether it is needed as probes are now.
    wanted: fn(&Registry) -> bool,
    /// What comes of it.
    then: Then,
    /// Only the first function has to be there.
    optional: bool,
}

/// What comes of a hook.
enum Then {
    /// The virtual CPU does it at the hit.
    AtOnce(Internal),
    /// The virtual CPU waits, while the engine does this with the first argument of the function.
    Told(fn(&mut Registry, Gva, &dyn World) -> Told),
}

/// What comes of an event that the engine was told of.
#[derive(Debug, Default)]
pub struct Told {
    /// How the guest goes on.
    pub decision: Decision,
    /// Probes that turned out to be impossible, and why.
    pub refused: Vec<(ProbeId, Refused)>,
}

/// What an engine's hook has the virtual CPU do.
const NOTHING: Internal = Internal {
    task_dead: false,
    task_freed: false,
    fault: false,
    told: HookSet(0),
};

/// A hook that has nothing special.
const PLAIN: Hook = Hook {
    functions: &[],
    wanted: |_| false,
    then: Then::AtOnce(NOTHING),
    optional: false,
};

/// The function that a task enters after `do_task_dead` and never returns from (kernel/sched/core.c). All
/// others that it enters there return.
const LAST_ENTERED: &str = "__schedule";

/// Where ftrace comes before it patches, with its lock held (kernel/trace/ftrace.c, `ftrace_run_update_code`).
const FTRACE_BEGINS: &str = "ftrace_arch_code_modify_prepare";

/// The lengths of an ENDBR64, and of what ftrace patches (`MCOUNT_INSN_SIZE` in arch/x86/include/asm/ftrace.h).
const ENDBR: u64 = 4;
const FTRACE: u64 = 5;

/// All hooks; those of ftrace come last, as they are needed for what others put at its sites, too.
const HOOKS: [Hook; 8] = [
    Hook {
        functions: &["do_task_dead"],
        wanted: Registry::has_return_probes,
        then: Then::AtOnce(Internal {
            task_dead: true,
            ..NOTHING
        }),
        ..PLAIN
    },
    // Frees a task, its first argument, when nobody refers to it any more (kernel/fork.c): it has been
    // switched away from for the last time long before.
    Hook {
        functions: &["__put_task_struct"],
        wanted: Registry::has_last_entered,
        then: Then::AtOnce(Internal {
            task_freed: true,
            ..NOTHING
        }),
        ..PLAIN
    },
    Hook {
        functions: &["do_init_module", "free_module"],
        wanted: Registry::has_module_probes,
        then: Then::Told(Registry::told_of_module),
        ..PLAIN
    },
    // Runs last, for every kexec and for a crash kernel (arch/x86/kernel/machine_kexec_64.c).
    Hook {
        functions: &["machine_kexec"],
        wanted: |registry| {
            let mut sites = registry.sites.values();
            sites.any(|site| registry.has_enabled(site))
        },
        then: Then::Told(Registry::told_of_kexec),
        ..PLAIN
    },
    // What the kernel calls for a fault of its own, before it complains of one, with the registers at
    // the fault as its first argument: to look for an entry of the exception table
    // (arch/x86/mm/extable.c), and for page faults that can have none, with SMAP at addresses of user
    // space (arch/x86/mm/fault.c). Kernels before 5.12 have no second one, and call the first for all.
    Hook {
        functions: &["fixup_exception", "page_fault_oops"],
        wanted: Registry::has_copies_that_may_fault,
        then: Then::AtOnce(Internal {
            fault: true,
            ..NOTHING
        }),
        optional: true,
    },
    Hook {
        functions: &[PREPARES],
        wanted: Registry::has_to_know_kprobes,
        then: Then::Told(|registry, kprobe, world| Told {
            decision: registry.guest_registers(kprobe, world),
            ..Told::default()
        }),
        ..PLAIN
    },
    Hook {
        functions: &[FTRACE_BEGINS],
        wanted: Registry::has_ftrace_sites,
        then: Then::Told(|registry, _, world| registry.told_of_ftrace(true, world)),
        ..PLAIN
    },
    Hook {
        functions: &["ftrace_arch_code_modify_post_process"],
        wanted: Registry::has_ftrace_sites,
        then: Then::Told(|registry, _, world| registry.told_of_ftrace(false, world)),
        ..PLAIN
    },
];

/// The functions whose entries the engine may watch.
pub(crate) fn watched() -> impl Iterator<Item = &'static str> {
    HOOKS.iter().flat_map(|hook| hook.functions).copied()
}

impl Registry {
    /// Makes sites for what the engine has to watch, and lets the others go with the next change.
    pub(crate) fn provide_hooks(&mut self, mem: &dyn PhysMemory) {
        if self.live.is_none() {
            return;
        }
        for site in self.sites.values_mut() {
            site.internal = None;
        }
        for (number, hook) in HOOKS.iter().enumerate() {
            if !(hook.wanted)(self) {
                continue;
            }
            let internal = match &hook.then {
                Then::AtOnce(internal) => *internal,
                Then::Told(_) => Internal {
                    told: HookSet(1 << number),
                    ..NOTHING
                },
            };
            for (position, name) in hook.functions.iter().enumerate() {
                let is_there = || self.kernel.image.symbols().address_of(name).is_some();
                if position == 0 || !hook.optional || is_there() {
                    self.hook(name, internal, mem);
                }
            }
        }
        self.drop_idle_hooks();
    }

    /// The guest has come to where `hooks` are, in a function with this first `argument`; the virtual CPU
    /// waits. Meant to be called for what [`Held::Engine`](hvprobe_hit::Held::Engine) says.
    pub fn told(&mut self, hooks: HookSet, argument: Gva, world: &dyn World) -> Told {
        let mut all = Told::default();
        for (number, hook) in HOOKS.iter().enumerate() {
            if hooks.0 >> number & 1 == 1
                && let Then::Told(does) = &hook.then
            {
                let Told { decision, refused } = does(self, argument, world);
                all.refused.extend(refused);
                all.decision.changes.extend(decision.changes);
                // Who sends the guest elsewhere has it his way.
                if all.decision.then == Proceed {
                    all.decision.then = decision.then;
                }
            }
        }
        all
    }

    fn told_of_module(&mut self, module: Gva, world: &dyn World) -> Told {
        let mut told = Told::default();
        match self.modules_changed(Some(module), world) {
            Ok(refused) => told.refused = refused,
            Err(StopError::Ended) => {}
            Err(error) => warn!(%error, "probes of modules stay as they are"),
        }
        told
    }

    fn told_of_kexec(&mut self, _: Gva, world: &dyn World) -> Told {
        match self.kernel_leaves(world) {
            Ok(()) | Err(StopError::Ended) => {}
            Err(error) => warn!(%error, "the guest's kernel is left with its probes in place"),
        }
        Told::default()
    }

    fn told_of_ftrace(&mut self, begins: bool, world: &dyn World) -> Told {
        if let Err(error) = self.ftrace_patches(begins, world) {
            warn!(%error, "probes at function entries stay as they are");
        }
        Told::default()
    }

    /// Whether something of ours is where the guest's ftrace patches.
    fn has_ftrace_sites(&self) -> bool {
        let is_used = |site: &SiteState| {
            site.internal.is_some() || site.members.iter().any(|id| !self.probes.is_leaving(*id))
        };
        self.sites
            .values()
            .any(|site| site.point.ftrace && is_used(site))
    }

    /// Whether tasks make calls after their end that a return probe follows.
    fn has_last_entered(&self) -> bool {
        self.sites.values().any(|site| {
            // The compiler may have made a clone of it.
            let name = site.point.symbol.0.split('.').next();
            name == Some(LAST_ENTERED) && self.probes.any_follows_calls(&site.members)
        })
    }

    /// Whether some instruction that may fault runs from a slot that jumps back, or from a detour.
    fn has_copies_that_may_fault(&self) -> bool {
        let may_fault = |it: &Displaced| !matches!(it.action(), Action::Emulate(_));
        let jumps = self.switches.optimize && self.code.region.detours.is_some();
        self.sites.values().any(|site| {
            let span = site.point.span.as_ref().ok().filter(|_| jumps);
            self.has_enabled(site)
                && (may_fault(&site.point.displaced)
                    || span.is_some_and(|span| span.instructions().any(may_fault)))
        })
    }

    pub(crate) fn hook(&mut self, name: &'static str, internal: Internal, mem: &dyn PhysMemory) {
        let spec = |offset| {
            ProbeSpec::from(Definition {
                kind: Kind::Probe,
                name: None,
                target: Target::Symbol {
                    module: None,
                    name: name.to_owned(),
                    offset,
                },
                arguments: Vec::new(),
                filter: None,
                marks: Marks::default(),
            })
        };
        let behind = self.behind_ftrace(name);
        let planned = behind.map(|behind| self.plan(&spec(behind), mem));
        let planned = match planned {
            Some(Ok(point)) => Ok(point),
            Some(Err(_)) | None => self.plan(&spec(0), mem),
        };
        match planned {
            Ok(point) => {
                let site = self.site_of(point);
                site.internal = Some(site.internal.unwrap_or_default().and(internal));
                self.hooks.unhooked.remove(name);
            }
            Err(why) if self.hooks.unhooked.insert(name) => {
                warn!(%why, "{name} cannot be watched");
            }
            Err(_) => {}
        }
    }

    /// The offset behind the instruction of the function `name` that ftrace patches, if there is one.
    fn behind_ftrace(&self, name: &str) -> Option<u64> {
        let image = &self.kernel.image;
        let entry = image.symbols().address_of(name)?;
        // At the entry, or behind its ENDBR.
        let at = [0, ENDBR].into_iter();
        let mut at = at.filter(|at| image.is_ftrace_site(entry.wrapping_add(*at)));
        Some(at.next()? + FTRACE)
    }

    /// Does without what the engine wanted to know where `obstacle` is, if that was it.
    pub(crate) fn unhook(&mut self, obstacle: &Obstacle) -> bool {
        let Obstacle { at, why } = obstacle;
        let site = self.sites.get_mut(at).filter(|site| !site.is_armed());
        let Some(site) = site.filter(|site| site.internal.is_some()) else {
            return false;
        };
        site.internal = None;
        let name = watched().find(|name| *name == site.point.symbol.0);
        if site.members.is_empty() {
            self.sites.remove(at);
        }
        if let Some(name) = name
            && self.hooks.unhooked.insert(name)
        {
            warn!(%why, "{name} cannot be watched");
        }
        true
    }

    /// Forgets sites that neither a probe nor the engine wants and that were never armed.
    fn drop_idle_hooks(&mut self) {
        self.sites.retain(|_, site| {
            !site.members.is_empty() || site.internal.is_some() || site.is_armed()
        });
    }

    /// The guest's ftrace is about to patch text, or has done so: takes our int3s off its sites, or
    /// puts them back where it left the nop. In one stop, whatever it has patched: it waits for this with its
    /// locks held.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn ftrace_patches(&mut self, begins: bool, world: &dyn World) -> Result<(), StopError> {
        self.hooks.ftrace.patches = match begins {
            true => Patches::Yes,
            false => Patches::No,
        };
        if !begins {
            self.leave_to_ftrace(world.memory());
        }
        loop {
            match self.commit_at_hook(world) {
                Ok(()) => return Ok(()),
                Err(CommitError::Stop(error)) => return Err(error),
                Err(CommitError::Sites(obstacles)) => {
                    // Every round leaves more sites alone.
                    let mut left = 0_usize;
                    for Obstacle { at, .. } in obstacles.all() {
                        if let Some(site) = self.sites.get_mut(&at).filter(|site| !site.occupied) {
                            site.occupied = true;
                            left += 1;
                        }
                    }
                    if left == 0 {
                        return Ok(());
                    }
                    info!(left, "changed meanwhile, and left to the guest");
                }
            }
        }
    }

    /// Finds out whether the guest's ftrace may be patching, if it was not watched when it began. The virtual CPUs
    /// must stand still.
    pub(crate) fn look_at_ftrace(&mut self, mem: &dyn PhysMemory) {
        if self.hooks.ftrace.watched {
            return;
        }
        let is_held = self.has_ftrace_sites() && self.is_ftrace_locked(mem);
        if is_held {
            info!("the guest's ftrace may be patching: probes at function entries wait for it");
        }
        self.hooks.ftrace.patches = match is_held {
            true => Patches::Perhaps,
            false => Patches::No,
        };
    }

    fn is_ftrace_locked(&self, mem: &dyn PhysMemory) -> bool {
        let (Some(live), Some(lock)) = (&self.live, self.hooks.ftrace.lock) else {
            return self.hooks.ftrace.patches == Patches::Yes;
        };
        lock.is_held(&live.view.tables, mem)
    }

    /// Whether the guest's ftrace is held where it begins to patch.
    pub(crate) fn watches_ftrace(&self) -> bool {
        let Some(entry) = self.kernel.image.symbols().address_of(FTRACE_BEGINS) else {
            return false;
        };
        let is_watched =
            |site: &SiteState| site.internal.is_some() && site.is_armed() && !site.gone;
        // Behind its ENDBR, if it has one, and behind what ftrace patches.
        let mut sites = self.sites.range(entry..=entry.wrapping_add(ENDBR + FTRACE));
        sites.any(|(_, site)| is_watched(site))
    }

    /// Plants what waits for the guest's ftrace once its lock is free: it had that before it was watched, or its end
    /// was missed. Meant to be called once a second.
    pub fn retry_ftrace(&mut self, world: &dyn World) {
        if self.hooks.ftrace.patches != Patches::No
            && !self.is_ftrace_locked(world.memory())
            && let Err(error) = self.ftrace_patches(false, world)
        {
            warn!(%error, "probes at function entries wait on");
            self.hooks.ftrace.patches = Patches::Perhaps;
        }
    }

    /// Finds out which sites hold something else than the nop, now that the guest's ftrace has patched: those are
    /// its own.
    fn leave_to_ftrace(&mut self, mem: &dyn PhysMemory) {
        let Some(live) = &self.live else { return };
        let tables = live.view.tables;
        let text = Text {
            tables: &tables,
            mem,
        };
        let taken = self.sites.iter().filter(|(at, site)| {
            let own = site.point.displaced.bytes();
            site.point.ftrace
                && !site.is_armed()
                && !text.holds(
                    **at,
                    &patched(&self.sites, **at, own, |_, site| &site.patch),
                )
        });
        let taken: BTreeSet<Gva> = taken.map(|(at, _)| *at).collect();
        for (at, site) in &mut self.sites {
            site.occupied = taken.contains(at);
        }
        if !taken.is_empty() {
            info!(sites = taken.len(), "left to the guest's ftrace");
        }
    }

    pub(crate) fn has_module_probes(&self) -> bool {
        self.probes.staying().any(|(_, probe)| match &probe.place {
            Place::Pending => matches!(
                probe.spec.definition.target,
                Target::Symbol {
                    module: Some(_),
                    ..
                }
            ),
            Place::At(at) => !self.kernel.image.is_text(*at),
            Place::Refused(_) | Place::Gone => false,
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
