//! Reads modules from guest memory.
//!
//! Invariants: each reading of modules has one budget. Every table, structure and name is charged to it before it
//! is read from the guest, so no count, pointer or list of the guest leads to unbounded work or memory. No list is
//! followed past [`MOST_MODULES`] entries. If part of one module cannot be read, that is recorded in the module and
//! does not keep the others from being read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use rustc_hash::{FxHashMap, FxHashSet};

use super::error::ModuleError;
use super::layout::{Layout, Memory, NAME_LEN, Table};
use super::list::{Module, ModuleList, ModuleState};
use crate::image::{Area, KernelImage, Lists, relative, words};
use crate::symbols::{RawSymbol, SymbolKind, Symbols};
use crate::unwind::{ModuleTables, Text};

/// Maximum number of modules: ten times as many as a distribution's kernel loads on a large machine.
const MOST_MODULES: usize = 2048;
/// Budget of one reading, in bytes, for tables, symbols and names. The types of its modules have a separate budget
/// of the same size. A desktop's two hundred modules need ten million bytes.
const BUDGET: usize = 64 << 20;
/// Charge in bytes for a symbol's entry in our table. Its name and its entry in the guest's table are charged
/// separately.
const PER_SYMBOL: usize = 64;
/// Length in bytes of the longest name, with its NUL (`KSYM_NAME_LEN` from 6.1 on).
const LONGEST_NAME: usize = 512;
/// A function that a kernel has if it supports modules.
const LOADS: &str = "do_init_module";
/// The widest address range in which modules can be: above the kernel image, which has 512 MiB or 1 GiB, and below
/// the fixmap (`MODULES_VADDR`, `MODULES_END` in Documentation/arch/x86/x86_64/mm.rst). Neither the image nor our
/// own mappings are there.
const SPACE: Range<u64> = 0xffff_ffff_a000_0000..0xffff_ffff_ff00_0000;
const PAGE: u64 = 4096;

/// Reads the modules of guests that run one kernel.
#[derive(Debug)]
pub struct ModuleReader {
    /// Head of the list of modules.
    modules: Gva,
    /// The head of the list of modules with lock prefixes.
    pub(super) locks: Option<Gva>,
    /// The head of the list of modules' types.
    pub(super) types: Option<Gva>,
    pub(super) layout: Layout,
}

impl ModuleReader {
    /// Creates a reader for the kernel in `image`: finds its list of modules, and reads their layout.
    ///
    /// # Errors
    /// If the kernel does not support modules, has no symbol for their list, or has no type information that
    /// describes them.
    pub fn new(image: &KernelImage) -> Result<Self, ModuleError> {
        let symbols = image.symbols();
        Ok(Self {
            modules: symbols.address_of("modules").ok_or_else(|| {
                match symbols.address_of(LOADS) {
                    Some(_) => ModuleError::HiddenList,
                    None => ModuleError::NoList,
                }
            })?,
            locks: symbols.address_of("smp_alt_modules"),
            types: symbols.address_of("btf_modules"),
            layout: Layout::of(image)?,
        })
    }

    /// Returns where modules keep their unwind tables; `None` if this kernel has no such tables.
    #[must_use]
    pub fn unwind_tables(&self) -> Option<ModuleTables> {
        let unwind = self.layout.unwind?;
        let text = |init| {
            let mut memories = self.layout.memories.iter();
            memories.find_map(|memory| {
                let size = memory.text.filter(|_| memory.init == init)?;
                let base = memory.base;
                Some(Text { base, size })
            })
        };
        Some(ModuleTables {
            head: self.modules,
            list: self.layout.list,
            texts: [text(false)?, text(true)?],
            addresses: unwind.addresses.start,
            entries: unwind.entries,
            count: unwind.addresses.count,
        })
    }

