//! What the registry keeps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::GateHead;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::calls::{CELLS, Calls, MaxActive};
use hvprobe_hit::record::{Reader, Source, Sources};
use hvprobe_hit::table::Returns;
use hvprobe_hit::{Counters, KernelView, Vacated, entry_data_size};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::modules::{ModuleError, ModuleList, ModuleReader};
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{ProbeId, ProbeSpec};
use rustc_hash::FxHashSet;
use tracing::warn;

use crate::code::ghosts::Ghosts;
use crate::code::jump::Jump;
use crate::code::keep::Keep;
use crate::code::region::HiddenRegion;
use crate::guest::banner::Banner;
use crate::guest::kprobes::Foreign;
use crate::info::Throttled;
use crate::plan::kernel::Kernel;
use crate::plan::probepoint::{Probepoint, plan};
use crate::plan::text::{ImageText, PristineText};
use crate::refusal::Refused;
use crate::registry::patience::Patience;
use crate::sites::site::{Patch, Place, Probe, SiteState};
use crate::sites::text::{LiveText, Text};

/// What a live kernel offers.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) view: KernelView,
    /// The #BP entry to patch while probes are armed, in the `idt-gate` catch mode.
    pub(crate) gate: Option<GateHead>,
    pub(crate) gate_planted: bool,
    /// What the kernel keeps where nobody writes, if it is known.
    pub(crate) banner: Option<Banner>,
}

/// The probes of one machine.
#[derive(Debug)]
pub struct Registry {
    pub(crate) image: Arc<KernelImage>,
    /// How to read the guest's modules, if its type information tells.
    pub(crate) module_reader: Result<ModuleReader, ModuleError>,
    /// The guest's modules, as they were when last read.
    pub(crate) modules: Option<ModuleList>,
    /// Where modules are whose text became final while we watched, though they are not live yet.
    pub(crate) formed: BTreeSet<Gva>,
    pub(crate) vcpus: usize,
    next_id: u32,
    pub(crate) probes: BTreeMap<ProbeId, Probe>,
    pub(crate) sites: BTreeMap<Gva, SiteState>,
    /// Boosted slots whose probe has left: someone may have been interrupted inside.
    pub(crate) ghosts: Ghosts,
    /// Jumps that were in use, with their detours: someone may have been interrupted inside.
    pub(crate) ghost_jumps: BTreeMap<Gva, Vec<Jump>>,
    /// What probes that have left recorded with, and their ghosts still may.
    pub(crate) ghost_sources: Vec<Arc<Source>>,
    /// How much of that may come together.
    pub(crate) keep: Keep,
    /// How much had when it was last looked who may still come there.
    pub(crate) kept: Keep,
    /// The number of the next stub that calls return to.
    pub(crate) next_stub: u32,
    /// What turns records of detours into events.
    pub(crate) sources: Sources,
    /// The global knob: jumps are used where they can be.
    pub(crate) optimize: bool,
    /// The guest's memory can be looked through in one stop.
    pub(crate) can_scan: bool,
    /// What is known of the guest's own kprobes.
    pub(crate) foreign: Foreign,
    /// Where the guest is about to register one.
    pub(crate) guest_registers: Option<Gva>,
    /// Where it had registered some when that was last looked at.
    pub(crate) kprobes: BTreeSet<Gva>,
    /// When to look again whether somebody is under a jump.
    pub(crate) patience: Patience,
    /// The global switch.
    pub(crate) switched_on: bool,
    /// What is to be told of probes that have left.
    pub(crate) last_throttled: Vec<Throttled>,
    /// Functions the engine wanted to watch and could not.
    pub(crate) unwatched: BTreeSet<&'static str>,
    /// The guest runs another kernel than the one it was booted with.
    pub(crate) replaced: bool,
    /// The guest's ftrace is patching text: its sites hold none of our int3s meanwhile.
    pub(crate) ftrace_patches: bool,
    pub(crate) returns: Arc<Returns>,
    pub(crate) vacated: Arc<Vacated>,
    pub(crate) retired: Arc<FxHashSet<u64>>,
    pub(crate) hidden: HiddenRegion,
    pub(crate) live: Option<Live>,
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

    /// Adds the probe `spec` and, once the kernel is live, its site.
    pub(crate) fn add(
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
    pub(crate) fn take_back(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        for id in ids {
            self.unplace(id);
            self.probes.remove(&id);
        }
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
    pub(crate) fn kernel(&self) -> Kernel<'_> {
        Kernel {
            image: &self.image,
            modules: self.modules.as_ref(),
            formed: &self.formed,
        }
    }

    /// Finds and checks the probepoint of `spec`.
    pub(crate) fn plan(
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

    pub(crate) fn place(&mut self, id: ProbeId, point: Probepoint) {
        let at = point.displaced.at();
        self.site_of(point).members.push(id);
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.place = Place::At(at);
        }
    }

    /// The site at `point`, made if there is none.
    pub(crate) fn site_of(&mut self, point: Probepoint) -> &mut SiteState {
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
    pub(crate) fn unplace(&mut self, id: ProbeId) {
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
}
