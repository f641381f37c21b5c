//! Fills the lists of text that must not be probed, from a kernel image.
//!
//! Invariants: the lists are read from the image, because the kernel frees some of them once it has booted. A list
//! that the kernel should have, but that cannot be found or does not have the layout in [`super::tables`], is
//! unknown ([`Lists::unknown`]): text that it might name is treated as if the list named it.

use std::ops::Range;

use hvprobe_arch::Gva;

use super::elf::Elf;
use super::forbidden::{Area, Lists, Unknown, relative, relative_field, trampolines, words};
use super::tables::{self, Found, Places, Table};
use crate::bytes::u32_at;
use crate::symbols::{SymbolKind, Symbols};

/// Names of the functions that at least one kernel from 5.10 to 7.2 has on its kprobe blacklist. Used for kernels
/// whose list cannot be found, or that have no list because they have no kprobes.
const NOKPROBE: &str = include_str!("nokprobe.txt");

/// Reads all lists.
pub(super) fn read(elf: &Elf<'_>, symbols: &Symbols) -> Lists {
    let mut source = Source {
        elf,
        symbols,
        lists: Lists::default(),
    };
    source.read_areas();
    source.read_copied();
    source.read_blacklist();
    source.read_jump_labels();
    source.read_static_calls();
    source.read_bpf_dispatchers();
    source.read_exception_table();
    source.read_ftrace_sites();
    source.read_lock_prefixes();
    source.lists.sort();
    source.lists
}

struct Source<'a> {
    elf: &'a Elf<'a>,
    symbols: &'a Symbols,
    lists: Lists,
}

impl<'a> Source<'a> {
    fn read_areas(&mut self) {
        const AREAS: [(&str, &str, Area); 3] = [
            ("__entry_text_start", "__entry_text_end", Area::Entry),
            ("__noinstr_text_start", "__noinstr_text_end", Area::NoInstr),
            ("__kprobes_text_start", "__kprobes_text_end", Area::Kprobes),
        ];
        for (start, end, area) in AREAS {
            match self.symbols.between(start, end) {
                Some(range) => self.lists.add_area(range, area),
                None => self.lists.add_unknown(Unknown::Area(area)),
            }
        }
        // Later kernels lack the symbols that enclose the thunks (6.12 has neither), but still have the first and
        // the last symbol between them (arch/x86/lib/retpoline.S).
        let area = self
            .symbols
            .between("__indirect_thunk_start", "__indirect_thunk_end")
            .or_else(|| self.through("__x86_indirect_thunk_array", "__x86_return_thunk"));
        if let Some(range) = area {
            self.lists.add_area(range, Area::Thunk);
            return;
        }
        // A kernel with only some of these mitigations has only some of the thunks, or none.
        for symbol in self.symbols.iter() {
            let is_thunk = symbol.name.starts_with("__x86_indirect_")
                || symbol.name.ends_with("_return_thunk");
            if is_thunk && symbol.kind == SymbolKind::Text {
                let end = symbol.addr.0.saturating_add(symbol.size);
                self.lists.add_area(symbol.addr.0..end, Area::Thunk);
            }
        }
    }

    /// Forbids code that the kernel copies. Each range begins at the start of one symbol, and ends at the start or
    /// at the end of another. A kernel without kexec, hibernation or ftrace lacks some of these ranges.
    fn read_copied(&mut self) {
        let symbols = self.symbols;
        let copied = [
            symbols.between("ftrace_caller", "ftrace_caller_end"),
            symbols.between("ftrace_regs_caller", "ftrace_regs_caller_end"),
            self.through("relocate_kernel", "swap_pages"),
            self.through("core_restore_code", "core_restore_code"),
        ];
        for range in copied.into_iter().flatten() {
            self.lists.add_area(range, Area::Copied);
        }
    }

    /// Reads the kernel's own kprobe blacklist. If it cannot be found, uses the names of the functions that other
    /// kernels blacklist. Names suffice: none of these functions runs when a probe is hit, unlike with the kernel's
    /// own kprobes.
    fn read_blacklist(&mut self) {
        if let Found::At(_, table) = self.find(&tables::BLACKLIST) {
            self.lists.add_functions(words(table));
            return;
        }
        let symbols = self.symbols;
        let named = NOKPROBE.lines().flat_map(|name| symbols.candidates(name));
        let text = named.filter(|symbol| symbol.kind == SymbolKind::Text);
        self.lists.add_functions(text.map(|symbol| symbol.addr.0));
    }

