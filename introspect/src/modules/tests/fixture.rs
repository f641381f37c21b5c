//! Guests with modules: kernels of two ages that describe `struct module` in their BTF, and memory
//! with modules laid out as they describe it.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva};

use super::super::{ModuleError, ModuleList, ModuleReader};
use crate::image::KernelImage;
use crate::image::fixture::{self, Layout, NOTHING_FORBIDDEN, TEXT};
use crate::testing::{MODULE_VIRT, Mapper, Memory, tables};

/// Where the heads of the lists are.
pub(crate) const MODULES: Gva = Gva(PAGE_OF_HEADS.0 + 0xc00);
const PAGE_OF_HEADS: Gva = Gva(0xffff_ffff_82a0_0000);
pub(crate) const LOCKS: Gva = Gva(MODULES.0 + 0x10);
/// Where entries of the list of modules with lock prefixes are.
const LOCK_ENTRIES: Gva = Gva(MODULES.0 + 0x100);
/// The first module's memory; the others follow.
const FIRST: Gva = MODULE_VIRT;
/// Each module has a page of text, one of data and one of init text.
const PAGES: u64 = 3;
/// How many fit.
pub(super) const MODULE_COUNT: u64 = 5;
const PAGE: u64 = 0x1000;
const TEXT_FRAME: Gpa = Gpa(0x2_0000);
const DATA_FRAME: Gpa = Gpa(0x3_0000);

/// How old the kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Age {
    /// `core_layout` and `init_layout`.
    V61,
    /// `mem[]`.
    V64,
}

pub(super) const AGES: [Age; 2] = [Age::V61, Age::V64];

/// What a member of a made-up structure is.
#[derive(Clone, Copy)]
enum Ty {
    /// A number of so many bytes.
    Int(u32),
    Ptr,
    /// So many bytes.
    Bytes(u32),
    /// So many of the structure with that index.
    Struct(usize, Option<u32>),
}

