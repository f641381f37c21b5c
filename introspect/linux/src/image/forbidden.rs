//! Kernel text that must not be probed: the reasons, and the lists that give them.
//!
//! Invariant: an address is forbidden if it lies anywhere in the bytes that an entry covers, not only at the
//! first one. The kernel image and each of its modules use the same lists; the code that fills them calls
//! [`Lists::sort`] last.
//!
//! # What the kernel writes to its text after boot
//!
//! All such writes go through `text_poke` (arch/x86/kernel/alternative.c), and the kernel compares the old bytes
//! with those that it expects. A breakpoint of ours there makes the kernel fail, or is overwritten. The callers, as
//! of 6.1 with later additions:
//!
//! | what | caller | here |
//! |---|---|---|
//! | jump labels | kernel/jump_label.c of arch/x86 | [`Forbidden::JumpLabel`] |
//! | static calls and their trampolines | static_call.c | [`Forbidden::StaticCall`] |
//! | function entries | ftrace.c | `is_ftrace_site` |
//! | calls in `ftrace_caller` and `ftrace_regs_caller` | ftrace.c, `update_ftrace_func` | [`Forbidden::Copied`] |
//! | lock prefixes | alternative.c, `alternatives_enable_smp` | [`Forbidden::LockPrefix`] |
//! | BPF dispatchers | net/bpf_jit_comp.c, `bpf_arch_text_poke` | [`Forbidden::BpfDispatcher`] |
//! | the guest's kprobes and kgdb | kprobes/core.c, kprobes/opt.c, kgdb.c | anywhere; current bytes show it |
//! | relocations of live patches | module.c, kernel/livepatch | in a module's text, before it runs |
//!
//! * Jump labels are read from `__jump_table`, static calls from `.static_call_sites` and the names `__SCT__*`.
//! * BPF trampolines (`register_fentry`) patch function entries too, through ftrace. A probe may be at an entry
//!   while ftrace does not use it, which only the entry's current bytes show.
//! * ftrace.c also copies `ftrace_caller` and `ftrace_regs_caller` to make trampolines.
//! * Lock prefixes are read from `.smp_locks`. The kernel patches them only if it booted with one processor, and
//!   only back to `lock`.
//! * BPF dispatchers are found by name: the entry of `bpf_dispatcher_*_func`, unless the kernel uses a static call
//!   instead.
//!
//! The kernel also patches alternatives, paravirt calls, retpolines, return thunks, call depth tracking, `ENDBR`
//! sealing and FineIBT (`alternative.c`, `callthunks.c`), and the nops of mcount. It does so only at boot, and in a
//! module only before the module's init function runs. Probes that are planned after that find the text final.
//!
//! Beyond what the kernel's own kprobes refuse, text that the kernel copies and runs elsewhere is forbidden
//! ([`Forbidden::Copied`]): nothing would handle a breakpoint in the copy. This is the text of the two ftrace
//! entries above, of `relocate_kernel` (machine_kexec_64.c) and of `core_restore_code` (power/hibernate_64.c).

use std::fmt;
use std::ops::Range;

use hvprobe_arch::Gva;

use crate::symbols::{SymbolKind, Symbols};

/// Why an address may not be probed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// In a function marked `NOKPROBE_SYMBOL`, or in a part the compiler split off it.
    #[error("`{function}` is on the kernel's own kprobe blacklist (NOKPROBE_SYMBOL)")]
    Blacklisted {
        /// The function.
        function: String,
    },
    /// In `.noinstr.text`.
    #[error("it is noinstr code, which runs where an exception cannot be taken")]
    NoInstr,
    /// In `.entry.text`.
    #[error("it is entry code, which runs before the kernel's own state is set up")]
    Entry,
    /// In `.kprobes.text`.
    #[error("it is marked __kprobes: taking the exception of a probe runs it")]
    Kprobes,
    /// In the preamble of a function, which indirect callers of the function use.
    #[error("it is the preamble of a function, whose bytes its indirect callers check")]
    Preamble,
    /// In a thunk for indirect jumps or returns.
    #[error("it is a thunk of the speculation mitigations, which the kernel rewrites")]
    Thunk,
    /// In code that the kernel copies and runs elsewhere.
    #[error("the kernel copies this code and runs it elsewhere, where a breakpoint is nobody's")]
    Copied,
    /// In the bytes of a jump label.
    #[error("it is a jump label, which the kernel rewrites as features turn on and off")]
    JumpLabel,
    /// In the bytes of a static call or its trampoline.
    #[error("it is a static call, which the kernel rewrites as its target changes")]
    StaticCall,
    /// In the entry of a dispatcher to BPF programs.
    #[error(
        "it is the entry of a BPF dispatcher, which the kernel rewrites as programs come and go"
    )]
    BpfDispatcher,
    /// At a lock prefix that the kernel removed because it booted with one processor.
    #[error(
        "its lock prefix was taken away on the only processor and comes back when a second comes up"
    )]
    LockPrefix,
    /// In a module that is not fully loaded yet.
    #[error("the kernel is still loading the module")]
    Loading,
    /// Possibly on a list that the kernel should have but that cannot be found.
    #[error("the kernel's {0} cannot be found, so it is not known whether it may be probed")]
    Unknown(Unknown),
    /// In a module with a list that could forbid the address, but cannot be read.
    #[error("the module's {list} cannot be read, so it is not known whether it may be probed")]
    Unreadable {
        /// The unreadable list.
        list: &'static str,
    },
}

