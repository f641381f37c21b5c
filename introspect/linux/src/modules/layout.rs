//! The layout of `struct module` and of its tables, from the kernel's BTF.
//!
//! Invariants: a field is used only if it has the size that the reader expects, and all fields used lie in the
//! first [`Layout::len`] bytes of the structure. Fields that depend on the kernel's configuration are optional: a
//! kernel without such a field also lacks the list to which the field leads.
//!
//! Both layouts, that up to 6.3 and that from 6.4 on, were checked on 5.10, 6.1, 6.12 and 7.2. The list of modules
//! is checked whenever it is read: it must return to its head, and memory outside the address range of modules does
//! not count as that of a module.

use std::cell::Cell;

use super::error::ModuleError;
use crate::image::KernelImage;
use crate::types::{BtfError, Member, Structures};

/// Length in bytes of a module's name in `struct module`, with its NUL. `MODULE_NAME_LEN` is 64 minus the size of a
/// `long` (include/linux/moduleparam.h).
pub(super) const NAME_LEN: u64 = 56;
/// Number of memory kinds since 6.4 (`enum mod_mem_type`): text, data, rodata and ro_after_init, and text, data and
/// rodata for init.
const MEMORIES: u64 = 7;
/// Maximum length of `struct module`, in bytes. It is read in one piece; no kernel has a longer one.
const LONGEST: u64 = 1 << 16;

/// Offsets in a structure: of the pointer to a table, and of the number of the table's elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    /// Offset of the pointer, a u64.
    pub(super) start: u64,
    /// Offset of the count, a u32.
    pub(super) count: u64,
}

/// An area of a module's memory, as offsets in `struct module`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Offset of the area's address, a u64.
    pub(super) base: u64,
    /// Offset of the length in bytes, a u32.
    pub(super) size: u64,
    /// Offset of the length in bytes of the text at the start of the area, a u32; `None` if the area has no text.
    pub(super) text: Option<u64>,
    /// Whether the area is freed after the module's init function has run.
    pub(super) init: bool,
}

/// Offsets in an entry of the list of modules with lock prefixes (`struct smp_alt_module`).
#[derive(Clone, Copy, Debug)]
pub(super) struct LockEntry {
    pub(super) module: u64,
    pub(super) locks: u64,
    pub(super) locks_end: u64,
    pub(super) next: u64,
}

/// Offsets in an entry of the list of modules' types (`struct btf_module`).
#[derive(Clone, Copy, Debug)]
pub(super) struct TypesEntry {
    pub(super) next: u64,
    pub(super) module: u64,
    pub(super) types: u64,
    /// Address and length in bytes of the types, as offsets in the `struct btf` to which `types` points.
    pub(super) data: Table,
}

/// The unwind tables of a module (`struct mod_arch_specific`), as offsets in `struct module`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unwind {
    /// The pointer to the addresses, and their number.
    pub(super) addresses: Table,
    /// Offset of the pointer to the entries, one for each address.
    pub(super) entries: u64,
}

/// Where the kernel records the notes of a module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Notes {
    /// Offset in `struct module` of the pointer to `struct module_notes_attrs`.
    pub(super) all: u64,
    /// Offset in that structure of the first `struct bin_attribute`. The others follow it, each `len` bytes
    /// long.
    pub(super) first: u64,
    pub(super) len: u64,
    /// Offset in `struct bin_attribute` of the address of the notes.
    pub(super) start: u64,
    /// Offset in `struct bin_attribute` of the length in bytes of the notes, a u64.
    pub(super) size: u64,
}

/// Layout of the structures. All offsets are in bytes, and in `struct module` unless said otherwise.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Number of bytes from the start of `struct module` that contain all its fields used here.
    pub(super) len: usize,
    /// The state, a u32.
    pub(super) state: u64,
    /// The `list_head` that links the module into the list of modules: pointers to the next and the previous one.
    pub(super) list: u64,
    pub(super) name: u64,
    pub(super) memories: Vec<Memory>,
    /// The pointer to `struct mod_kallsyms`.
    pub(super) kallsyms: u64,
    /// Pointer to the symbols and their number, in `struct mod_kallsyms`.
    pub(super) symtab: Table,
    /// Pointer to the names of symbols, in `struct mod_kallsyms`.
    pub(super) strtab: u64,
    pub(super) extable: Option<Table>,
    pub(super) jump_entries: Option<Table>,
    pub(super) static_call_sites: Option<Table>,
    pub(super) ftrace_callsites: Option<Table>,
    pub(super) kprobe_blacklist: Option<Table>,
    /// Address and length in bytes.
    pub(super) noinstr_text: Option<Table>,
    /// Address and length in bytes.
    pub(super) kprobes_text: Option<Table>,
    pub(super) lock_entry: Option<LockEntry>,
    pub(super) types_entry: Option<TypesEntry>,
    pub(super) unwind: Option<Unwind>,
    pub(super) notes: Option<Notes>,
}

/// The structures that the layout is read from.
struct Answers<'a> {
    structures: Structures<'a>,
    /// Number of bytes from the start of `struct module` that contain all members found so far.
    len: Cell<u64>,
}

