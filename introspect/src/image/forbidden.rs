//! Kernel text that must not be probed, from the kernel's own lists.
//!
//! What is kept true: the lists are read from the image, since part of them is gone once the
//! kernel has booted, and an address is forbidden if it lies anywhere in the bytes an entry covers,
//! not only at its first. A list an image does not have (no symbol leads to it) forbids nothing;
//! [`Lists::missing`] tells which.

use std::fmt;
use std::ops::Range;

use hvprobe_arch::Gva;

use super::elf::Elf;
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
    /// In the thunks for indirect jumps and returns.
    #[error("it is a thunk of the speculation mitigations, which the kernel rewrites")]
    Thunk,
    /// In the bytes of a jump label.
    #[error("it is a jump label, which the kernel rewrites as features turn on and off")]
    JumpLabel,
    /// In the bytes of a static call or its trampoline.
    #[error("it is a static call, which the kernel rewrites as its target changes")]
    StaticCall,
    /// At an instruction that may fault by design.
    #[error("the instruction may fault and has an exception table entry, which a copy of it lacks")]
    ExceptionTable,
}

/// What kind of stretch an address was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Area {
    NoInstr,
    Entry,
    Kprobes,
    Thunk,
}

/// What kind of place of a few bytes an address was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Site {
    JumpLabel,
    StaticCall,
    ExceptionTable,
}

/// The longest site: a static call trampoline, `jmp` and the `ud1` that marks it.
const LONGEST_SITE: u64 = 8;

/// All lists of one image.
#[derive(Default)]
pub(super) struct Lists {
    areas: Vec<(Range<u64>, Area)>,
    /// Starts of blacklisted functions, sorted.
    functions: Vec<u64>,
    /// Start, length and kind of each site, sorted.
    sites: Vec<(u64, u64, Site)>,
    missing: Vec<&'static str>,
}

impl fmt::Debug for Lists {
    /// How long each list is.
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
            .field("exceptions", &count(Site::ExceptionTable))
            .field("missing", &self.missing)
            .finish()
    }
}

impl Lists {
    pub(super) fn read(elf: &Elf<'_>, symbols: &Symbols) -> Self {
        let mut lists = Self::default();
        lists.read_areas(symbols);
        lists.read_blacklist(elf, symbols);
        lists.read_jump_labels(elf, symbols);
        lists.read_static_calls(elf, symbols);
        lists.read_exception_table(elf, symbols);
        lists.sites.sort_unstable();
        lists.sites.dedup();
        lists
    }

    /// The lists the image has no symbols for.
    pub(super) fn missing(&self) -> &[&'static str] {
        &self.missing
    }

    pub(super) fn find(&self, at: Gva, symbols: &Symbols) -> Option<Forbidden> {
        if let Some(function) = self.blacklisted(at, symbols) {
            return Some(Forbidden::Blacklisted { function });
        }
        let area = self
            .areas
            .iter()
            .find(|(range, _)| range.contains(&at.0))
            .map(|(_, area)| match area {
                Area::NoInstr => Forbidden::NoInstr,
                Area::Entry => Forbidden::Entry,
                Area::Kprobes => Forbidden::Kprobes,
                Area::Thunk => Forbidden::Thunk,
            });
        area.or_else(|| {
            self.site(at).map(|site| match site {
                Site::JumpLabel => Forbidden::JumpLabel,
                Site::StaticCall => Forbidden::StaticCall,
                Site::ExceptionTable => Forbidden::ExceptionTable,
            })
        })
    }

    /// The blacklisted function `at` belongs to. As in the kernel, `foo.cold` and its like belong
    /// to `foo`.
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

    fn read_areas(&mut self, symbols: &Symbols) {
        const AREAS: [(&str, &str, Area); 4] = [
            ("__entry_text_start", "__entry_text_end", Area::Entry),
            ("__noinstr_text_start", "__noinstr_text_end", Area::NoInstr),
            ("__kprobes_text_start", "__kprobes_text_end", Area::Kprobes),
            (
                "__indirect_thunk_start",
                "__indirect_thunk_end",
                Area::Thunk,
            ),
        ];
        for (start, end, area) in AREAS {
            match between(symbols, start, end) {
                Some(range) => self.areas.push((range, area)),
                None => self.missing.push(start),
            }
        }
    }