type Member = (&'static str, Ty, u32);

/// Offset of the state.
pub(crate) const STATE: u32 = 0;
const LIST: u32 = 8;
const NAME: u32 = 24;
const CORE: u32 = 0x140;
const INIT: u32 = 0x1a0;
const MEM: u32 = 0x100;
/// `struct module_memory` has 16 bytes and a tree's node.
const MEM_LEN: u32 = 72;

fn structures(age: Age) -> Vec<(&'static str, u32, Vec<Member>)> {
    use Ty::{Bytes, Int, Ptr, Struct};
    let mut module = vec![
        ("state", Int(4), STATE),
        ("list", Bytes(16), LIST),
        ("name", Bytes(56), NAME),
        ("num_exentries", Int(4), 0x80),
        ("extable", Ptr, 0x88),
        ("kallsyms", Ptr, 0x300),
        ("jump_entries", Ptr, 0x308),
        ("num_jump_entries", Int(4), 0x310),
        ("static_call_sites", Ptr, 0x318),
        ("num_static_call_sites", Int(4), 0x320),
        ("ftrace_callsites", Ptr, 0x328),
        ("num_ftrace_callsites", Int(4), 0x330),
        ("kprobe_blacklist", Ptr, 0x338),
        ("num_kprobe_blacklist", Int(4), 0x340),
        ("noinstr_text_start", Ptr, 0x348),
        ("noinstr_text_size", Int(4), 0x350),
        ("kprobes_text_start", Ptr, 0x358),
        ("kprobes_text_size", Int(4), 0x360),
    ];
    let memory = match age {
        Age::V61 => {
            module.extend([
                ("core_layout", Struct(0, None), CORE),
                ("init_layout", Struct(0, None), INIT),
            ]);
            (
                "module_layout",
                0x50,
                vec![
                    ("base", Ptr, 0),
                    ("size", Int(4), 8),
                    ("text_size", Int(4), 12),
                ],
            )
        }
        Age::V64 => {
            module.push(("mem", Struct(0, Some(7)), MEM));
            (
                "module_memory",
                MEM_LEN,
                vec![("base", Ptr, 0), ("size", Int(4), 8)],
            )
        }
    };
    vec![
        memory,
        ("module", 0x400, module),
        (
            "mod_kallsyms",
            0x20,
            vec![
                ("symtab", Ptr, 0),
                ("num_symtab", Int(4), 8),
                ("strtab", Ptr, 16),
            ],
        ),
        (
            "smp_alt_module",
            0x40,
            vec![
                ("mod", Ptr, 0),
                ("name", Ptr, 8),
                ("locks", Ptr, 16),
                ("locks_end", Ptr, 24),
                ("next", Bytes(16), 48),
            ],
        ),
    ]
}

/// BTF with the structures of a kernel of that age.
pub(crate) fn btf(age: Age) -> Vec<u8> {
    let (mut strings, mut types) = (vec![0_u8], Vec::<u8>::new());
    let mut count = 0;
    let mut string = |text: &str| {
        let at = u32::try_from(strings.len()).unwrap();
        strings.extend_from_slice(text.as_bytes());
        strings.push(0);
        at
    };
    let mut add = |words: &[u32]| {
        for word in words {
            types.extend_from_slice(&word.to_le_bytes());
        }
        count += 1;
        count
    };
    let kind = |kind: u32, len: usize| kind << 24 | u32::try_from(len).unwrap();
    let byte = add(&[string("char"), kind(1, 0), 1, 8]);
    let pointer = add(&[0, kind(2, 0), 0]);
    let mut ids = Vec::new();
    for (name, size, members) in structures(age) {
        let mut words = vec![string(name), kind(4, members.len()), size];
        for (name, ty, offset) in members {
            let id = match ty {
                Ty::Int(len) => add(&[string("number"), kind(1, 0), len, 8 * len]),
                Ty::Ptr => pointer,
                Ty::Bytes(len) => add(&[0, kind(3, 0), 0, byte, byte, len]),
                Ty::Struct(index, None) => ids[index],
                Ty::Struct(index, Some(len)) => add(&[0, kind(3, 0), 0, ids[index], byte, len]),
            };
            words.extend([string(name), id, 8 * offset]);
        }
        ids.push(add(&words));
    }
    let mut out = vec![0x9f, 0xeb, 1, 0];
    let len = |part: &[u8]| u32::try_from(part.len()).unwrap();
    for word in [24, 0, len(&types), len(&types), len(&strings)] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend(types);
    out.extend(strings);
    out
}

/// A kernel image of that age, with `btf` for its type information.
pub(crate) fn image(btf: Vec<u8>) -> KernelImage {
    let (_, mut sections) = fixture::kernel(Layout::Offsets61);
    for section in &mut sections {
        if section.name == ".BTF" {
            section.data.clone_from(&btf);
        }
    }
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("_etext", TEXT + 0x4000, 0, true),
        ("modules", MODULES.0, 16, false),
        ("smp_alt_modules", LOCKS.0, 16, false),
    ];
    KernelImage::parse(&fixture::elf(
        &sections,
        &[&symbols[..], &NOTHING_FORBIDDEN].concat(),
    ))
    .unwrap()
}

