//! The registry: which probes exist, where they are planted, and every change to that.
//!
//! ```text
//!             register                    text final                 unregister
//!  (booting) ──────────► pending ───────────────────► placed ──────────────────► forgotten
//!                            └─────► refused             │ ▲
//!  (live)    ──────────────────────────────────► placed ◄┘ │ enable / disable
//! ```
//! A *site* is one address with the probes at it, in the order of their registration; it carries
//! our int3, or a jump, exactly while one of them is enabled. Invariants: a batch is registered whole or not at
//! all and costs one stop of the virtual CPUs; text is written only in that stop; the virtual CPUs
//! leave the stop with a table that matches the text.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::GateHead;
use hvprobe_arch::mem::PhysMemory;
use rustc_hash::FxHashSet;
use tracing::warn;

use super::batch::Refusals;
use super::budget::Throttled;
use super::commit::CommitError;
pub use super::error::{ChangeError, RegisterError};
use hvprobe_hit::calls::{CELLS, Calls, MaxActive};
use hvprobe_hit::record::{Reader, Source, Sources};
use hvprobe_hit::table::Returns;
use hvprobe_hit::{Counters, KernelView, Vacated, entry_data_size};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::modules::{ModuleError, ModuleList, ModuleReader};
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{ProbeId, ProbeSpec};

use super::foreign::Foreign;
use super::ghosts::Ghosts;
use super::jump::Jump;
use super::patch::{LiveText, Text};
use super::plan::{ImageText, Kernel, Obstacle, PristineText, Probepoint, Refused, plan};
use super::plant::PlantError;
use super::quiescence::{Patience, is_feasible};
use super::replaced::Banner;
use super::reuse::Keep;
use super::site::{Patch, Place, Probe, SiteState};
use crate::hidden::HiddenRegion;
use crate::world::{StopError, World};

/// What a live kernel offers.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) view: KernelView,
    /// The #BP entry to patch while probes are armed, in the `idt-gate` catch mode.
    pub(super) gate: Option<GateHead>,
    pub(super) gate_planted: bool,
    /// What the kernel keeps where nobody writes, if it is known.
    pub(super) banner: Option<Banner>,
}

/// The probes of one machine.
#[derive(Debug)]
pub struct Registry {
    pub(super) image: Arc<KernelImage>,
    /// How to read the guest's modules, if its type information tells.
    pub(super) module_reader: Result<ModuleReader, ModuleError>,
    /// The guest's modules, as they were when last read.
    pub(super) modules: Option<ModuleList>,
    /// Where modules are whose text became final while we watched, though they are not live yet.
    pub(super) formed: BTreeSet<Gva>,
    pub(super) vcpus: usize,
    next_id: u32,
    pub(super) probes: BTreeMap<ProbeId, Probe>,
    pub(super) sites: BTreeMap<Gva, SiteState>,
    /// Boosted slots whose probe has left: someone may have been interrupted inside.
    pub(super) ghosts: Ghosts,
    /// Jumps that were in use, with their detours: someone may have been interrupted inside.
    pub(super) ghost_jumps: BTreeMap<Gva, Vec<Jump>>,
    /// What probes that have left recorded with, and their ghosts still may.
    pub(super) ghost_sources: Vec<Arc<Source>>,
    /// How much of that may come together.
    pub(super) keep: Keep,
    /// How much had when it was last looked who may still come there.
    pub(super) kept: Keep,
    /// The number of the next stub that calls return to.
    pub(super) next_stub: u32,
    /// What turns records of detours into events.
    pub(super) sources: Sources,
    /// The global knob: jumps are used where they can be.
    pub(super) optimize: bool,
    /// The guest's memory can be looked through in one stop.
    pub(super) can_scan: bool,
    /// What is known of the guest's own kprobes.
    pub(super) foreign: Foreign,
    /// Where the guest is about to register one.
    pub(super) guest_registers: Option<Gva>,
    /// Where it had registered some when that was last looked at.
    pub(super) kprobes: BTreeSet<Gva>,
    /// When to look again whether somebody is under a jump.
    pub(super) patience: Patience,
    /// The global switch.
    pub(super) switched_on: bool,
    /// What is to be told of probes that have left.
    pub(super) last_throttled: Vec<Throttled>,
    /// Functions the engine wanted to watch and could not.
    pub(super) unwatched: BTreeSet<&'static str>,
    /// The guest runs another kernel than the one it was booted with.
    pub(super) replaced: bool,
    /// The guest's ftrace is patching text: its sites hold none of our int3s meanwhile.
    pub(super) ftrace_patches: bool,
    pub(super) returns: Arc<Returns>,
    pub(super) vacated: Arc<Vacated>,
    pub(super) retired: Arc<FxHashSet<u64>>,
    pub(super) hidden: HiddenRegion,
    pub(super) live: Option<Live>,
}