    /// Reads the module whose memory contains `at`; `None` if there is no such module.
    ///
    /// # Errors
    /// Those of [`Self::read`], for the list and for that module.
    pub fn containing<M: PhysMemory + ?Sized>(
        &self,
        at: Gva,
        tables: &PageTables,
        mem: &M,
    ) -> Result<Option<Module>, ModuleError> {
        let mut guest = Guest::new(tables, mem);
        for link in guest.list(self.modules)? {
            let module = link.wrapping_sub(self.layout.list);
            // Skips a module whose structure cannot be read, as when it is being unloaded; others can still be
            // found.
            let Some(raw) = guest.bytes(module, self.layout.len)?.map(Raw) else {
                continue;
            };
            if raw
                .memories(&self.layout)
                .any(|memory| memory.contains(&at.0))
            {
                let locks = self.lock_tables(&mut guest);
                return self.module(&mut guest, module, &locks).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads all modules on the guest's list.
    ///
    /// # Errors
    /// If the list cannot be followed to its end, if the `struct module` of a module on it cannot be read, or if
    /// the list or the tables exceed the limits. A module whose tables cannot all be read is still returned, but
    /// forbidden.
    pub fn read<M: PhysMemory + ?Sized>(
        &self,
        tables: &PageTables,
        mem: &M,
    ) -> Result<ModuleList, ModuleError> {
        let mut guest = Guest::new(tables, mem);
        let locks = self.lock_tables(&mut guest);
        let mut modules = Vec::new();
        for link in guest.list(self.modules)? {
            let at = link.wrapping_sub(self.layout.list);
            modules.push(self.module(&mut guest, at, &locks)?);
        }
        Ok(ModuleList {
            modules,
            restores_locks: match &locks {
                Ok(tables) => self.locks.is_none() || tables.contains_key(&KERNEL),
                Err(NoLocks) => true,
            },
            types_left: AtomicUsize::new(BUDGET),
        })
    }

    /// Reads the module whose `struct module` is at `at`. The kernel's `do_init_module` and `free_module` get this
    /// address as their argument.
    ///
    /// # Errors
    /// If the structure cannot be read, or the module's tables exceed the limits.
    pub fn read_one<M: PhysMemory + ?Sized>(
        &self,
        at: Gva,
        tables: &PageTables,
        mem: &M,
    ) -> Result<Module, ModuleError> {
        let mut guest = Guest::new(tables, mem);
        let locks = self.lock_tables(&mut guest);
        self.module(&mut guest, at, &locks)
    }

    fn module<M: PhysMemory + ?Sized>(
        &self,
        guest: &mut Guest<'_, M>,
        at: Gva,
        locks: &LockTables,
    ) -> Result<Module, ModuleError> {
        guest.pages.clear();
        let layout = &self.layout;
        let raw = guest.bytes(at, layout.len)?;
        let raw = Raw(raw.ok_or(ModuleError::Unreadable { at })?);
        let state = match raw.u32(layout.state) {
            0 => ModuleState::Live,
            1 => ModuleState::Coming,
            2 => ModuleState::Going,
            _ => ModuleState::Unformed,
        };
        let formed = state != ModuleState::Unformed;
        let memory = |wanted: &dyn Fn(&&Memory) -> bool| {
            let found = layout.memories.iter().filter(|_| formed).find(wanted);
            found.and_then(|memory| range(raw.u64(memory.base), raw.u32(memory.text?)))
        };
        let mut module = Module {
            name: raw.name(layout.name),
            at,
            state,
            text: memory(&|memory| !memory.init && memory.text.is_some()).unwrap_or(Gva(0)..Gva(0)),
            init_text: memory(&|memory| memory.init && memory.text.is_some()),
            memory: raw
                .memories(layout)
                .map(|memory| Gva(memory.start)..Gva(memory.end))
                .collect(),
            symbols: Symbols::default(),
            lists: Lists::default(),
            unreadable: None,
            types: OnceLock::new(),
        };
        if formed {
            let mut reading = Reading {
                guest,
                layout,
                raw: &raw,
                module: &mut module,
            };
            reading.symbols()?;
            reading.lists(locks)?;
        }
        Ok(module)
    }

    /// Returns the positions of the lists of lock prefixes, those of the kernel itself and of each module. They
    /// exist only in a kernel that booted with one processor and may get more (`alternatives_smp_module_add` in
    /// arch/x86/kernel/alternative.c).
    fn lock_tables<M: PhysMemory + ?Sized>(&self, guest: &mut Guest<'_, M>) -> LockTables {
        let Some(head) = self.locks else {
            return Ok(FxHashMap::default());
        };
        let entry = self.layout.lock_entry.ok_or(NoLocks)?;
        let mut tables = FxHashMap::default();
        for link in guest.list(head).map_err(|_| NoLocks)? {
            let at = link.wrapping_sub(entry.next);
            let word = |offset| guest.u64(at.wrapping_add(offset)).ok_or(NoLocks);
            tables.insert(
                word(entry.module)?,
                word(entry.locks)?..word(entry.locks_end)?,
            );
        }
        Ok(tables)
    }
}

/// The lists of lock prefixes cannot be read.
#[derive(Clone, Copy, Debug)]
struct NoLocks;

/// Stands for the kernel itself where a module's address is expected.
const KERNEL: u64 = 0;

/// Start and end of each list of lock prefixes, by the address of its module.
type LockTables = Result<HashMap<u64, Range<u64>, rustc_hash::FxBuildHasher>, NoLocks>;

/// Returns the range of `len` bytes at `start`; `None` if it is empty or modules cannot be there.
fn range(start: u64, len: u32) -> Option<Range<Gva>> {
    let end = start.checked_add(len.into())?;
    (len > 0 && SPACE.start <= start && end <= SPACE.end).then_some(Gva(start)..Gva(end))
}

/// The bytes of a structure. A field outside them reads as zero.
struct Raw(Vec<u8>);

impl Raw {
    fn at<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let start = usize::try_from(offset).ok()?;
        self.0.get(start..start.checked_add(N)?)?.try_into().ok()
    }

    fn u32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.at(offset).unwrap_or_default())
    }

