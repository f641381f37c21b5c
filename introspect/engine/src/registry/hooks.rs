//! Functions of the guest that the engine watches for itself, with int3s of its own:
//!
//! | where            | while there are                     | why                                   |
//! |------------------|-------------------------------------|---------------------------------------|
//! | `do_task_dead`   | return probes                       | calls of a dead task are orphans      |
//! | `__put_task_struct` | return probes on `__schedule` | calls that a task made after its end are orphans |
//! | `do_init_module` | probes of modules                   | pending probes can be planted now     |
//! | `free_module`    | probes of modules                   | the text under them is about to go    |
//! | `ftrace_arch_code_modify_prepare`, `…_post_process` | probes of entry nops | no int3s of ours then |
//! | `fixup_exception`, `page_fault_oops` | copies that may fault without us | see below |
//! | `machine_kexec`  | probes that are planted             | another kernel will run ([`super::replaced`]) |
//! | `arch_prepare_kprobe` | jumps that may be written | a kprobe must not meet one ([`super::guest_kprobes`]) |
//!
//! Ftrace checks the text that it patches, so our int3s are removed from its sites meanwhile. A copy in a boosted
//! slot or a detour faults without an exit, and the fault has to show the probepoint.
//!
//! `do_init_module` runs when a module's text is final and before any of it has run; `free_module` runs before its
//! text is unmapped (kernel/module/main.c). In a kernel without one of these functions, the feature for which the
//! function is watched does not work; that is logged.
//!
//! Invariant: where ftrace patches the entry of a watched function, the int3 is after the patched instruction.
//! So hooks keep working while the guest traces the function, and the hooks' own int3s do not require watching
//! ftrace. Arguments and the return address are where they are at the entry, because the patched instruction
//! does nothing, and a tracer preserves them.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::{HookSet, Internal};
use hvprobe_spec::Then::Proceed;
use hvprobe_spec::definition::{Definition, Kind, Marks, Target};
use hvprobe_spec::{Decision, ProbeId, ProbeSpec};
use tracing::{info, warn};

use super::commit::CommitError;
use crate::guest::kprobes::PREPARES;
use crate::refusal::{Obstacle, Refused};
use crate::registry::ftrace::{
    ENDBR, FTRACE, FTRACE_BEGINS, has_ftrace_sites, is_ftrace_locked, leave_to_ftrace,
};
use crate::registry::guest_kprobes::has_to_know_kprobes;
use crate::registry::hook_state::Patches;
use crate::registry::live_plan::find_probepoint;
use crate::registry::module_loading::has_module_probes;
use crate::registry::place::site_of;
use crate::registry::state::Registry;
use crate::world::{StopError, World};

/// A hook of the engine.
struct Hook {
    /// Functions at whose entries the hook is.
    functions: &'static [&'static str],
    /// Whether the hook is needed for the present probes.
    wanted: fn(&Registry) -> bool,
    /// Action at a hit.
    then: Then,
    /// Whether only the first function has to exist.
    optional: bool,
}

/// Action of a hook.
enum Then {
    /// The virtual CPU does this at the hit.
    AtOnce(Internal),
    /// The virtual CPU waits while the engine runs this with the first argument of the function.
    Run(fn(&mut Registry, Gva, &dyn World) -> HookOutcome),
}

/// The result of an event that the engine handled.
#[derive(Debug, Default)]
pub struct HookOutcome {
    /// How the guest continues.
    pub decision: Decision,
    /// Probes that cannot be planted, and why.
    pub refused: Vec<(ProbeId, Refused)>,
}

/// An action at a hit that does nothing.
const NOTHING: Internal = Internal {
    task_dead: false,
    task_freed: false,
    fault: false,
    notifies: HookSet(0),
};

/// A hook without special properties, as a base for others.
const PLAIN: Hook = Hook {
    functions: &[],
    wanted: |_| false,
    then: Then::AtOnce(NOTHING),
    optional: false,
};

/// Function that a task enters after `do_task_dead` and never returns from (kernel/sched/core.c). All other
/// functions that it enters there return.
const LAST_ENTERED: &str = "__schedule";

