//! Fills the lists of what must not be probed from a kernel image.
//!
//! What is kept true: the lists are read from the image, since part of them is gone once the
//! kernel has booted. A list an image does not have (no symbol leads to it) forbids nothing;
//! [`Lists::missing`] tells which.

use std::ops::Range;

use hvprobe_arch::Gva;

use super::elf::Elf;
use super::forbidden::{Area, Lists, relative, relative_field, words};
use crate::symbols::Symbols;

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
            match between(self.symbols, start, end) {
                Some(range) => self.lists.add_area(range, area),
                None => self.lists.add_missing(start),
            }
        }
        // The symbols at its ends are gone in later kernels (6.12 has none), but what was first and
        // last between them still is (arch/x86/lib/retpoline.S).
        const START: &str = "__indirect_thunk_start";
        match between(self.symbols, START, "__indirect_thunk_end")
            .or_else(|| self.through("__x86_indirect_thunk_array", "__x86_return_thunk"))
        {
            Some(range) => self.lists.add_area(range, Area::Thunk),
            None => self.lists.add_missing(START),
        }
    }

    /// Code that is copied: from the first symbol to the second, or to the second's end. A kernel
    /// without kexec, hibernation or ftrace lacks it.
    fn read_copied(&mut self) {
        let symbols = self.symbols;
        for (start, end) in [
            ("ftrace_caller", "ftrace_caller_end"),
            ("ftrace_regs_caller", "ftrace_regs_caller_end"),
        ] {
            if let Some(range) = between(symbols, start, end) {
                self.lists.add_area(range, Area::Copied);
            }
        }
        for (start, last) in [
            ("relocate_kernel", "swap_pages"),
            ("core_restore_code", "core_restore_code"),
        ] {
            if let Some(range) = self.through(start, last) {
                self.lists.add_area(range, Area::Copied);
            }
        }
    }

    /// `_kprobe_blacklist`: addresses of functions (include/asm-generic/kprobes.h).
    fn read_blacklist(&mut self) {
        if let Some((_, table)) = self.table("__start_kprobe_blacklist", "__stop_kprobe_blacklist")
        {
            self.lists.add_functions(words(table));
        }
    }

    /// `__jump_table`: {s32 code, s32 target, s64 key}, relative to each field's own place
    /// (include/linux/jump_label.h).
    fn read_jump_labels(&mut self) {
        if let Some((place, table)) = self.table("__start___jump_table", "__stop___jump_table") {
            for at in relative(table, place, 16) {
                let code = self.elf.read(at, 2).and_then(|code| code.try_into().ok());
                self.lists.add_jump_label(at, code);
            }
            self.add_landings(place, table, 16);
        }
    }

    /// `.static_call_sites`: {s32 addr, s32 key}, relative likewise (include/linux/static_call_types.h),
    /// and the trampolines `__SCT__*`.
    fn read_static_calls(&mut self) {
        if let Some((place, table)) =
            self.table("__start_static_call_sites", "__stop_static_call_sites")
        {
            for at in relative(table, place, 8) {
                self.lists.add_static_call(at);
            }
        }
        self.lists.add_trampolines(self.symbols);
    }

    /// `bpf_dispatcher_*_func` begin with a nop that becomes a jump, unless they end in a static call
    /// `bpf_dispatcher_*_call` (include/linux/bpf.h, `DEFINE_BPF_DISPATCHER`).
    fn read_bpf_dispatchers(&mut self) {
        let symbols = self.symbols;
        for symbol in symbols.iter() {
            let name = symbol.name.strip_prefix("bpf_dispatcher_");
            let Some(name) = name.and_then(|rest| rest.strip_suffix("_func")) else {
                continue;
            };
            let call = format!("__SCT__bpf_dispatcher_{name}_call");
            // `nop` is what a program is called through when it has no dispatcher.
            if name != "nop" && symbols.address_of(&call).is_none() {
                self.lists.add_bpf_dispatcher(symbol.addr);
            }
        }
    }

    /// `__ex_table`: {s32 insn, s32 fixup, s32 data}, relative likewise
    /// (arch/x86/include/asm/extable.h).
    fn read_exception_table(&mut self) {
        if let Some((place, table)) = self.table("__start___ex_table", "__stop___ex_table") {
            self.lists.add_fixups(relative(table, place, 12));
            self.add_landings(place, table, 12);
        }
    }

    /// The second fields of the entries: where they lead.
    fn add_landings(&mut self, place: Gva, table: &[u8], size: usize) {
        self.lists
            .add_landings(relative_field(table, place, size, 4));
    }

    /// `__mcount_loc`: addresses of calls (kernel/trace/ftrace.c). A kernel without ftrace has no
    /// such list, and one without calls to `__fentry__` needs none.
    fn read_ftrace_sites(&mut self) {
        if let Some((_, table)) = self.find("__start_mcount_loc", "__stop_mcount_loc") {
            self.lists.add_ftrace_sites(words(table));
        }
    }

    /// `.smp_locks`: an s32 relative to its own place for each lock prefix, filled up with zeroes
    /// (arch/x86/kernel/alternative.c). A kernel for one processor has none.
    fn read_lock_prefixes(&mut self) {
        if let Some((place, table)) = self.find("__smp_locks", "__smp_locks_end") {
            let entries = table.chunks_exact(4).zip(relative(table, place, 4));
            let used = entries.filter(|(entry, _)| *entry != [0; 4]);
            self.lists.add_locks(used.map(|(_, at)| at));
        }
    }

    /// The addresses from one symbol up to the end of another.
    fn through(&self, start: &str, last: &str) -> Option<Range<u64>> {
        let start = self.symbols.address_of(start)?;
        let last = self.symbols.lookup(last).ok()?;
        let end = last.addr.checked_add(last.size)?;
        (start <= last.addr).then_some(start.0..end.0)
    }

    /// Address and bytes of the table between two symbols; notes when there is none.
    fn table(&mut self, start: &'static str, stop: &str) -> Option<(Gva, &'a [u8])> {
        let found = self.find(start, stop);
        if found.is_none() {
            self.lists.add_missing(start);
        }
        found
    }

    fn find(&self, start: &str, stop: &str) -> Option<(Gva, &'a [u8])> {
        let range = between(self.symbols, start, stop)?;
        let len = usize::try_from(range.end - range.start).ok()?;
        Some((Gva(range.start), self.elf.read(Gva(range.start), len)?))
    }
}

/// The addresses from one symbol up to another.
pub(super) fn between(symbols: &Symbols, start: &str, end: &str) -> Option<Range<u64>> {
    let (start, end) = (symbols.address_of(start)?.0, symbols.address_of(end)?.0);
    (start <= end).then_some(start..end)
}
