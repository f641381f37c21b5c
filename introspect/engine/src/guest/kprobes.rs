//! The guest's own kprobes, read from its memory.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{JUMP, Span};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

use crate::guest::mutex::Mutex;
use crate::unoptimized::Unoptimized;

/// Function that every kernel with kprobes has.
const REGISTERS: &str = "register_kprobe";
/// Function that copies the instruction at which a kprobe is registered. Its argument is the kprobe;
/// `kprobe_mutex` is held.
pub(crate) const PREPARES: &str = "arch_prepare_kprobe";
/// Number of chains of the table (`KPROBE_TABLE_SIZE` in kernel/kprobes.c).
const CHAINS: u64 = 64;
/// The lowest address of the kernel's half.
const KERNEL_HALF: u64 = 1 << 63;
/// Maximum number of kprobes to read.
const MOST: usize = 1 << 16;
/// Flags of a kprobe that is registered but not armed with an int3 (include/linux/kprobes.h): gone with its
/// module, disabled, or handled by ftrace, which checks the text before it patches.
const NOT_BY_INT3: u64 = 1 | 2 | 8;
/// Maximum number of bytes that an optimized kprobe of the guest replaces or copies (`MAX_OPTIMIZED_LENGTH` in
/// arch/x86/include/asm/kprobes.h).
const REACH: u64 = 20;

/// Location of the guest's kprobes, from its symbols and types. Checked on 5.10, 6.1, 6.12 and 7.2. Each use checks
/// it against the guest: every chain must end, and each kprobe must be at an address of the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    table: Gva,
    mutex: Mutex,
    /// Offsets in `struct kprobe`: the link of the chain, and the address.
    link: u64,
    pub(crate) address: u64,
    /// Where the kernel stores whether a kprobe is armed, if that is known: the offset of the flags in the kprobe,
    /// and the byte that is nonzero while all kprobes are disarmed.
    arms: Option<(u64, Gva)>,
}

/// The guest's own kprobes.
#[derive(Debug)]
pub(crate) struct GuestKprobes {
    pub(crate) known: Known,
    /// Address at which the guest is about to register a kprobe.
    pub(crate) registering: Option<Gva>,
    /// Addresses of the registered kprobes when they were last read.
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

    /// Reads the addresses of the guest's kprobes while the guest runs; they may have changed by the time they
    /// are used.
    pub(crate) fn read(&mut self, tables: &PageTables, mem: &dyn PhysMemory) {
        if let Known::Table(layout) = &self.known {
            self.registered = layout.registered(tables, mem).unwrap_or_default();
        }
    }

    /// Checks whether one of the guest's kprobes prevents a jump over `span`, as far as is known without a
    /// stop. `watched` says whether the engine watches the guest's registrations.
    ///
    /// # Errors
    /// When a kprobe prevents the jump, or when kprobes are not known well enough to exclude that.
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

/// What is known about the guest's kprobes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known {
    /// The guest's kernel has no kprobes.
    None,
    /// The kprobes can be found.
    Table(Layout),
    /// The kprobes cannot be found.
    Hidden,
}

/// Error: the guest's kprobes cannot be read at the moment.
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

    /// Returns the addresses of all registered kprobes.
    pub(crate) fn registered(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Result<BTreeSet<Gva>, Unknown> {
        self.those(|_| true, tables, mem)
    }

    /// Returns the addresses of the kprobes that are armed with int3s, are about to be, or were until just now.
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

    /// Returns the addresses of the registered kprobes for which `wanted` returns true.
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

    /// As [`Self::registered`], for a stopped guest. Fails while the guest registers a kprobe.
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

/// Returns one of the `registered` kprobes whose jump would cover an instruction at `at`.
pub(crate) fn one_over(at: Gva, registered: &BTreeSet<Gva>) -> Option<Gva> {
    let reach = at.wrapping_sub(JUMP as u64 - 1)..at;
    registered.range(reach).next_back().copied()
}

/// Returns whether a kprobe of the guest at `kprobe` and a jump over `span` would touch the same bytes.
pub(crate) fn meets(span: &Span, kprobe: Gva) -> bool {
    span.at().wrapping_sub(REACH) < kprobe && kprobe < span.end()
}

pub(crate) fn first_that_meets(span: &Span, registered: &BTreeSet<Gva>) -> Option<Gva> {
    let near = registered.range(span.at().wrapping_sub(REACH)..span.end());
    near.copied().find(|kprobe| meets(span, *kprobe))
}