/// A symbol to be: name, section, address in the module's memory, size.
pub(crate) type RawSym = (&'static str, u16, u64, u64);

/// A guest with room for modules.
pub(crate) struct Guest {
    pub(super) age: Age,
    pub(super) reader: ModuleReader,
    pub(super) mem: Memory,
    count: u64,
    locks: u64,
}

impl Guest {
    /// A guest without modules.
    pub(super) fn new(age: Age) -> Self {
        let mem = Memory::new(0);
        let mut mapper = Mapper::new(&mem);
        mapper.map(PAGE_OF_HEADS, DATA_FRAME);
        for n in 0..MODULE_COUNT * PAGES {
            mapper.map(
                FIRST.wrapping_add(n * PAGE),
                TEXT_FRAME.wrapping_add(n * PAGE),
            );
        }
        Self::within(age, mem)
    }

    /// A guest without modules in memory of another, where the pages for them are mapped.
    pub(crate) fn within(age: Age, mem: Memory) -> Self {
        let guest = Self {
            age,
            reader: ModuleReader::new(&image(btf(age))).unwrap(),
            mem,
            count: 0,
            locks: 0,
        };
        for head in [MODULES, LOCKS] {
            guest.put(head, &head.0.to_le_bytes());
        }
        guest
    }

    pub(super) fn put(&self, at: Gva, bytes: &[u8]) {
        tables().write(&self.mem, at, bytes).unwrap();
    }

    pub(super) fn word(&self, at: Gva) -> u64 {
        tables().read_u64(&self.mem, at).unwrap()
    }

    pub(super) fn read(&self) -> Result<ModuleList, ModuleError> {
        self.reader.read(&tables(), &self.mem)
    }

    /// Adds a module in `state` (as in `enum module_state`) at the front of the list, with a page of
    /// text, one of data, and one of init text that it still has.
    pub(crate) fn add(&mut self, name: &str, state: u32) -> Made<'_> {
        let base = FIRST.wrapping_add(self.count * PAGES * PAGE);
        self.count += 1;
        let at = base.wrapping_add(PAGE);
        let next = self.word(MODULES);
        let link = at.wrapping_add(LIST.into());
        self.put(link, &next.to_le_bytes());
        self.put(MODULES, &link.0.to_le_bytes());
        let made = Made {
            guest: self,
            base,
            at,
            free: at.wrapping_add(0x500),
        };
        made.field(STATE, &state.to_le_bytes());
        made.field(NAME, name.as_bytes());
        let init = base.wrapping_add(2 * PAGE);
        let memory = |at: u32, base: Gva, size: u32| {
            made.field(at, &base.0.to_le_bytes());
            made.field(at + 8, &size.to_le_bytes());
        };
        match made.guest.age {
            Age::V61 => {
                memory(CORE, base, 0x2000);
                made.field(CORE + 12, &0x1000_u32.to_le_bytes());
                memory(INIT, init, 0x1000);
                made.field(INIT + 12, &0x800_u32.to_le_bytes());
            }
            Age::V64 => {
                memory(MEM, base, 0x1000);
                memory(MEM + MEM_LEN, at, 0x1000);
                memory(MEM + 4 * MEM_LEN, init, 0x800);
                memory(MEM + 5 * MEM_LEN, init.wrapping_add(0x800), 0x800);
            }
        }
        made
    }

    /// Writes `value` somewhere in the memory of the modules.
    pub(super) fn damage(&self, offset: u64, value: &[u8]) {
        let len = MODULE_COUNT * PAGES * PAGE;
        let at = TEXT_FRAME.wrapping_add(offset % (len - 8));
        self.mem.write(at, value).unwrap();
    }
}

/// A module being made.
pub(crate) struct Made<'a> {
    guest: &'a mut Guest,
    /// Where its memory begins.
    pub(crate) base: Gva,
    /// Where its `struct module` is.
    pub(crate) at: Gva,
    /// Where its next table goes.
    free: Gva,
}

