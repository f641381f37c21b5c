//! The state of the registry.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hvprobe_hit::RestoredFrames;
use hvprobe_hit::calls::{CELLS, Calls};
use hvprobe_hit::record::Reader;
use hvprobe_hit::table::Returns;
use hvprobe_linux::image::KernelImage;
use rustc_hash::FxHashSet;

use crate::code::ours::OurCode;
use crate::code::region::HiddenRegion;
use crate::guest::kernel::GuestKernel;
use crate::guest::kprobes::GuestKprobes;
use crate::info::Throttled;
use crate::registered::PROBES_MAX;
use crate::registry::hook_state::Hooks;
use crate::registry::live::Live;
use crate::registry::looks::Looks;
use crate::registry::optimize::Rules;
use crate::registry::switches::Switches;
use crate::sites::probes::Probes;
use crate::sites::site::Sites;

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
    /// State of the looks for tasks under jumps and in ghosts.
    pub(crate) looks: Looks,
    /// Notices of throttled hits of probes that have left.
    pub(crate) last_throttled: Vec<Throttled>,
    /// Whether the guest runs another kernel than the one it was booted with.
    pub(crate) replaced: bool,
    /// Data shared by the virtual CPUs.
    pub(crate) shared: Shared,
    pub(crate) live: Option<Live>,
}

/// Data that the virtual CPUs share. Every table that they get refers to it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) returns: Arc<Returns>,
    pub(crate) restored_frames: Arc<RestoredFrames>,
    /// Addresses that held one of our int3s at some time.
    pub(crate) past_int3s: Arc<FxHashSet<u64>>,
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
                past_int3s: Arc::default(),
            },
            live: None,
        }
    }

    /// Limits the registry to `probes` probes, but to no more than [`PROBES_MAX`].
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

    /// Returns the facts that decide which patch each site gets.
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
}