    /// `_kprobe_blacklist`: addresses of functions (include/asm-generic/kprobes.h).
    fn read_blacklist(&mut self, elf: &Elf<'_>, symbols: &Symbols) {
        let Some((_, table)) = self.table(
            elf,
            symbols,
            "__start_kprobe_blacklist",
            "__stop_kprobe_blacklist",
        ) else {
            return;
        };
        self.functions = table
            .chunks_exact(8)
            .filter_map(|entry| Some(u64::from_le_bytes(entry.try_into().ok()?)))
            .collect();
        self.functions.sort_unstable();
    }

    /// `__jump_table`: {s32 code, s32 target, s64 key}, relative to each field's own place
    /// (include/linux/jump_label.h).
    fn read_jump_labels(&mut self, elf: &Elf<'_>, symbols: &Symbols) {
        for at in self.relative(
            elf,
            symbols,
            "__start___jump_table",
            "__stop___jump_table",
            16,
        ) {
            // From 5.14 on the compiler picks a two-byte form where the target is near: `jmp rel8`
            // or its nop. All others have five bytes.
            let short = matches!(elf.read(at, 2), Some([0xeb, _] | [0x66, 0x90]));
            self.sites
                .push((at.0, if short { 2 } else { 5 }, Site::JumpLabel));
        }
    }

    /// `.static_call_sites`: {s32 addr, s32 key}, relative likewise (include/linux/static_call_types.h),
    /// and the trampolines `__SCT__*`.
    fn read_static_calls(&mut self, elf: &Elf<'_>, symbols: &Symbols) {
        for at in self.relative(
            elf,
            symbols,
            "__start_static_call_sites",
            "__stop_static_call_sites",
            8,
        ) {
            self.sites.push((at.0, 5, Site::StaticCall));
        }
        self.sites.extend(
            symbols
                .iter()
                .filter(|symbol| {
                    symbol.kind == SymbolKind::Text && symbol.name.starts_with("__SCT__")
                })
                .map(|symbol| (symbol.addr.0, LONGEST_SITE, Site::StaticCall)),
        );
    }

    /// `__ex_table`: {s32 insn, s32 fixup, s32 data}, relative likewise
    /// (arch/x86/include/asm/extable.h).
    fn read_exception_table(&mut self, elf: &Elf<'_>, symbols: &Symbols) {
        for at in self.relative(elf, symbols, "__start___ex_table", "__stop___ex_table", 12) {
            self.sites.push((at.0, 1, Site::ExceptionTable));
        }
    }

    /// The addresses in a table whose entries of `size` bytes begin with one relative to itself.
    fn relative(
        &mut self,
        elf: &Elf<'_>,
        symbols: &Symbols,
        start: &'static str,
        stop: &'static str,
        size: usize,
    ) -> Vec<Gva> {
        let Some((mut place, table)) = self.table(elf, symbols, start, stop) else {
            return Vec::new();
        };
        table
            .chunks_exact(size)
            .filter_map(|entry| {
                let offset = i32::from_le_bytes(entry.get(..4)?.try_into().ok()?);
                let at = place.0.wrapping_add_signed(i64::from(offset));
                place = place.wrapping_add(u64::try_from(size).ok()?);
                Some(Gva(at))
            })
            .collect()
    }

    /// Address and bytes of the table between two symbols.
    fn table<'a>(
        &mut self,
        elf: &Elf<'a>,
        symbols: &Symbols,
        start: &'static str,
        stop: &str,
    ) -> Option<(Gva, &'a [u8])> {
        let found = between(symbols, start, stop).and_then(|range| {
            let len = usize::try_from(range.end - range.start).ok()?;
            Some((Gva(range.start), elf.read(Gva(range.start), len)?))
        });
        if found.is_none() {
            self.missing.push(start);
        }
        found
    }
}

/// The addresses from one symbol up to another.
pub(super) fn between(symbols: &Symbols, start: &str, end: &str) -> Option<Range<u64>> {
    let (start, end) = (symbols.address_of(start)?.0, symbols.address_of(end)?.0);
    (start <= end).then_some(start..end)
}