/// The kind of an area of forbidden text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Area {
    /// `.noinstr.text`.
    NoInstr,
    /// `.entry.text`.
    Entry,
    /// `.kprobes.text`.
    Kprobes,
    /// Thunks for indirect jumps and returns.
    Thunk,
    /// Code that the kernel copies and runs elsewhere.
    Copied,
}

/// A list that the kernel should have, but that cannot be found or is not as expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The bounds of an area: any address may be in it.
    Area(Area),
    /// Jump labels: any nop or jump in one of their forms may be a jump label, and may lead anywhere.
    JumpLabels,
    /// The exception table: any instruction may have an entry, and an entry may lead anywhere.
    Fixups,
    /// Lock prefixes: any DS prefix may be one that replaces a removed lock prefix.
    Locks,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Area(Area::NoInstr) => "noinstr code",
            Self::Area(Area::Entry) => "entry code",
            Self::Area(Area::Kprobes) => "__kprobes code",
            Self::Area(Area::Thunk) => "thunks",
            Self::Area(Area::Copied) => "copied code",
            Self::JumpLabels => "list of jump labels",
            Self::Fixups => "exception table",
            Self::Locks => "list of lock prefixes",
        })
    }
}

/// The kind of a forbidden site of a few bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Site {
    JumpLabel,
    StaticCall,
    BpfDispatcher,
}

impl From<Area> for Forbidden {
    fn from(area: Area) -> Self {
        match area {
            Area::NoInstr => Self::NoInstr,
            Area::Entry => Self::Entry,
            Area::Kprobes => Self::Kprobes,
            Area::Thunk => Self::Thunk,
            Area::Copied => Self::Copied,
        }
    }
}

impl From<Site> for Forbidden {
    fn from(site: Site) -> Self {
        match site {
            Site::JumpLabel => Self::JumpLabel,
            Site::StaticCall => Self::StaticCall,
            Site::BpfDispatcher => Self::BpfDispatcher,
        }
    }
}

/// Length in bytes of a BPF dispatcher's entry: `endbr64` and a nop.
const DISPATCHER: u64 = 9;
/// Length in bytes of the longest site.
const LONGEST_SITE: u64 = DISPATCHER;
/// Length in bytes of a static call trampoline: `jmp` and the `ud1` that marks it.
const TRAMPOLINE: u64 = 8;
/// The prefix that replaces `lock` on one processor (DS, which has no effect there).
const UNLOCKED: u8 = 0x3e;

/// Prefix of the names of preambles. With kCFI, a preamble has an instruction whose operand is the hash of the
/// function's type, and callers compare that hash with theirs. With FineIBT, callers jump to the preamble
/// (arch/x86/kernel/alternative.c, `__apply_fineibt`).
const PREAMBLE: &str = "__cfi_";

/// All lists of an image or a module.
#[derive(Default)]
pub(crate) struct Lists {
    areas: Vec<(Range<u64>, Area)>,
    /// Starts of blacklisted functions, sorted.
    functions: Vec<u64>,
    /// Start, length and kind of each site, sorted.
    sites: Vec<(u64, u64, Site)>,
    /// Instructions that have an entry in the exception table, sorted.
    fixups: Vec<u64>,
    /// Addresses to which jump labels and handled exceptions lead, sorted.
    landings: Vec<u64>,
    /// Calls to `__fentry__`, sorted; `None` if there is no list of them.
    ftrace: Option<Vec<u64>>,
    /// Lock prefixes, sorted.
    locks: Vec<u64>,
    unknown: Vec<Unknown>,
}

impl fmt::Debug for Lists {
    /// Writes the length of each list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |wanted| {
            self.sites
                .iter()
                .filter(|(.., site)| *site == wanted)
                .count()
        };
        f.debug_struct("Lists")
            .field("areas", &self.areas.len())
            .field("functions", &self.functions.len())
            .field("jump_labels", &count(Site::JumpLabel))
            .field("static_calls", &count(Site::StaticCall))
            .field("bpf_dispatchers", &count(Site::BpfDispatcher))
            .field("fixups", &self.fixups.len())
            .field("ftrace", &self.ftrace.as_ref().map(Vec::len))
            .field("locks", &self.locks.len())
            .field("unknown", &self.unknown)
            .finish()
    }
}