impl Registry {
    /// An empty registry for a machine with `vcpus` virtual CPUs that is about to boot `image`.
    #[must_use]
    pub fn new(image: Arc<KernelImage>, vcpus: usize, hidden: HiddenRegion) -> Self {
        let module_reader = ModuleReader::new(&image);
        if let Err(error) = &module_reader {
            warn!(%error, "modules cannot be probed");
        }
        let foreign = Foreign::of(&image);
        let processors = u32::try_from(vcpus).unwrap_or(u32::MAX);
        Self {
            image,
            module_reader,
            modules: None,
            formed: BTreeSet::new(),
            vcpus,
            next_id: 1,
            probes: BTreeMap::new(),
            sites: BTreeMap::new(),
            ghosts: Ghosts::default(),
            ghost_jumps: BTreeMap::new(),
            ghost_sources: Vec::new(),
            keep: Keep::default(),
            kept: Keep::NOTHING,
            next_stub: 0,
            sources: Sources::default(),
            optimize: true,
            can_scan: false,
            foreign,
            guest_registers: None,
            kprobes: BTreeSet::new(),
            patience: Patience::default(),
            switched_on: true,
            last_throttled: Vec::new(),
            unwatched: BTreeSet::new(),
            replaced: false,
            ftrace_patches: false,
            returns: Arc::new(Returns {
                calls: Calls::new(processors, CELLS),
                unmatched: AtomicU64::new(0),
                next_call: AtomicU64::new(0),
            }),
            vacated: Arc::default(),
            retired: Arc::default(),
            hidden,
            live: None,
        }
    }

    /// The same registry, which uses jumps where they can be used, as it does by default, or not.
    #[must_use]
    pub fn with_optimization(mut self, on: bool) -> Self {
        self.optimize = on;
        self
    }

    /// The kernel's text is final: plants what was pending, in one stop. What turns out to be
    /// impossible is marked as refused and returned; the rest is planted.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped; then everything is pending as before.
    pub fn go_live(
        &mut self,
        view: KernelView,
        gate: Option<GateHead>,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        self.live = Some(Live {
            view,
            gate,
            gate_planted: false,
            banner: Banner::read(&self.image, &view.tables, world.memory()),
        });
        self.can_scan = is_feasible(world.memory());
        self.read_modules(world.memory());
        self.read_kprobes(world.memory());
        let refused = self.settle_pending(world);
        if refused.is_err() {
            for id in self.probes.keys().copied().collect::<Vec<_>>() {
                self.unplace(id);
            }
            // What is left is the engine's own.
            self.sites.clear();
            self.live = None;
        }
        refused
    }