    fn u64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.at(offset).unwrap_or_default())
    }

    /// Returns the memory areas of a module. `self` must be its `struct module`.
    fn memories(&self, layout: &Layout) -> impl Iterator<Item = Range<u64>> {
        let memories = layout.memories.iter();
        memories.filter_map(|memory| {
            let found = range(self.u64(memory.base), self.u32(memory.size))?;
            Some(found.start.0..found.end.0)
        })
    }

    fn name(&self, offset: u64) -> String {
        const LEN: usize = 56;
        const _: () = assert!(LEN as u64 == NAME_LEN);
        let bytes: [u8; LEN] = self.at(offset).unwrap_or([0; LEN]);
        let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(LEN);
        bytes[..len].escape_ascii().to_string()
    }
}

/// A module being read.
struct Reading<'a, 'g, M: ?Sized> {
    guest: &'a mut Guest<'g, M>,
    layout: &'a Layout,
    raw: &'a Raw,
    module: &'a mut Module,
}

impl<M: PhysMemory + ?Sized> Reading<'_, '_, M> {
    /// Records that `list` cannot be read, unless another list is already recorded.
    fn cannot_read(&mut self, list: &'static str) {
        self.module.unreadable.get_or_insert(list);
    }

    /// Reads the symbols. The kernel keeps them in a table of {u32 name, u8 info, u8 other, u16 section, u64 value,
    /// u64 size} (kernel/module/kallsyms.c).
    fn symbols(&mut self) -> Result<(), ModuleError> {
        const ENTRY: usize = 24;
        /// Section numbers from here on are special: absolute values, file names.
        const SPECIAL: u16 = 0xff00;
        const LIST: &str = "symbols";

        let kallsyms = Gva(self.raw.u64(self.layout.kallsyms));
        let Table { start, count } = self.layout.symtab;
        let word = |offset| self.guest.u64(kallsyms.wrapping_add(offset));
        let (Some(symtab), Some(count), Some(strtab)) =
            (word(start), word(count), word(self.layout.strtab))
        else {
            self.cannot_read(LIST);
            return Ok(());
        };
        let count = usize::try_from(count & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        let Some(table) = self.guest.table(Gva(symtab), count, ENTRY)? else {
            self.cannot_read(LIST);
            return Ok(());
        };
        let memories: Vec<Range<u64>> = self.raw.memories(self.layout).collect();
        let mut names = Vec::new();
        for entry in table.chunks_exact(ENTRY) {
            let entry = Raw(entry.to_vec());
            let section = u16::from_le_bytes(entry.at(6).unwrap_or_default());
            let addr = entry.u64(8);
            if section == 0
                || section >= SPECIAL
                || !memories.iter().any(|memory| memory.contains(&addr))
            {
                continue;
            }
            let name = self
                .guest
                .name(Gva(strtab).wrapping_add(entry.u32(0).into()))?;
            if let Some(name) = name {
                self.guest.charge(PER_SYMBOL)?;
                names.push((name, addr, entry.u64(16)));
            }
        }
        let raw = names.iter().map(|(name, addr, size)| {
            let addr = Gva(*addr);
            let text = self.module.is_text(addr);
            RawSymbol {
                name,
                addr,
                size: Some(*size).filter(|size| *size != 0),
                kind: if text {
                    SymbolKind::Text
                } else {
                    SymbolKind::Data
                },
            }
        });
        let symbols = Symbols::new(raw, &memories);
        self.module.symbols = symbols;
        Ok(())
    }

    fn lists(&mut self, locks: &LockTables) -> Result<(), ModuleError> {
        let layout = self.layout;
        let mut lists = Lists::default();
        for (text, area) in [
            (layout.noinstr_text, Area::NoInstr),
            (layout.kprobes_text, Area::Kprobes),
        ] {
            let Some(text) = text else { continue };
            let (start, len) = (self.raw.u64(text.start), self.raw.u32(text.count));
            if let Some(range) = range(start, len) {
                lists.add_area(range.start.0..range.end.0, area);
            }
        }
        if let Some((_, table)) = self.table(layout.kprobe_blacklist, 8, "kprobe blacklist")? {
            lists.add_functions(words(&table));
        }
        if let Some((place, table)) = self.table(layout.jump_entries, 16, "jump labels")? {
            for at in relative(&table, place, 16) {
                let code = self.guest.code(at)?;
                lists.add_jump_label(at, code);
            }
        }
        if let Some((place, table)) = self.table(layout.static_call_sites, 8, "static calls")? {
            for at in relative(&table, place, 8) {
                lists.add_static_call(at);
            }
        }
        lists.add_trampolines(&self.module.symbols);
        if let Some((place, table)) = self.table(layout.extable, 12, "exception table")? {
            lists.add_fixups(relative(&table, place, 12));
        }
        if let Some((_, table)) = self.table(layout.ftrace_callsites, 8, "ftrace call sites")? {
            lists.add_ftrace_sites(words(&table));
        }
        self.read_locks(&mut lists, locks)?;
        lists.sort();
        self.module.lists = lists;
        Ok(())
    }

    fn read_locks(&mut self, lists: &mut Lists, locks: &LockTables) -> Result<(), ModuleError> {
        const LIST: &str = "lock prefixes";
        let Ok(locks) = locks else {
            self.cannot_read(LIST);
            return Ok(());
        };
        let Some(range) = locks.get(&self.module.at.0) else {
            return Ok(());
        };
        let count = range.end.checked_sub(range.start).map(|len| len / 4);
        let count = count.and_then(|count| usize::try_from(count).ok());
        let place = Gva(range.start);
        match self.guest.table(place, count.unwrap_or(usize::MAX), 4)? {
            Some(table) => lists.add_locks(relative(&table, place, 4)),
            None => self.cannot_read(LIST),
        }
        Ok(())
    }

    /// Returns the address and the bytes of a table whose entries have `size` bytes. `None` if there is no such
    /// table, or if it cannot be read. In the second case, records that `list` cannot be read.
    fn table(
        &mut self,
        table: Option<Table>,
        size: usize,
        list: &'static str,
    ) -> Result<Option<(Gva, Vec<u8>)>, ModuleError> {
        let Some(table) = table else { return Ok(None) };
        let place = Gva(self.raw.u64(table.start));
        let count = usize::try_from(self.raw.u32(table.count)).unwrap_or(usize::MAX);
        let bytes = self.guest.table(place, count, size)?;
        if bytes.is_none() {
            self.cannot_read(list);
        }
        Ok(bytes.map(|bytes| (place, bytes)))
    }
}

/// Guest memory, read within a budget.
pub(super) struct Guest<'a, M: ?Sized> {
    tables: &'a PageTables,
    mem: &'a M,
    pub(super) left: usize,
    /// The pages from which names and code were read; `None` for a page that cannot be read.
    pages: FxHashMap<u64, Option<Box<[u8]>>>,
}