impl Made<'_> {
    /// Sets a field.
    pub(super) fn field(&self, offset: u32, bytes: &[u8]) {
        self.guest.put(self.at.wrapping_add(offset.into()), bytes);
    }

    /// Gives back the init memory.
    pub(super) fn without_init(self) -> Self {
        let zero = [0; 12];
        match self.guest.age {
            Age::V61 => {
                self.field(INIT, &zero);
                self.field(INIT + 12, &[0; 4]);
            }
            Age::V64 => {
                self.field(MEM + 4 * MEM_LEN, &zero);
                self.field(MEM + 5 * MEM_LEN, &zero);
            }
        }
        self
    }

    /// Writes bytes into the text.
    pub(crate) fn code(self, offset: u64, bytes: &[u8]) -> Self {
        self.guest.put(self.base.wrapping_add(offset), bytes);
        self
    }

    fn alloc(&mut self, bytes: &[u8]) -> Gva {
        let at = self.free;
        self.free = at.wrapping_add((bytes.len() as u64).next_multiple_of(8));
        self.guest.put(at, bytes);
        at
    }

    /// The symbol table.
    pub(crate) fn symbols(mut self, symbols: &[RawSym]) -> Self {
        let (mut table, mut strings) = (Vec::new(), vec![0]);
        for (name, section, at, size) in symbols {
            table.extend_from_slice(&u32::try_from(strings.len()).unwrap().to_le_bytes());
            table.extend([0x12, 0]);
            table.extend_from_slice(&section.to_le_bytes());
            table.extend_from_slice(&self.base.0.wrapping_add(*at).to_le_bytes());
            table.extend_from_slice(&size.to_le_bytes());
            strings.extend_from_slice(name.as_bytes());
            strings.push(0);
        }
        let symtab = self.alloc(&table);
        let strtab = self.alloc(&strings);
        let words = [symtab.0, symbols.len() as u64, strtab.0];
        let kallsyms = self.alloc(&words.map(u64::to_le_bytes).concat());
        self.field(0x300, &kallsyms.0.to_le_bytes());
        self
    }

    /// A table of addresses at the pointer and count at `fields`.
    pub(super) fn words(mut self, fields: (u32, u32), offsets: &[u64]) -> Self {
        let words: Vec<u8> = offsets
            .iter()
            .flat_map(|offset| self.base.wrapping_add(*offset).0.to_le_bytes())
            .collect();
        let at = self.alloc(&words);
        self.table(fields, at, offsets.len())
    }

    /// A table of entries of `size` bytes that begin with a relative address.
    pub(crate) fn relative(mut self, fields: (u32, u32), size: usize, offsets: &[u64]) -> Self {
        let (at, len) = self.entries(size, offsets);
        self.table(fields, at, len)
    }

    /// A list of lock prefixes.
    pub(super) fn locks(mut self, offsets: &[u64]) -> Self {
        let (at, len) = self.entries(4, offsets);
        let entry = LOCK_ENTRIES.wrapping_add(0x40 * self.guest.locks);
        self.guest.locks += 1;
        let end = at.wrapping_add(4 * len as u64);
        let words = [self.at.0, 0, at.0, end.0, 0, 0, self.guest.word(LOCKS)];
        self.guest.put(entry, &words.map(u64::to_le_bytes).concat());
        let link = entry.wrapping_add(48);
        self.guest.put(LOCKS, &link.0.to_le_bytes());
        self
    }

    fn entries(&mut self, size: usize, offsets: &[u64]) -> (Gva, usize) {
        let mut table = vec![0; size * offsets.len()];
        let mut place = self.free;
        for (entry, offset) in table.chunks_exact_mut(size).zip(offsets) {
            let distance = self.base.wrapping_add(*offset).0.wrapping_sub(place.0);
            entry[..4].copy_from_slice(&distance.to_le_bytes()[..4]);
            place = place.wrapping_add(size as u64);
        }
        (self.alloc(&table), offsets.len())
    }

    fn table(self, (pointer, count): (u32, u32), at: Gva, len: usize) -> Self {
        self.field(pointer, &at.0.to_le_bytes());
        self.field(count, &u32::try_from(len).unwrap().to_le_bytes());
        self
    }
}

pub(crate) const EXTABLE: (u32, u32) = (0x88, 0x80);
pub(super) const JUMPS: (u32, u32) = (0x308, 0x310);
pub(super) const CALLS: (u32, u32) = (0x318, 0x320);
pub(super) const FTRACE: (u32, u32) = (0x328, 0x330);
pub(super) const BLACKLIST: (u32, u32) = (0x338, 0x340);
pub(super) const NOINSTR: (u32, u32) = (0x348, 0x350);
pub(super) const KPROBES: (u32, u32) = (0x358, 0x360);
/// Offset of the pointer to the symbols.
pub(super) const KALLSYMS: u32 = 0x300;
