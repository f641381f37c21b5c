//! The guest's own kprobes, read from its memory.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{JUMP, Span};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

use crate::guest::mutex::Mutex;
use crate::unoptimized::Unoptimized;

/// The function of every kernel that has kprobes.
const REGISTERS: &str = "register_kprobe";
/// Chains of the table (`KPROBE_TABLE_SIZE` in kernel/kprobes.c).
const CHAINS: u64 = 64;
/// The lowest address of the kernel's half.
const KERNEL_HALF: u64 = 1 << 63;
/// The most kprobes that are read.
const MOST: usize = 1 << 16;
/// The flags of one that is registered and not armed by an int3 (include/linux/kprobes.h): gone with its module,
/// disabled, or left to ftrace, which compares what it patches.
const NOT_BY_INT3: u64 = 1 | 2 | 8;
/// The most bytes that an optimized kprobe of the guest's replaces or copies (`MAX_OPTIMIZED_LENGTH`
/// in arch/x86/include/asm/kprobes.h).
const REACH: u64 = 20;

/// Where the guest keeps its kprobes, by its symbols and types. Checked on 5.10, 6.1, 6.12 and 7.2 and, whenever
/// it is used, against the guest: every chain comes to an end, and each kprobe is at an address of the kernel's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    table: Gva,
    mutex: Mutex,
    /// The links of a chain, and the address, in a `struct kprobe`.
    link: u64,
    pub(crate) address: u64,
    /// Where it says whether one is armed, if that is known: the flags in a `struct kprobe`, and the byte that is
    /// not zero while none is.
    arms: Option<(u64, Gva)>,
}

/// The guest's own kprobes.
#[derive(Debug)]
pub(crate) struct GuestKprobes {
    pub(crate) known: Known,
    /// Where the guest is about to register one.
    pub(crate) registering: Option<Gva>,
    /// Where it had registered some when that was last looked at.
    pub(crate) registered: BTreeSet<Gva>,
}

impl GuestKprobes {
    pub(crate) fn of(image: &KernelImage) -> Self {
        Self {
            known: Known::of(image),
            registering: None,
            registered: BTreeSet::new(),
        }
    }

    /// Looks where the guest has registered kprobes, while it runs: by the time that is used it may
    /// be otherwise.
    pub(crate) fn read(&mut self, tables: &PageTables, mem: &dyn PhysMemory) {
        if let Known::Table(layout) = &self.known {
            self.registered = layout.registered(tables, mem).unwrap_or_default();
        }
    }

    /// Whether one keeps a jump away from `span`, as far as can be told without a stop. The guest is
    /// `watched` where it registers them.
    ///
    /// # Errors
    /// When one does.
    pub(crate) fn allow(&self, span: &Span, watched: bool) -> Result<(), Unoptimized> {
        let registering = self.registering.filter(|at| meets(span, *at));
        match (self.known, registering) {
            (Known::Hidden, _) => Err(Unoptimized::HiddenKprobes),
            (Known::Table(_), _) if !watched => Err(Unoptimized::HiddenKprobes),
            (_, Some(at)) => Err(Unoptimized::Kprobe { at }),
            (Known::None | Known::Table(_), None) => Ok(()),
        }
    }
}

/// What is known of the guest's kprobes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known {
    /// Its kernel has none.
    None,
    /// They can be found.
    Table(Layout),
    /// They cannot be found.
    Hidden,
}

/// The guest's kprobes cannot be told at the moment.
pub(crate) struct Unknown;

impl Known {
    pub(crate) fn of(image: &KernelImage) -> Self {
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
        let questions = [("kprobe", "hlist"), ("kprobe", "addr"), ("kprobe", "flags")];
        let members = image.members(&questions).ok()?;
        let offset = |n: usize| Some(members.get(n).copied()??.offset);
        Some(Self {
            table: symbols.address_of("kprobe_table")?,
            mutex: Mutex::of(image, "kprobe_mutex")?,
            link: offset(0)?,
            address: offset(1)?,
            arms: offset(2).zip(symbols.address_of("kprobes_all_disarmed")),
        })
    }

    /// Where kprobes are registered.
    pub(crate) fn registered(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        self.those(|_| true, tables, mem)
    }

    /// Where kprobes are armed by int3s, or about to be or to have been.
    pub(crate) fn armed(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        let (flags, all_disarmed) = self.arms.ok_or(Unknown)?;
        let mut none = [0];
        tables
            .read(mem, all_disarmed, &mut none)
            .map_err(|_| Unknown)?;
        if none != [0] {
            return Ok(BTreeSet::new());
        }
        let is_armed = |kprobe: Gva| {
            let flags = tables.read_u64(mem, kprobe.wrapping_add(flags));
            flags.is_ok_and(|flags| flags & NOT_BY_INT3 == 0)
        };
        self.those(is_armed, tables, mem)
    }

    /// Where those kprobes are registered that are `wanted`.
    fn those(
        &self,
        wanted: impl Fn(Gva) -> bool,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        let word = |at| tables.read_u64(mem, at).map_err(|_| Unknown);
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
                if wanted(kprobe) {
                    found.insert(Gva(address));
                }
                link = word(Gva(link))?;
            }
        }
        Ok(found)
    }

    /// As [`Self::registered`], of a guest that stands still and registers none just now.
    pub(crate) fn settled(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        if self.mutex.is_held(tables, mem) {
            return Err(Unknown);
        }
        self.registered(tables, mem)
    }
}

/// One of the `registered` that would write its jump over an instruction at `at`.
pub(crate) fn one_over(at: Gva, registered: &BTreeSet<Gva>) -> Option<Gva> {
    let reach = at.wrapping_sub(JUMP as u64 - 1)..at;
    registered.range(reach).next_back().copied()
}

/// Whether a kprobe of the guest's at `kprobe` and a jump over `span` would touch the same bytes.
pub(crate) fn meets(span: &Span, kprobe: Gva) -> bool {
    span.at().wrapping_sub(REACH) < kprobe && kprobe < span.end()
}

pub(crate) fn first_that_meets(span: &Span, registered: &BTreeSet<Gva>) -> Option<Gva> {
    let near = registered.range(span.at().wrapping_sub(REACH)..span.end());
    near.copied().find(|kprobe| meets(span, *kprobe))
}