impl<'a, M: PhysMemory + ?Sized> Guest<'a, M> {
    fn new(tables: &'a PageTables, mem: &'a M) -> Self {
        Self::with(BUDGET, tables, mem)
    }

    /// Creates a reader with a budget of `left` bytes.
    pub(super) fn with(left: usize, tables: &'a PageTables, mem: &'a M) -> Self {
        Self {
            tables,
            mem,
            left,
            pages: FxHashMap::default(),
        }
    }

    fn charge(&mut self, bytes: usize) -> Result<(), ModuleError> {
        let most = BUDGET;
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or(ModuleError::TooMuch { most })?;
        Ok(())
    }

    pub(super) fn u64(&self, at: Gva) -> Option<u64> {
        self.tables.read_u64(self.mem, at).ok()
    }

    /// Follows the list whose head is at `head`. Returns its links without the head.
    pub(super) fn list(&self, head: Gva) -> Result<Vec<Gva>, ModuleError> {
        let mut links = Vec::new();
        let mut seen = FxHashSet::default();
        let mut at = head;
        loop {
            at = Gva(self.u64(at).ok_or(ModuleError::Unreadable { at })?);
            if at == head {
                return Ok(links);
            }
            if !seen.insert(at) {
                return Err(ModuleError::Cycle { at });
            }
            if links.len() == MOST_MODULES {
                return Err(ModuleError::TooMany { most: MOST_MODULES });
            }
            links.push(at);
        }
    }

