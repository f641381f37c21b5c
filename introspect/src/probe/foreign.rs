//! The guest's own kprobes, and our jumps.
//!
//! A kprobe of the guest's keeps a copy of the instruction it was registered at. When it is armed
//! and disarmed, at any time, it writes the first byte of that copy, and a hit goes on behind the
//! copied instruction, in its place; an optimized one writes a jump over [`REACH`] bytes at most.
//! None of that looks again at what is there by then (kernel/kprobes.c,
//! arch/x86/kernel/kprobes/opt.c). An int3 of ours survives that, or is found to be gone; under a
//! jump, or what a jump has left behind, the guest would run into the middle of something.
//!
//! Invariant: no jump of ours lies where a kprobe of the guest is registered, armed or not, nor does
//! the guest register one while a jump is there. So its table of kprobes is read in the stop in
//! which a jump is to be written, and not while its mutex is held: then one may be on its way into
//! the table. And the guest is held where it is about to copy an instruction, until no jump is there
//! any more; if one cannot be taken away, the function that copies fails without having begun, and
//! with it the guest's registration.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::{Decision, ProbeId, Then};
use tracing::{info, warn};

use super::commit::CommitError;
use super::jump::{Jump, Unoptimized};
use super::plan::Obstacle;
use super::registry::Registry;
use super::site::SiteState;
use crate::world::World;

/// The function that copies the instruction a kprobe is registered at, with the kprobe as its
/// argument, while `kprobe_mutex` is held.
pub(super) const PREPARES: &str = "arch_prepare_kprobe";

/// What it returns when it must not (include/uapi/asm-generic/errno-base.h).
const EBUSY: u64 = 16;

/// The function of every kernel that has kprobes.
const REGISTERS: &str = "register_kprobe";
/// Chains of the table (`KPROBE_TABLE_SIZE` in kernel/kprobes.c).
const CHAINS: u64 = 64;
/// The lowest address of the kernel's half.
const KERNEL_HALF: u64 = 1 << 63;
/// The most kprobes that are read.
const MOST: usize = 1 << 16;
/// The most bytes that an optimized kprobe of the guest's replaces or copies (`MAX_OPTIMIZED_LENGTH`
/// in arch/x86/include/asm/kprobes.h).
const REACH: u64 = 20;

/// Where the guest keeps its kprobes, by its symbols and types. Checked on 5.10, 6.1, 6.12 and 7.2 and, whenever
/// it is used, against the guest: every chain comes to an end, and each kprobe is at an address of the kernel's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    table: Gva,
    /// The word that is not zero while somebody holds the mutex of the table.
    held: Gva,
    /// The links of a chain, and the address, in a `struct kprobe`.
    link: u64,
    address: u64,
}

/// What is known of the guest's kprobes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Foreign {
    /// Its kernel has none.
    None,
    /// They can be found.
    Table(Layout),
    /// They cannot be found.
    Hidden,
}

/// The guest's kprobes cannot be told at the moment.
struct Unknown;

impl Foreign {
    pub(super) fn of(image: &KernelImage) -> Self {
        if image.symbols().address_of(REGISTERS).is_none() {
            return Self::None;
        }
        match Layout::of(image) {
            Some(layout) => Self::Table(layout),
            None => Self::Hidden,
        }
    }
}

impl Layout {
    fn of(image: &KernelImage) -> Option<Self> {
        let symbols = image.symbols();
        let questions = [
            ("kprobe", "hlist"),
            ("kprobe", "addr"),
            ("mutex", "owner"),
            // With PREEMPT_RT.
            ("mutex", "rtmutex.owner"),
        ];
        let members = image.members(&questions).ok()?;
        let offset = |n: usize| Some(members.get(n).copied()??.offset);
        Some(Self {
            table: symbols.address_of("kprobe_table")?,
            held: symbols
                .address_of("kprobe_mutex")?
                .wrapping_add(offset(2).or_else(|| offset(3))?),
            link: offset(0)?,
            address: offset(1)?,
        })
    }

    /// Where kprobes are registered.
    fn registered(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        let word = |at: Gva| {
            let mut word = [0; 8];
            let read = tables.read(mem, at, &mut word);
            read.map_err(|_| Unknown)?;
            Ok(u64::from_le_bytes(word))
        };
        let (mut found, mut followed) = (BTreeSet::new(), 0);
        for chain in 0..CHAINS {
            let mut link = word(self.table.wrapping_add(8 * chain))?;
            while link != 0 {
                followed += 1;
                if followed > MOST {
                    return Err(Unknown);
                }
                let kprobe = Gva(link).wrapping_sub(self.link);
                let address = word(kprobe.wrapping_add(self.address))?;
                if address < KERNEL_HALF {
                    return Err(Unknown);
                }
                found.insert(Gva(address));
                link = word(Gva(link))?;
            }
        }
        Ok(found)
    }

    /// As [`Self::registered`], of a guest that stands still and registers none just now.
    fn settled(&self, tables: &PageTables, mem: &dyn PhysMemory) -> Result<BTreeSet<Gva>, Unknown> {
        let mut owner = [0; 8];
        match tables.read(mem, self.held, &mut owner) {
            Ok(()) if owner == [0; 8] => self.registered(tables, mem),
            _ => Err(Unknown),
        }
    }
}

