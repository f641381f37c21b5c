//! The state of the registry.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::calls::{CELLS, Calls, MaxActive};
use hvprobe_hit::record::Reader;
use hvprobe_hit::table::Returns;
use hvprobe_hit::{Counters, RestoredFrames, entry_data_size};
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::definition::{Kind, Target};
use hvprobe_spec::{ProbeId, ProbeSpec};
use rustc_hash::FxHashSet;

use crate::code::ours::OurCode;
use crate::code::region::HiddenRegion;
use crate::guest::kernel::GuestKernel;
use crate::guest::kprobes::{GuestKprobes, one_over};
use crate::info::{Awaited, Throttled};
use crate::plan::arguments::{Resolved, resolve};
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::{Probepoint, plan};
use crate::plan::text::{ImageText, PristineText};
use crate::refusal::Refused;
use crate::registered::PROBES_MAX;
use crate::registry::hook_state::Hooks;
use crate::registry::live::Live;
use crate::registry::looks::Looks;
use crate::registry::optimize::Rules;
use crate::registry::switches::Switches;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, Placement, Probe, SiteState, Sites};
use crate::sites::text::{LiveText, Text};

/// The probes of one machine.
#[derive(Debug)]
pub struct Registry {
    pub(crate) kernel: GuestKernel,
    pub(crate) kprobes: GuestKprobes,
    pub(crate) vcpus: usize,
    pub(crate) probes: Probes,
    /// Maximum number of probes.
    pub(crate) room: usize,
    pub(crate) sites: Sites,
    pub(crate) code: OurCode,
    pub(crate) switches: Switches,
    pub(crate) hooks: Hooks,
    /// Whether the guest has little enough memory for looks.
    pub(crate) can_scan: bool,
    /// Looks for tasks under jumps and in ghosts.
    pub(crate) looks: Looks,
    /// Notices of throttled hits of probes that have left.
    pub(crate) last_throttled: Vec<Throttled>,
    /// Whether the guest runs another kernel than the one it was booted with.
    pub(crate) replaced: bool,
    /// Data shared by the virtual CPUs.
    pub(crate) shared: Shared,
    pub(crate) live: Option<Live>,
}

/// Data that the virtual CPUs share, in every table that they get.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) returns: Arc<Returns>,
    pub(crate) restored_frames: Arc<RestoredFrames>,
    /// Addresses that held one of our int3s at some time.
    pub(crate) retired: Arc<FxHashSet<u64>>,
}

impl Registry {
    /// Creates an empty registry for a machine with `vcpus` virtual CPUs that is about to boot `image`.
    #[must_use]
    pub fn new(image: Arc<KernelImage>, vcpus: usize, hidden: HiddenRegion) -> Self {
        let processors = u32::try_from(vcpus).unwrap_or(u32::MAX);
        let returns = Returns {
            calls: Calls::new(processors, CELLS),
            unmatched: AtomicU64::new(0),
            next_call: AtomicU64::new(0),
        };
        Self {
            kprobes: GuestKprobes::of(&image),
            hooks: Hooks::of(&image),
            kernel: GuestKernel::new(image),
            vcpus,
            probes: Probes::default(),
            room: PROBES_MAX,
            sites: Sites::new(),
            code: OurCode::new(hidden),
            switches: Switches::default(),
            can_scan: false,
            looks: Looks::default(),
            last_throttled: Vec::new(),
            replaced: false,
            shared: Shared {
                returns: Arc::new(returns),
                restored_frames: Arc::default(),
                retired: Arc::default(),
            },
            live: None,
        }
    }

    /// Limits the registry to `probes` probes, and never more than [`PROBES_MAX`].
    #[must_use]
    pub fn with_room(mut self, probes: usize) -> Self {
        self.room = probes.min(PROBES_MAX);
        self
    }

    /// Sets whether jumps are used where possible, which is the default.
    #[must_use]
    pub fn with_optimization(mut self, on: bool) -> Self {
        self.switches.optimize = on;
        self
    }