impl Answers<'_> {
    fn get(&self, of: &str, path: &str) -> Option<Member> {
        let member = self.structures.member(of, path)?;
        if of == "module" {
            let end = member.offset.saturating_add(member.size);
            self.len.set(self.len.get().max(end));
        }
        Some(member)
    }

    /// Returns the offset of a member of exactly `size` bytes; `None` if there is none.
    fn optional(&self, of: &str, path: &str, size: u64) -> Option<u64> {
        self.required(of, path, size).ok()
    }

    fn required(&self, of: &str, path: &str, size: u64) -> Result<u64, BtfError> {
        Member::exactly(self.get(of, path), of, path, size)
    }

    /// Returns the offsets of a pointer and a count in `struct module`, if both exist.
    fn table(&self, start: &str, count: &str) -> Option<Table> {
        Some(Table {
            start: self.optional("module", start, 8)?,
            count: self.optional("module", count, 4)?,
        })
    }

    /// Returns the two memory areas of kernels up to 6.3, each of which begins with text.
    fn layouts(&self) -> Option<Vec<Memory>> {
        let offset = |path, size| self.optional("module", path, size);
        Some(vec![
            Memory {
                base: offset("core_layout.base", 8)?,
                size: offset("core_layout.size", 4)?,
                text: Some(offset("core_layout.text_size", 4)?),
                init: false,
            },
            Memory {
                base: offset("init_layout.base", 8)?,
                size: offset("init_layout.size", 4)?,
                text: Some(offset("init_layout.text_size", 4)?),
                init: true,
            },
        ])
    }

    /// Returns the memory areas of kernels from 6.4 on, one of each kind.
    fn memories(&self) -> Result<Vec<Memory>, ModuleError> {
        let base = self.required("module", "mem[0].base", 8)?;
        let size = self.required("module", "mem[0].size", 4)?;
        let whole = self.get("module", "mem").map_or(0, |member| member.size);
        let stride = self.get("module", "mem[0]").map_or(0, |member| member.size);
        let found = whole.checked_div(stride).unwrap_or(0);
        if found != MEMORIES {
            return Err(ModuleError::Memories {
                found,
                expected: MEMORIES,
            });
        }
        /// Number of the memory kind `MOD_TEXT`.
        const TEXT: u64 = 0;
        /// Number of the memory kind `MOD_INIT_TEXT`, the first of those that are freed.
        const INIT_TEXT: u64 = 4;
        let memory = |kind| Memory {
            base: base + kind * stride,
            size: size + kind * stride,
            text: [TEXT, INIT_TEXT]
                .contains(&kind)
                .then_some(size + kind * stride),
            init: kind >= INIT_TEXT,
        };
        Ok((0..MEMORIES).map(memory).collect())
    }

    fn lock_entry(&self) -> Option<LockEntry> {
        let offset = |path, size| self.optional("smp_alt_module", path, size);
        Some(LockEntry {
            module: offset("mod", 8)?,
            locks: offset("locks", 8)?,
            locks_end: offset("locks_end", 8)?,
            next: offset("next", 16)?,
        })
    }

    fn unwind(&self) -> Option<Unwind> {
        Some(Unwind {
            addresses: self.table("arch.orc_unwind_ip", "arch.num_orcs")?,
            entries: self.optional("module", "arch.orc_unwind", 8)?,
        })
    }

    fn notes(&self) -> Option<Notes> {
        Some(Notes {
            all: self.optional("module", "notes_attrs", 8)?,
            first: self.get("module_notes_attrs", "attrs")?.offset,
            len: self.structures.size("bin_attribute")?,
            start: self.optional("bin_attribute", "private", 8)?,
            size: self.optional("bin_attribute", "size", 8)?,
        })
    }

    fn types_entry(&self) -> Option<TypesEntry> {
        let offset = |path, size| self.optional("btf_module", path, size);
        Some(TypesEntry {
            next: offset("list", 16)?,
            module: offset("module", 8)?,
            types: offset("btf", 8)?,
            data: Table {
                start: self.optional("btf", "data", 8)?,
                count: self.optional("btf", "data_size", 4)?,
            },
        })
    }
}

impl Layout {
    /// Reads the layout, in one pass over the types.
    pub(super) fn of(image: &KernelImage) -> Result<Self, ModuleError> {
        const NAMES: [&str; 7] = [
            "module",
            "mod_kallsyms",
            "smp_alt_module",
            "btf_module",
            "btf",
            "module_notes_attrs",
            "bin_attribute",
        ];
        let answers = Answers {
            structures: image.types()?.structures(&NAMES),
            len: Cell::new(0),
        };
        Ok(Self {
            state: answers.required("module", "state", 4)?,
            list: answers.required("module", "list", 16)?,
            name: answers.required("module", "name", NAME_LEN)?,
            memories: match answers.layouts() {
                Some(layouts) => layouts,
                None => answers.memories()?,
            },
            kallsyms: answers.required("module", "kallsyms", 8)?,
            symtab: Table {
                start: answers.required("mod_kallsyms", "symtab", 8)?,
                count: answers.required("mod_kallsyms", "num_symtab", 4)?,
            },
            strtab: answers.required("mod_kallsyms", "strtab", 8)?,
            extable: answers.table("extable", "num_exentries"),
            jump_entries: answers.table("jump_entries", "num_jump_entries"),
            static_call_sites: answers.table("static_call_sites", "num_static_call_sites"),
            ftrace_callsites: answers.table("ftrace_callsites", "num_ftrace_callsites"),
            kprobe_blacklist: answers.table("kprobe_blacklist", "num_kprobe_blacklist"),
            noinstr_text: answers.table("noinstr_text_start", "noinstr_text_size"),
            kprobes_text: answers.table("kprobes_text_start", "kprobes_text_size"),
            lock_entry: answers.lock_entry(),
            types_entry: answers.types_entry(),
            unwind: answers.unwind(),
            notes: answers.notes(),
            // Must be last, as every look-up above may extend it.
            len: usize::try_from(answers.len.get().min(LONGEST)).unwrap_or(0),
        })
    }
}