    /// Reads `len` bytes at `at`; `None` if not all of them can be read.
    pub(super) fn bytes(&mut self, at: Gva, len: usize) -> Result<Option<Vec<u8>>, ModuleError> {
        self.charge(len)?;
        let mut bytes = vec![0; len];
        let read = self.tables.read(self.mem, at, &mut bytes);
        Ok(read.is_ok().then_some(bytes))
    }

    /// Reads the table of `count` entries of `size` bytes at `at`; `None` if not all of it can be read.
    fn table(
        &mut self,
        at: Gva,
        count: usize,
        size: usize,
    ) -> Result<Option<Vec<u8>>, ModuleError> {
        match count {
            // The pointer to an empty table may be anything.
            0 => Ok(Some(Vec::new())),
            _ => {
                let len = count.saturating_mul(size);
                // Our list of the table's contents takes about as much memory again.
                self.charge(len)?;
                self.bytes(at, len)
            }
        }
    }

    /// Returns the bytes from `at` to the end of its page.
    fn page(&mut self, at: Gva) -> Result<Option<&[u8]>, ModuleError> {
        let offset = at.0 % PAGE;
        let page = at.0 - offset;
        if !self.pages.contains_key(&page) {
            let bytes = self.bytes(Gva(page), usize::try_from(PAGE).unwrap_or(0))?;
            self.pages.insert(page, bytes.map(Into::into));
        }
        let bytes = self.pages.get(&page).and_then(Option::as_deref);
        Ok(bytes.and_then(|bytes| bytes.get(usize::try_from(offset).ok()?..)))
    }

    /// Returns the name at `at`; `None` if it cannot be read, does not end, or is not a valid name.
    fn name(&mut self, mut at: Gva) -> Result<Option<String>, ModuleError> {
        let mut name = Vec::new();
        while name.len() < LONGEST_NAME {
            let Some(part) = self.page(at)? else {
                return Ok(None);
            };
            let part = &part[..part.len().min(LONGEST_NAME - name.len())];
            let end = part.iter().position(|byte| *byte == 0);
            name.extend_from_slice(&part[..end.unwrap_or(part.len())]);
            if end.is_some() {
                self.charge(name.len())?;
                let fine = !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
                return Ok(fine
                    .then_some(name)
                    .and_then(|it| String::from_utf8(it).ok()));
            }
            at = Gva((at.0 - at.0 % PAGE).wrapping_add(PAGE));
        }
        Ok(None)
    }

    /// Returns the first two bytes of the instruction at `at`.
    fn code(&mut self, at: Gva) -> Result<Option<[u8; 2]>, ModuleError> {
        let first = self.page(at)?.and_then(|page| page.first().copied());
        let second = self
            .page(at.wrapping_add(1))?
            .and_then(|page| page.first().copied());
        Ok(first.zip(second).map(|(first, second)| [first, second]))
    }
}