impl Lists {
    /// Forbids an area of text.
    pub(crate) fn add_area(&mut self, range: Range<u64>, area: Area) {
        self.areas.push((range, area));
    }

    /// Forbids the functions that begin at these addresses.
    pub(crate) fn add_functions(&mut self, starts: impl Iterator<Item = u64>) {
        self.functions.extend(starts);
    }

    fn add_site(&mut self, at: Gva, len: u64, site: Site) {
        self.sites.push((at.0, len, site));
    }

    /// Forbids the jump label at `at`, whose code begins with `code`. From 5.14 on, the compiler chooses a form of
    /// two bytes if the target is near: `jmp rel8`, or the nop in its place. All other jump labels have five bytes.
    pub(crate) fn add_jump_label(&mut self, at: Gva, code: Option<[u8; 2]>) {
        let short = matches!(code, Some([0xeb, _] | [0x66, 0x90]));
        self.add_site(at, if short { 2 } else { 5 }, Site::JumpLabel);
    }

    /// Forbids the entry of the BPF dispatcher at `at`.
    pub(super) fn add_bpf_dispatcher(&mut self, at: Gva) {
        self.add_site(at, DISPATCHER, Site::BpfDispatcher);
    }

    /// Forbids the inline static call at `at`.
    pub(crate) fn add_static_call(&mut self, at: Gva) {
        self.add_site(at, 5, Site::StaticCall);
    }

    /// Forbids the trampolines of static calls, which are recognised by name.
    pub(crate) fn add_trampolines(&mut self, symbols: &Symbols) {
        for at in trampolines(symbols) {
            self.add_site(at, TRAMPOLINE, Site::StaticCall);
        }
    }

    /// Adds instructions that have an exception-table entry.
    pub(crate) fn add_fixups(&mut self, at: impl Iterator<Item = Gva>) {
        self.fixups.extend(at.map(|at| at.0));
    }

    /// Adds addresses to which jump labels and handled exceptions lead.
    pub(super) fn add_landings(&mut self, at: impl Iterator<Item = Gva>) {
        self.landings.extend(at.map(|at| at.0));
    }

    /// Adds calls to `__fentry__`. Afterwards, the list of such calls exists, even if it is empty.
    pub(crate) fn add_ftrace_sites(&mut self, at: impl Iterator<Item = u64>) {
        self.ftrace.get_or_insert_default().extend(at);
    }

    /// Adds lock prefixes that the kernel may patch.
    pub(crate) fn add_locks(&mut self, at: impl Iterator<Item = Gva>) {
        self.locks.extend(at.map(|at| at.0));
    }

    /// Records that a list is unknown.
    pub(super) fn add_unknown(&mut self, list: Unknown) {
        self.unknown.push(list);
    }

    /// Returns the number of lock prefixes.
    #[cfg(test)]
    pub(super) fn locks(&self) -> usize {
        self.locks.len()
    }

    /// Sorts the lists for look-ups.
    pub(crate) fn sort(&mut self) {
        self.sites.sort_unstable();
        self.sites.dedup();
        for list in [
            &mut self.functions,
            &mut self.fixups,
            &mut self.landings,
            &mut self.locks,
        ] {
            list.sort_unstable();
        }
        if let Some(ftrace) = &mut self.ftrace {
            ftrace.sort_unstable();
        }
    }

    /// Returns the lists that are unknown.
    pub(super) fn unknown(&self) -> &[Unknown] {
        &self.unknown
    }

    /// Returns the reason not to probe the instruction at `at`, which begins with `code`, if an unknown list might
    /// name it.
    pub(super) fn doubt(&self, at: Gva, code: &[u8]) -> Option<Forbidden> {
        let may_be_label = || {
            let is_form = matches!(
                code,
                [0xe9 | 0xeb, ..] | [0x66, 0x90, ..] | [0x0f, 0x1f, ..] | [0x3e, 0x8d, ..]
            );
            is_form && self.is_ftrace_site(at) != Some(true)
        };
        let names = |list: &&Unknown| match list {
            Unknown::Area(_) => true,
            Unknown::JumpLabels => may_be_label(),
            Unknown::Fixups | Unknown::Locks => false,
        };
        let list = self.unknown.iter().find(names)?;
        Some(Forbidden::Unknown(*list))
    }

    fn is_unknown(&self, list: Unknown) -> bool {
        self.unknown.contains(&list)
    }