    /// Plants pending probes whose place there is now. Those it is impossible for are marked as
    /// refused and returned.
    pub(super) fn settle_pending(
        &mut self,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        let pending: Vec<ProbeId> = self
            .probes
            .iter()
            .filter(|(_, probe)| matches!(probe.place, Place::Pending))
            .map(|(id, _)| *id)
            .collect();
        let (mut refused, mut placed) = (Vec::new(), BTreeSet::new());
        for id in pending {
            match self.plan(&self.probes[&id].spec, world.memory()) {
                Ok(point) => {
                    self.place(id, point);
                    placed.insert(id);
                }
                Err(Refused::ModuleNotLoaded { .. }) => {}
                Err(why) => refused.push((id, why)),
            }
        }
        match self.plant(&placed, Refusals::Skip, world) {
            Ok(planted) => refused.extend(planted.refused),
            Err(PlantError::Stop(error)) => return Err(error),
            Err(PlantError::Replaced) => {}
            // They stay pending.
            Err(PlantError::Site(Obstacle { why, .. }) | PlantError::Refused(_, why)) => {
                warn!(%why, "pending probes cannot be planted");
            }
        }
        for (id, why) in &refused {
            if let Some(probe) = self.probes.get_mut(id) {
                probe.place = Place::Refused(why.clone());
            }
        }
        Ok(refused)
    }

    /// Adds the probe `spec` and, once the kernel is live, its site.
    pub(super) fn add(
        &mut self,
        spec: &ProbeSpec,
        point: Option<Probepoint>,
    ) -> Result<ProbeId, Refused> {
        let id = ProbeId(self.next_id);
        let probe = self.probe(id, spec)?;
        self.probes.insert(id, probe);
        self.next_id = self.next_id.saturating_add(1);
        if self.live.is_some()
            && let Some(point) = point
        {
            self.place(id, point);
        }
        Ok(id)
    }

    /// A new probe, with its instances if it is a return probe.
    fn probe(&self, id: ProbeId, spec: &ProbeSpec) -> Result<Probe, Refused> {
        let pool = match spec.definition.kind {
            Kind::Probe => None,
            Kind::Return { maxactive } => {
                let maxactive = match maxactive {
                    _ if spec.maxactive_auto => MaxActive::Auto,
                    Some(number) => MaxActive::Fixed(number),
                    None => MaxActive::Default,
                };
                let data = entry_data_size(&spec.actions);
                Some(Arc::new(self.returns.calls.pool(id, maxactive, data)?))
            }
        };
        Ok(Probe {
            spec: spec.clone(),
            counters: Arc::new(Counters::with_budget(self.vcpus, spec.budget.as_ref())),
            actions: Arc::new(spec.actions.clone()),
            pool,
            place: Place::Pending,
        })
    }

    /// Forgets probes that were not planted.
    pub(super) fn take_back(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        for id in ids {
            self.unplace(id);
            self.probes.remove(&id);
        }
    }

    /// Unregisters `ids`, all or none. When it returns, the original bytes are back, no virtual CPU
    /// is in a handler of these probes, and calls that a return probe had entered return to their
    /// callers on their own.
    ///
    /// # Errors
    /// When one of them does not exist or the virtual CPUs cannot be stopped.
    pub fn unregister(&mut self, ids: &[ProbeId], world: &dyn World) -> Result<(), ChangeError> {
        let mut leaving = BTreeSet::new();
        for (index, &id) in ids.iter().enumerate() {
            if !self.probes.contains_key(&id) || !leaving.insert(id) {
                return Err(ChangeError::NoSuchProbe { id, index });
            }
        }
        self.provide_internal(&leaving, world.memory());
        self.commit(&leaving, world).map_err(|error| {
            self.provide_internal(&BTreeSet::new(), world.memory());
            self.change_error(error, ids)
        })?;
        // What was recorded before their jumps were gone is handed on first.
        world.collect();
        self.forget_sources(&leaving);
        for id in leaving {
            self.forget_probe(id);
        }
        Ok(())
    }