/// Whether a kprobe of the guest's at `kprobe` and a jump over `span` would touch the same bytes.
fn meets(span: &Span, kprobe: Gva) -> bool {
    span.at().wrapping_sub(REACH) < kprobe && kprobe < span.end()
}

fn first_that_meets(span: &Span, registered: &BTreeSet<Gva>) -> Option<Gva> {
    let near = registered.range(span.at().wrapping_sub(REACH)..span.end());
    near.copied().find(|kprobe| meets(span, *kprobe))
}

impl Registry {
    /// Whether the guest has to be watched at [`PREPARES`] once `leaving` have left.
    pub(super) fn has_to_know_kprobes(&self, leaving: &BTreeSet<ProbeId>) -> bool {
        let jumps = self
            .sites
            .values()
            .any(|site| site.span.is_ok() && site.members.iter().any(|id| !leaving.contains(id)));
        let possible = self.optimize && self.hidden.detours.is_some();
        possible && jumps && matches!(self.foreign, Foreign::Table(_))
    }

    /// Whether a kprobe of the guest's keeps a jump away from `span`, as far as can be told without
    /// a stop.
    ///
    /// # Errors
    /// When it does.
    pub(super) fn is_left_alone(&self, span: &Span) -> Result<(), Unoptimized> {
        let registers = self.guest_registers.filter(|at| meets(span, *at));
        match (self.foreign, registers) {
            (Foreign::Hidden, _) => Err(Unoptimized::HiddenKprobes),
            (Foreign::Table(_), _) if self.unwatched.contains(PREPARES) => {
                Err(Unoptimized::HiddenKprobes)
            }
            (_, Some(at)) => Err(Unoptimized::Kprobe { at }),
            (Foreign::None | Foreign::Table(_), None) => Ok(()),
        }
    }

    /// Looks where the guest has registered kprobes, while it runs: by the time that is used it may
    /// be otherwise.
    pub(super) fn read_kprobes(&mut self, mem: &dyn PhysMemory) {
        let (Foreign::Table(layout), Some(live)) = (&self.foreign, &self.live) else {
            return;
        };
        let registered = layout.registered(&live.view.tables, mem);
        self.kprobes = registered.unwrap_or_default();
    }

    /// Takes those of the prepared `jumps` back that the guest's kprobes are in the way of. The
    /// virtual CPUs must stand still.
    pub(super) fn leave_to_kprobes(
        &mut self,
        jumps: &mut BTreeMap<Gva, Jump>,
        mem: &dyn PhysMemory,
    ) {
        let (Foreign::Table(layout), Some(live)) = (&self.foreign, &self.live) else {
            return;
        };
        if jumps.is_empty() {
            return;
        }
        let registered = layout.settled(&live.view.tables, mem);
        let mut unused = Vec::new();
        jumps.retain(|at, jump| {
            let site = self.sites.get_mut(at);
            let why = match (&registered, site.as_deref()) {
                // A jump in the place of another: the guest has none there.
                (Err(Unknown), Some(site)) if site.jump().is_some() => None,
                (Err(Unknown), _) => Some(Unoptimized::KprobesChange),
                (Ok(registered), site) => site
                    .and_then(|site| first_that_meets(site.span.as_ref().ok()?, registered))
                    .map(|at| Unoptimized::Kprobe { at }),
            };
            if why.is_none() {
                return true;
            }
            if let Some(site) = site {
                site.unprepared = why;
            }
            unused.push((*at, jump.clone()));
            false
        });
        self.give_jumps_back(unused);
    }

    /// The guest is about to register `kprobe`: takes our jumps away from there. Returns how
    /// [`PREPARES`] goes on: it fails when a jump may still be there.
    pub fn guest_registers(&mut self, kprobe: Gva, world: &dyn World) -> Decision {
        let then = match self.make_way(kprobe, world) {
            Ok(()) => Then::Proceed,
            Err(why) => {
                warn!(%kprobe, why, "the guest must not register a kprobe");
                Then::Return(EBUSY.wrapping_neg())
            }
        };
        let changes = Vec::new();
        Decision { changes, then }
    }

    fn make_way(&mut self, kprobe: Gva, world: &dyn World) -> Result<(), String> {
        let (Foreign::Table(layout), Some(live)) = (&self.foreign, &self.live) else {
            return Ok(());
        };
        let field = kprobe.wrapping_add(layout.address);
        let address = live.view.tables.read_u64(world.memory(), field);
        let at =
            Gva(address.map_err(|error| format!("where it is to be cannot be read: {error}"))?);
        let here = |site: &SiteState| {
            let span = site.span.as_ref();
            site.jump().is_some() && span.is_ok_and(|span| meets(span, at))
        };
        let sites = self.sites.iter().filter(|(_, site)| here(site));
        let sites: Vec<Gva> = sites.map(|(at, _)| *at).collect();
        if sites.is_empty() {
            return Ok(());
        }
        info!(%at, "the guest registers a kprobe where a jump of ours is");
        self.guest_registers = Some(at);
        let changed = self.commit(&BTreeSet::new(), world);
        // The guest holds the mutex from here on until its kprobe is in the table.
        self.guest_registers = None;
        changed.map_err(|error| match error {
            CommitError::Stop(error) => format!("a jump at {at} stays: {error}"),
            CommitError::Site(Obstacle { at, why }) => {
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