    fn read_jump_labels(&mut self) {
        match self.find(&tables::JUMP_LABELS) {
            Found::At(place, table) => {
                for at in relative(table, place, 16) {
                    let code = self.elf.read(at, 2).and_then(|code| code.try_into().ok());
                    self.lists.add_jump_label(at, code);
                }
                self.add_landings(place, table, 16);
            }
            Found::Absent => {}
            Found::Unknown => self.lists.add_unknown(Unknown::JumpLabels),
        }
    }

    /// Forbids static calls and their trampolines, `__SCT__*`. Without the table, each branch to a trampoline
    /// counts as a static call, because the compiler generates all static calls that way.
    fn read_static_calls(&mut self) {
        match self.find(&tables::STATIC_CALLS) {
            Found::At(place, table) => {
                for at in relative(table, place, 8) {
                    self.lists.add_static_call(at);
                }
            }
            Found::Absent | Found::Unknown => self.search_static_calls(),
        }
        self.lists.add_trampolines(self.symbols);
    }

    fn search_static_calls(&mut self) {
        let mut trampolines: Vec<u64> = trampolines(self.symbols).map(|at| at.0).collect();
        trampolines.sort_unstable();
        if trampolines.is_empty() {
            return;
        }
        let code = self.elf.parts().filter(|part| part.exec);
        for part in code {
            for (bytes, at) in part.data.windows(6).zip(part.at.start..) {
                let len = match bytes {
                    [0xe8 | 0xe9, ..] => 5,
                    [0x0f, condition, ..] if condition & 0xf0 == 0x80 => 6,
                    _ => continue,
                };
                let offset = u32_at(bytes, len - 4).unwrap_or(0).cast_signed();
                let end = at.wrapping_add(len as u64);
                let to = end.wrapping_add_signed(i64::from(offset));
                if trampolines.binary_search(&to).is_ok() {
                    self.lists.add_static_call(Gva(at));
                }
            }
        }
    }

    /// Forbids the entries of `bpf_dispatcher_*_func`. Such an entry begins with a nop that becomes a jump, unless
    /// the function ends in a static call `bpf_dispatcher_*_call` (include/linux/bpf.h, `DEFINE_BPF_DISPATCHER`).
    fn read_bpf_dispatchers(&mut self) {
        let symbols = self.symbols;
        for symbol in symbols.iter() {
            let name = symbol.name.strip_prefix("bpf_dispatcher_");
            let Some(name) = name.and_then(|rest| rest.strip_suffix("_func")) else {
                continue;
            };
            let call = format!("__SCT__bpf_dispatcher_{name}_call");
            // `bpf_dispatcher_nop_func` calls programs without a dispatcher, so nothing patches it.
            if name != "nop" && symbols.address_of(&call).is_none() {
                self.lists.add_bpf_dispatcher(symbol.addr);
            }
        }
    }

    fn read_exception_table(&mut self) {
        match self.find(&tables::FIXUPS) {
            Found::At(place, table) => {
                self.lists.add_fixups(relative(table, place, 12));
                self.add_landings(place, table, 12);
            }
            Found::Absent => {}
            Found::Unknown => self.lists.add_unknown(Unknown::Fixups),
        }
    }

    /// Adds the targets of the entries of a table. The target is the second field of each entry.
    fn add_landings(&mut self, place: Gva, table: &[u8], size: usize) {
        self.lists
            .add_landings(relative_field(table, place, size, 4));
    }

    /// Reads the list of calls to `__fentry__`. If there is none, as in a kernel without ftrace, the bytes at an
    /// address decide.
    fn read_ftrace_sites(&mut self) {
        if let Found::At(_, table) = self.find(&tables::FTRACE_SITES) {
            self.lists.add_ftrace_sites(words(table));
        }
    }

    /// Reads the list of lock prefixes. A kernel for one processor has none to patch.
    fn read_lock_prefixes(&mut self) {
        match self.find(&tables::LOCKS) {
            Found::At(place, table) => {
                let entries = table.chunks_exact(4).zip(relative(table, place, 4));
                let used = entries.filter(|(entry, _)| *entry != [0; 4]);
                self.lists.add_locks(used.map(|(_, at)| at));
            }
            Found::Absent => {}
            Found::Unknown => self.lists.add_unknown(Unknown::Locks),
        }
    }

    /// Returns the range from the symbol `start` up to the end of the symbol `last`.
    fn through(&self, start: &str, last: &str) -> Option<Range<u64>> {
        let start = self.symbols.address_of(start)?;
        let last = self.symbols.lookup(last).ok()?;
        let end = last.addr.checked_add(last.size)?;
        (start <= last.addr).then_some(start.0..end.0)
    }

    fn find(&self, table: &Table) -> Found<'a> {
        let places = Places {
            elf: self.elf,
            symbols: self.symbols,
        };
        places.find(table)
    }
}