    /// Unregisters everything.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn unregister_all(&mut self, world: &dyn World) -> Result<(), ChangeError> {
        let all: Vec<ProbeId> = self.probes.keys().copied().collect();
        self.unregister(&all, world)
    }

    /// Enables or disables `ids`, all or none. A disabled probe makes no event any more when this
    /// returns; a hit that was on the way then is counted.
    ///
    /// # Errors
    /// When one of them does not exist, cannot be armed, or the virtual CPUs cannot be stopped.
    pub fn set_enabled(
        &mut self,
        ids: &[ProbeId],
        enabled: bool,
        world: &dyn World,
    ) -> Result<(), ChangeError> {
        if enabled && self.is_overwritten(world.memory()) {
            self.find_out_replaced(world);
        }
        for (index, &id) in ids.iter().enumerate() {
            let Some(probe) = self.probes.get(&id) else {
                return Err(ChangeError::NoSuchProbe { id, index });
            };
            if enabled && self.replaced {
                let source = Refused::Replaced;
                return Err(ChangeError::Refused { id, source });
            }
            if enabled
                && let Place::At(at) = probe.place
                && let Some(site) = self.sites.get(&at)
                && self.is_rewritten(site, world.memory())
            {
                let source = Refused::Rewritten { at };
                return Err(ChangeError::Refused { id, source });
            }
        }
        if enabled {
            self.refill(ids);
        }
        let mut before = BTreeMap::new();
        for id in ids {
            if let Some(probe) = self.probes.get_mut(id) {
                before.entry(*id).or_insert(probe.spec.disabled);
                probe.spec.disabled = !enabled;
            }
        }
        self.provide_internal(&BTreeSet::new(), world.memory());
        self.commit(&BTreeSet::new(), world).map_err(|error| {
            for (id, disabled) in before {
                if let Some(probe) = self.probes.get_mut(&id) {
                    probe.spec.disabled = disabled;
                }
            }
            self.provide_internal(&BTreeSet::new(), world.memory());
            self.change_error(error, ids)
        })?;
        self.silence_disabled(world);
        Ok(())
    }

    /// Sees to it that no probe that has just been disabled makes another event: whoever was
    /// preempted in its detour may be about to finish one.
    fn silence_disabled(&self, world: &dyn World) {
        let sources = self.sources.iter();
        let due: Vec<_> = sources.filter(|it| it.is_to_be_silenced()).collect();
        if !due.is_empty() {
            // What it had recorded by then is handed on first.
            world.collect();
            due.iter().for_each(|source| source.silence());
        }
    }

    /// The global switch: arms every enabled probe, or takes every patch out of the guest. Each
    /// probe's own state stays as it is.
    ///
    /// # Errors
    /// When a probe cannot be armed or the virtual CPUs cannot be stopped; nothing has changed then.
    pub fn switch(&mut self, on: bool, world: &dyn World) -> Result<(), ChangeError> {
        if on && self.has_module_probes(&BTreeSet::new()) {
            // While the switch was off nobody watched modules come and go.
            self.modules_changed(None, world)?;
        }
        // A site that was rewritten meanwhile stays as it is and keeps nobody else back.
        self.watch(world);
        let before = std::mem::replace(&mut self.switched_on, on);
        self.commit(&BTreeSet::new(), world).map_err(|error| {
            self.switched_on = before;
            let all: Vec<ProbeId> = self.probes.keys().copied().collect();
            self.change_error(error, &all)
        })?;
        self.silence_disabled(world);
        Ok(())
    }

    /// The global knob of optimization: uses jumps where they can be used, or int3s everywhere.
    ///
    /// # Errors
    /// When a probe cannot be armed or the virtual CPUs cannot be stopped; nothing has changed then.
    pub fn set_optimization(&mut self, on: bool, world: &dyn World) -> Result<(), ChangeError> {
        let before = std::mem::replace(&mut self.optimize, on);
        self.provide_internal(&BTreeSet::new(), world.memory());
        self.commit(&BTreeSet::new(), world).map_err(|error| {
            self.optimize = before;
            self.provide_internal(&BTreeSet::new(), world.memory());
            let all: Vec<ProbeId> = self.probes.keys().copied().collect();
            self.change_error(error, &all)
        })
    }

    /// The ring that detours record into has to be read from there, with these sources; `None`
    /// where no detour can be made.
    #[must_use]
    pub fn ring(&self) -> Option<Reader> {
        Some(Reader::new(self.hidden.ring()?, self.sources.clone()))
    }

    /// Whether the global switch is on.
    #[must_use]
    pub fn is_switched_on(&self) -> bool {
        self.switched_on
    }

    /// What there is to be probed.
    pub(super) fn kernel(&self) -> Kernel<'_> {
        Kernel {
            image: &self.image,
            modules: self.modules.as_ref(),
            formed: &self.formed,
        }
    }

    /// Finds and checks the probepoint of `spec`.
    pub(super) fn plan(
        &self,
        spec: &ProbeSpec,
        mem: &dyn PhysMemory,
    ) -> Result<Probepoint, Refused> {
        let kernel = self.kernel();
        let plan = |text: &dyn PristineText| match (plan(spec, &kernel, text), &self.module_reader)
        {
            // It would wait for ever.
            (Err(Refused::ModuleNotLoaded { module }), Err(why)) => {
                let why = why.clone();
                Err(Refused::ModulesHidden { module, why })
            }
            (planned, _) => planned,
        };
        match &self.live {
            None => plan(&ImageText(&self.image)),
            Some(live) => {
                let tables = &live.view.tables;
                let text = LiveText {
                    text: Text { tables, mem },
                    sites: &self.sites,
                };
                let point = plan(&text)?;
                let at = point.displaced.at();
                if spec.is_return()
                    && let Err(why) = live.view.task
                {
                    return Err(Refused::NoTasks(why));
                }
                match self.sites.get(&at) {
                    Some(site) if self.is_rewritten(site, mem) => Err(Refused::Rewritten { at }),
                    _ if self.kprobes.contains(&at) => Err(Refused::Kprobe { at }),
                    _ => Ok(point),
                }
            }
        }
    }

    pub(super) fn place(&mut self, id: ProbeId, point: Probepoint) {
        let at = point.displaced.at();
        self.site_of(point).members.push(id);
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.place = Place::At(at);
        }
    }

    /// The site at `point`, made if there is none.
    pub(super) fn site_of(&mut self, point: Probepoint) -> &mut SiteState {
        self.sites
            .entry(point.displaced.at())
            .or_insert_with(|| SiteState {
                symbol: point.symbol,
                displaced: point.displaced,
                fixup: point.fixup,
                after_sti: point.after_sti,
                ftrace: point.ftrace,
                occupied: false,
                slot: None,
                members: Vec::new(),
                internal: None,
                span: point.span,
                patch: Patch::None,
                unprepared: None,
                gone: false,
            })
    }

    /// Takes back a [`Registry::place`] that was not committed.
    pub(super) fn unplace(&mut self, id: ProbeId) {
        let Some(Place::At(at)) = self.probes.get(&id).map(|p| p.place.clone()) else {
            return;
        };
        if let Some(site) = self.sites.get_mut(&at) {
            site.members.retain(|member| *member != id);
            // Before it was committed, it has no slot.
            if site.members.is_empty() && site.internal.is_none() && !site.is_armed() {
                self.sites.remove(&at);
            }
        }
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.place = Place::Pending;
        }
    }

    /// Lays `error` to the charge of the one of `ids` that is at the site concerned.
    fn change_error(&self, error: CommitError, ids: &[ProbeId]) -> ChangeError {
        match error {
            CommitError::Stop(error) => error.into(),
            CommitError::Site(Obstacle { at, why }) => ChangeError::Refused {
                id: self
                    .sites
                    .get(&at)
                    .and_then(|site| site.members.iter().find(|id| ids.contains(id)))
                    .copied()
                    .unwrap_or(ProbeId(0)),
                source: why,
            },
        }
    }
}