    /// Returns the facts that decide what the text of each site is to hold.
    pub(crate) fn rules(&self) -> Rules<'_> {
        Rules {
            switches: self.switches,
            probes: &self.probes,
            sites: &self.sites,
            hooks: &self.hooks,
            kprobes: &self.kprobes,
            live: self.live.as_ref(),
            can_scan: self.can_scan,
            has_detours: self.code.has_detours(),
        }
    }

    /// Returns the facts that decide what the text of each site is to hold, and our code, which changes
    /// accordingly.
    pub(crate) fn rules_and_code(&mut self) -> (Rules<'_>, &mut OurCode) {
        let rules = Rules {
            switches: self.switches,
            probes: &self.probes,
            sites: &self.sites,
            hooks: &self.hooks,
            kprobes: &self.kprobes,
            live: self.live.as_ref(),
            can_scan: self.can_scan,
            has_detours: self.code.has_detours(),
        };
        (rules, &mut self.code)
    }

    /// Adds the probe `spec` and, if the kernel is live, its site.
    pub(crate) fn add(
        &mut self,
        spec: &ProbeSpec,
        point: Option<Probepoint>,
        resolved: Resolved,
    ) -> Result<ProbeId, Refused> {
        let probe = self.probe(self.probes.next_id(), spec, resolved)?;
        let id = self.probes.add(probe);
        if self.live.is_some()
            && let Some(point) = point
        {
            self.place(id, point);
        }
        Ok(id)
    }

    /// Creates a probe, with its instances if it is a return probe.
    fn probe(&self, id: ProbeId, spec: &ProbeSpec, resolved: Resolved) -> Result<Probe, Refused> {
        let pool = match spec.definition.kind {
            Kind::Probe => None,
            Kind::Return { maxactive } => {
                let maxactive = match maxactive {
                    _ if spec.maxactive_auto => MaxActive::Auto,
                    Some(number) => MaxActive::Fixed(number),
                    None => MaxActive::Default,
                };
                let data = entry_data_size(&resolved.actions);
                Some(Arc::new(
                    self.shared.returns.calls.pool(id, maxactive, data)?,
                ))
            }
        };
        Ok(Probe {
            spec: spec.clone(),
            counters: Arc::new(Counters::with_budget(self.vcpus, spec.budget.as_ref())),
            actions: Arc::new(resolved.actions),
            shown: Arc::new(resolved.shown),
            awaited: resolved.awaited.then(Awaited::default),
            pool,
            placement: Placement::Pending,
        })
    }

    /// Resolves what probe `id` captures and shows, if that had to wait for its module, which is loaded now.
    /// `point` is its probepoint. The probe has never recorded anything.
    pub(crate) fn resolve_awaited(
        &mut self,
        id: ProbeId,
        point: &Probepoint,
    ) -> Result<(), Refused> {
        let Some(probe) = self.probes.get_mut(id) else {
            return Ok(());
        };
        let Some(awaited) = probe.awaited.clone() else {
            return Ok(());
        };
        // Drop the pool: its room is needed for one of the size that is now known.
        probe.pool = None;
        let spec = probe.spec.clone();
        let resolved = resolve(&spec, Some(point), &self.kernel.probeable())?;
        let fresh = self.probe(id, &spec, resolved)?;
        awaited.resolve(&fresh.actions, &fresh.shown);
        if let Some(probe) = self.probes.get_mut(id) {
            *probe = Probe {
                counters: Arc::clone(&probe.counters),
                ..fresh
            };
        }
        Ok(())
    }

    /// Removes probes that were not planted.
    pub(crate) fn remove_unplanted(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        for id in ids {
            self.detach(id);
            self.probes.remove(id);
        }
    }

    /// Returns a reader of the ring that detours record into, with the sources of the records; `None` where no
    /// detour can be made.
    #[must_use]
    pub fn ring(&self) -> Option<Reader> {
        self.code.reader()
    }

    /// Returns whether the global switch is on.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.switches.armed
    }

    /// Finds and checks the probepoint of `spec`.
    pub(crate) fn plan(
        &self,
        spec: &ProbeSpec,
        mem: &dyn PhysMemory,
    ) -> Result<Probepoint, Refused> {
        let kernel = self.kernel.probeable();
        let plan =
            |text: &dyn PristineText| match (plan(spec, &kernel, text), &self.kernel.module_reader)
            {
                // The probe would stay pending for ever.
                (Err(Refused::ModuleNotLoaded { module }), Err(why)) => {
                    let why = why.clone();
                    Err(Refused::ModulesHidden { module, why })
                }
                (planned, _) => planned,
            };
        match &self.live {
            None => plan(&ImageText(&self.kernel.image)),
            Some(live) => {
                let tables = &live.view.tables;
                let text = LiveText {
                    text: Text { tables, mem },
                    sites: &self.sites,
                };
                self.check_build(spec, &kernel, mem)?;
                let point = plan(&text)?;
                let at = point.displaced.at();
                let wants_types = spec.default_arguments || !spec.definition.arguments.is_empty();
                if let Some(module) = kernel.module_at(at).filter(|_| wants_types) {
                    self.kernel.read_types(module, tables, mem);
                }
                if spec.is_return()
                    && let Err(why) = live.view.task
                {
                    return Err(Refused::NoTasks(why));
                }
                match self.sites.get(&at) {
                    Some(site) if self.is_rewritten(site, mem) => Err(Refused::Rewritten { at }),
                    _ if self.kprobes.registered.contains(&at) => Err(Refused::Kprobe { at }),
                    // The guest makes no jump over text in which it found an int3.
                    Some(site) if site.is_armed() => Ok(point),
                    _ => match one_over(at, &self.kprobes.registered) {
                        Some(kprobe) => Err(Refused::UnderKprobe { at, kprobe }),
                        None => Ok(point),
                    },
                }
            }
        }
    }

    /// Refuses `spec` if another build of its module is loaded than the one it is for.
    fn check_build(
        &self,
        spec: &ProbeSpec,
        kernel: &Probeable<'_>,
        mem: &dyn PhysMemory,
    ) -> Result<(), Refused> {
        let Target::Symbol {
            module: Some(name), ..
        } = &spec.definition.target
        else {
            return Ok(());
        };
        let loaded = kernel.modules.and_then(|modules| modules.get(name));
        let loaded = loaded.filter(|module| kernel.is_loaded(module));
        let (Some(wanted), Some(module)) = (&spec.module_build_id, loaded) else {
            return Ok(());
        };
        match self.build_id(module, mem) {
            Some(id) if id == *wanted => Ok(()),
            loaded => Err(Refused::OtherBuild {
                module: module.name().to_owned(),
                loaded,
                wanted: wanted.clone(),
            }),
        }
    }

    pub(crate) fn place(&mut self, id: ProbeId, point: Probepoint) {
        let at = point.displaced.at();
        let members = &mut self.site_of(point).members;
        // A probe that was pending may be older than those at the site.
        let behind = members.partition_point(|member| *member < id);
        members.insert(behind, id);
        if let Some(probe) = self.probes.get_mut(id) {
            probe.placement = Placement::At(at);
        }
    }

    /// Returns the site at `point`, and creates it if there is none.
    pub(crate) fn site_of(&mut self, point: Probepoint) -> &mut SiteState {
        self.sites
            .entry(point.displaced.at())
            .or_insert_with(|| SiteState {
                point,
                occupied: false,
                slot: None,
                members: Vec::new(),
                internal: None,
                patch: Patch::None,
                unprepared: None,
                gone: false,
            })
    }

    /// Detaches probe `id` from its site: reverts a [`Registry::place`] that was not committed.
    pub(crate) fn detach(&mut self, id: ProbeId) {
        let Some(Placement::At(at)) = self.probes.get(id).map(|p| p.placement.clone()) else {
            return;
        };
        if let Some(site) = self.sites.get_mut(&at) {
            site.members.retain(|member| *member != id);
            // A site that was never committed has no slot.
            if site.members.is_empty() && site.internal.is_none() && !site.is_armed() {
                self.sites.remove(&at);
            }
        }
        if let Some(probe) = self.probes.get_mut(id) {
            probe.placement = Placement::Pending;
        }
    }
}