    /// Returns why the known lists forbid a probe at `at`; `None` if none of them does.
    pub(crate) fn find(&self, at: Gva, symbols: &Symbols) -> Option<Forbidden> {
        let symbol = symbols.containing(at).map(|(symbol, _)| symbol.name);
        if symbol.is_some_and(|name| name.starts_with(PREAMBLE)) {
            return Some(Forbidden::Preamble);
        }
        if let Some(function) = self.blacklisted(at, symbols) {
            return Some(Forbidden::Blacklisted { function });
        }
        let area = self
            .areas
            .iter()
            .find(|(range, _)| range.contains(&at.0))
            .map(|(_, area)| (*area).into());
        area.or_else(|| self.site(at).map(Into::into))
    }

    /// Returns whether the instruction at `at` has, or may have, an entry in the exception table.
    pub(crate) fn has_fixup(&self, at: Gva) -> bool {
        self.is_unknown(Unknown::Fixups) || self.fixups.binary_search(&at.0).is_ok()
    }

    /// Returns whether a jump label or a handled exception leads, or may lead, into `range`.
    pub(super) fn has_landing(&self, range: &Range<u64>) -> bool {
        if self.is_unknown(Unknown::JumpLabels) || self.is_unknown(Unknown::Fixups) {
            return true;
        }
        let first = self.landings.partition_point(|at| *at < range.start);
        self.landings
            .get(first)
            .is_some_and(|at| range.contains(at))
    }

    /// Returns whether there is a call to `__fentry__` at `at`; `None` if there is no list of such calls.
    pub(crate) fn is_ftrace_site(&self, at: Gva) -> Option<bool> {
        let sites = self.ftrace.as_ref()?;
        Some(sites.binary_search(&at.0).is_ok())
    }

    /// Returns why `at` must not be probed if the kernel removed a lock prefix there, which it may restore. `first`
    /// is the current byte at `at`. If it is not the byte that replaces a lock prefix, none was removed there.
    pub(crate) fn lock_prefix(&self, at: Gva, first: u8) -> Option<Forbidden> {
        if first != UNLOCKED {
            return None;
        }
        if self.is_unknown(Unknown::Locks) {
            return Some(Forbidden::Unknown(Unknown::Locks));
        }
        let is_lock = self.locks.binary_search(&at.0).is_ok();
        is_lock.then_some(Forbidden::LockPrefix)
    }

    /// Returns the name of the blacklisted function that contains `at`. As in the kernel, `foo.cold` and the like
    /// belong to `foo`.
    fn blacklisted(&self, at: Gva, symbols: &Symbols) -> Option<String> {
        let (symbol, _) = symbols.containing(at)?;
        if self.functions.binary_search(&symbol.addr.0).is_ok() {
            return Some(symbol.name.to_owned());
        }
        let (whole, _) = symbol.name.split_once('.')?;
        let start = symbols.address_of(whole)?;
        self.functions
            .binary_search(&start.0)
            .is_ok()
            .then(|| symbol.name.to_owned())
    }

    fn site(&self, at: Gva) -> Option<Site> {
        let after = self.sites.partition_point(|(start, ..)| *start <= at.0);
        self.sites[..after]
            .iter()
            .rev()
            .take_while(|(start, ..)| at.0 - start < LONGEST_SITE)
            .find(|(start, len, _)| at.0 - start < *len)
            .map(|(_, _, site)| *site)
    }
}

/// Returns the addresses of the trampolines of static calls.
pub(super) fn trampolines(symbols: &Symbols) -> impl Iterator<Item = Gva> {
    let named = symbols
        .iter()
        .filter(|symbol| symbol.kind == SymbolKind::Text && symbol.name.starts_with("__SCT__"));
    named.map(|symbol| symbol.addr)
}

/// Returns the addresses in the table `table`, which is at `place`. Each entry has `size` bytes, and begins with an
/// i32 relative to the entry.
pub(crate) fn relative(
    table: &[u8],
    place: Gva,
    size: usize,
) -> impl Iterator<Item = Gva> + use<'_> {
    relative_field(table, place, size, 0)
}

/// Like [`relative`], but for the i32 that is `field` bytes into each entry and relative to its own address.
pub(super) fn relative_field(
    table: &[u8],
    place: Gva,
    size: usize,
    field: usize,
) -> impl Iterator<Item = Gva> + use<'_> {
    let wide = |len: usize| u64::try_from(len).unwrap_or(u64::MAX);
    let first = place.wrapping_add(wide(field));
    let places = std::iter::successors(Some(first), move |at| Some(at.wrapping_add(wide(size))));
    table
        .chunks_exact(size)
        .zip(places)
        .filter_map(move |(entry, place)| {
            let offset = i32::from_le_bytes(entry.get(field..field + 4)?.try_into().ok()?);
            Some(Gva(place.0.wrapping_add_signed(i64::from(offset))))
        })
}

/// Returns the 64-bit words of a table of addresses.
pub(crate) fn words(table: &[u8]) -> impl Iterator<Item = u64> + use<'_> {
    table
        .chunks_exact(8)
        .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)))
}