/// All hooks. Those of ftrace come last, because other hooks may be at ftrace's sites, and then require ftrace's
/// hooks.
const HOOKS: [Hook; 8] = [
    Hook {
        functions: &["do_task_dead"],
        wanted: |registry| registry.probes.has_return_probes(),
        then: Then::AtOnce(Internal {
            task_dead: true,
            ..NOTHING
        }),
        ..PLAIN
    },
    // This function frees a task, its first argument, when the task has no references any more (kernel/fork.c),
    // long after the last switch away from the task.
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
        wanted: |registry| has_module_probes(&registry.probes, &registry.kernel.image),
        then: Then::Run(Registry::on_module),
        ..PLAIN
    },
    // This function runs last in every kexec, and before a crash kernel starts
    // (arch/x86/kernel/machine_kexec_64.c).
    Hook {
        functions: &["machine_kexec"],
        wanted: |registry| {
            let mut sites = registry.sites.values();
            sites.any(|site| registry.probes.any_enabled(&site.members))
        },
        then: Then::Run(Registry::on_kexec),
        ..PLAIN
    },
    // The kernel calls these functions for a fault of its own before it reports the fault. Their first argument
    // points to the registers at the fault. The first looks for an exception-table entry (arch/x86/mm/extable.c).
    // The second is called at once for page faults that can have no entry: with SMAP, those at addresses of user
    // space (arch/x86/mm/fault.c). Kernels before 5.12 do not have the second, and call the first for all faults.
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
        wanted: |registry| has_to_know_kprobes(&registry.rules()),
        then: Then::Run(|registry, kprobe, world| HookOutcome {
            decision: registry.guest_registers(kprobe, world),
            ..HookOutcome::default()
        }),
        ..PLAIN
    },
    Hook {
        functions: &[FTRACE_BEGINS],
        wanted: |registry| has_ftrace_sites(&registry.sites, &registry.probes),
        then: Then::Run(|registry, _, world| registry.on_ftrace(true, world)),
        ..PLAIN
    },
    Hook {
        functions: &["ftrace_arch_code_modify_post_process"],
        wanted: |registry| has_ftrace_sites(&registry.sites, &registry.probes),
        then: Then::Run(|registry, _, world| registry.on_ftrace(false, world)),
        ..PLAIN
    },
];

/// Returns the functions whose entries the engine may watch.
pub(crate) fn watched() -> impl Iterator<Item = &'static str> {
    HOOKS.iter().flat_map(|hook| hook.functions).copied()
}

impl Registry {
    /// Creates sites for the hooks that are needed, and detaches all other hooks from their sites. A site that is
    /// then unused is removed; if it is still armed, it is removed by the next [`Self::change`].
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
                Then::Run(_) => Internal {
                    notifies: HookSet(1 << number),
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
        self.remove_idle_sites();
    }

    /// Runs the actions of `hooks` for which the virtual CPU waits. `argument` is the first argument of the hooked
    /// function. Meant to be called for a [`Held::Engine`](hvprobe_hit::Held::Engine).
    pub fn run_hooks(&mut self, hooks: HookSet, argument: Gva, world: &dyn World) -> HookOutcome {
        let mut all = HookOutcome::default();
        for (number, hook) in HOOKS.iter().enumerate() {
            if hooks.0 >> number & 1 == 1
                && let Then::Run(does) = &hook.then
            {
                let HookOutcome { decision, refused } = does(self, argument, world);
                all.refused.extend(refused);
                all.decision.changes.extend(decision.changes);
                // The first redirect wins.
                if all.decision.then == Proceed {
                    all.decision.then = decision.then;
                }
            }
        }
        all
    }

    fn on_module(&mut self, module: Gva, world: &dyn World) -> HookOutcome {
        let mut outcome = HookOutcome::default();
        match self.modules_changed(Some(module), world) {
            Ok(refused) => outcome.refused = refused,
            Err(StopError::Ended) => {}
            Err(error) => warn!(%error, "probes of modules stay as they are"),
        }
        outcome
    }

    fn on_kexec(&mut self, _: Gva, world: &dyn World) -> HookOutcome {
        match self.kernel_leaves(world) {
            Ok(()) | Err(StopError::Ended) => {}
            Err(error) => warn!(%error, "the guest's kernel is left with its probes in place"),
        }
        HookOutcome::default()
    }

    fn on_ftrace(&mut self, begins: bool, world: &dyn World) -> HookOutcome {
        if let Err(error) = self.ftrace_patches(begins, world) {
            warn!(%error, "probes at function entries stay as they are");
        }
        HookOutcome::default()
    }

    /// Returns whether a return probe follows calls that tasks make after their end.
    fn has_last_entered(&self) -> bool {
        self.sites.values().any(|site| {
            // The probed function may be a clone that the compiler made.
            let name = site.point.symbol.0.split('.').next();
            name == Some(LAST_ENTERED) && self.probes.any_follows_calls(&site.members)
        })
    }

    /// Returns whether an instruction that may fault runs from a boosted slot or a detour.
    fn has_copies_that_may_fault(&self) -> bool {
        let may_fault = |it: &Displaced| !matches!(it.action(), Action::Emulate(_));
        let jumps = self.switches.optimize && self.code.has_detours();
        self.sites.values().any(|site| {
            let span = site.point.span.as_ref().ok().filter(|_| jumps);
            self.probes.any_enabled(&site.members)
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
        let spec = spec(self.behind_ftrace(name).unwrap_or(0));
        match find_probepoint(&spec, &self.kernel, &self.rules(), mem) {
            Ok(point) => {
                let site = site_of(point, &mut self.sites);
                site.internal = Some(site.internal.unwrap_or_default().and(internal));
                self.hooks.unhooked.remove(name);
            }
            Err(why) if self.hooks.unhooked.insert(name) => {
                warn!(%why, "{name} cannot be watched");
            }
            Err(_) => {}
        }
    }

    /// Returns the offset, in the function `name`, just after the instruction that ftrace patches; `None` if ftrace
    /// patches none.
    fn behind_ftrace(&self, name: &str) -> Option<u64> {
        let image = &self.kernel.image;
        let entry = image.symbols().address_of(name)?;
        // The instruction is at the entry, or after its ENDBR.
        let at = [0, ENDBR].into_iter();
        let mut at = at.filter(|at| image.is_ftrace_site(entry.wrapping_add(*at)));
        Some(at.next()? + FTRACE)
    }

    /// Gives up the hook at the site of `obstacle`. Returns whether there was one.
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

    /// Removes the sites that have neither probes nor a hook, and are not armed.
    fn remove_idle_sites(&mut self) {
        self.sites.retain(|_, site| {
            !site.members.is_empty() || site.internal.is_some() || site.is_armed()
        });
    }

    /// Handles the beginning or the end of ftrace's patching: removes our int3s from its sites, or restores them
    /// where ftrace left the nop. Takes one stop for all of ftrace's sites together, because ftrace waits with its
    /// locks held. Takes another stop only if text changes meanwhile.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn ftrace_patches(&mut self, begins: bool, world: &dyn World) -> Result<(), StopError> {
        self.hooks.ftrace.patches = match begins {
            true => Patches::Yes,
            false => Patches::No,
        };
        if !begins && let Some(live) = &self.live {
            leave_to_ftrace(&mut self.sites, &live.view.tables, world.memory());
        }
        loop {
            match self.commit_at_hook(world) {
                Ok(()) => return Ok(()),
                Err(CommitError::Stop(error)) => return Err(error),
                Err(CommitError::Sites(obstacles)) => {
                    // Every round leaves more sites to the guest.
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

    /// Plants the probes that wait for the guest's ftrace, if ftrace's lock is free. Needed if no hook reports the
    /// end of the patching: the lock was held before ftrace was watched, or the end was missed. Meant to be called
    /// once a second.
    pub fn retry_ftrace(&mut self, world: &dyn World) {
        if self.hooks.ftrace.patches != Patches::No
            && !is_ftrace_locked(&self.hooks.ftrace, self.live.as_ref(), world.memory())
            && let Err(error) = self.ftrace_patches(false, world)
        {
            warn!(%error, "probes at function entries wait on");
            self.hooks.ftrace.patches = Patches::Perhaps;
        }
    }
}
