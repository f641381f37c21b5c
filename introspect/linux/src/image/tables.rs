//! Finds the kernel's tables about its own text in an image, and checks their entries.
//!
//! A table can be found in three ways:
//!
//! * by the symbols at its ends. They are data symbols, so a kernel without `CONFIG_KALLSYMS_ALL` does not keep
//!   them;
//! * by a section of its own;
//! * by the code of a function that walks the table, because that code has the table's ends as constants. Symbols
//!   of functions are always kept.
//!
//! Invariants: a table is returned only if all ways that find it agree, and if every entry fits the layout: it
//! refers to code, and the bytes there are those that the kernel expects. Otherwise the table is unknown, and its
//! users must assume that it lists everything. A table counts as absent only if it is not found, and the kernel
//! lacks the functions that need it.
//!
//! The layouts are those of 5.10, 6.1, 6.12 and 7.2. Each was checked on Debian's kernels of these versions, in
//! all three ways.

use std::cmp::Reverse;
use std::ops::Range;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::constants;

use super::elf::Elf;
use crate::bytes::{i32_at, u64_at};
use crate::symbols::Symbols;

#[cfg(test)]
mod tests;

/// A table: how to find it, and the layout of its entries.
pub(super) struct Table {
    /// The symbols at its start and end.
    symbols: [&'static str; 2],
    /// The name of the section that holds only this table.
    section: Option<&'static str>,
    /// Functions that walk the whole table.
    readers: &'static [&'static str],
    /// Functions that need the table: a kernel that has the table has at least one of them.
    signs: &'static [&'static str],
    /// Length of an entry in bytes.
    entry: usize,
    /// Whether entries of zeroes may fill gaps.
    gaps: bool,
    /// Returns the kind of the entry at an address with these bytes; `None` if it is not valid.
    fit: fn(&Elf<'_>, Gva, &[u8]) -> Option<Fit>,
}

/// Kind of a valid entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    Entry,
    /// Valid, but not specific enough to recognise a table.
    Filler,
}

/// Result of looking for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// The address and the bytes of the table.
    At(Gva, &'a [u8]),
    /// The kernel has no such table.
    Absent,
    /// The kernel has the table, but it cannot be found or is not as expected.
    Unknown,
}

/// `__jump_table`: {s32 code, s32 target, s64 key}, each relative to its own address; the lowest bits of the
/// key are flags (include/linux/jump_label.h).
pub(super) const JUMP_LABELS: Table = Table {
    symbols: ["__start___jump_table", "__stop___jump_table"],
    section: Some("__jump_table"),
    readers: &["jump_label_init"],
    signs: &[
        "jump_label_init",
        "static_key_slow_inc",
        "static_key_enable",
    ],
    entry: 16,
    gaps: false,
    fit: jump_label,
};

/// `.static_call_sites`: {s32 addr, s32 key}, each relative to its own address (include/linux/static_call_types.h).
pub(super) const STATIC_CALLS: Table = Table {
    symbols: ["__start_static_call_sites", "__stop_static_call_sites"],
    section: Some(".static_call_sites"),
    readers: &["static_call_init"],
    signs: &["static_call_init", "__static_call_update"],
    entry: 8,
    gaps: false,
    fit: static_call,
};

/// `__ex_table`: {s32 insn, s32 fixup}, each relative to its own address, and four bytes that kernel versions use
/// differently (arch/x86/include/asm/extable.h).
pub(super) const FIXUPS: Table = Table {
    symbols: ["__start___ex_table", "__stop___ex_table"],
    section: Some("__ex_table"),
    readers: &[
        "search_kernel_exception_table",
        "search_exception_tables",
        "sort_main_extable",
    ],
    // Every kernel has an exception table.
    signs: &["_stext"],
    entry: 12,
    gaps: false,
    fit: fixup,
};

/// `_kprobe_blacklist`: addresses of functions (include/asm-generic/kprobes.h).
pub(super) const BLACKLIST: Table = Table {
    symbols: ["__start_kprobe_blacklist", "__stop_kprobe_blacklist"],
    section: Some("_kprobe_blacklist"),
    readers: &["init_kprobes"],
    signs: &["register_kprobe"],
    entry: 8,
    gaps: false,
    fit: function,
};

/// `__mcount_loc`: addresses of calls to `__fentry__`, with zeroes for calls that were dropped
/// (kernel/trace/ftrace.c).
pub(super) const FTRACE_SITES: Table = Table {
    symbols: ["__start_mcount_loc", "__stop_mcount_loc"],
    section: Some("__mcount_loc"),
    readers: &["ftrace_init"],
    signs: &["ftrace_init"],
    entry: 8,
    gaps: true,
    fit: ftrace_site,
};

/// `.smp_locks`: for each lock prefix an s32 relative to its own address, padded with zeroes
/// (arch/x86/kernel/alternative.c).
pub(super) const LOCKS: Table = Table {
    symbols: ["__smp_locks", "__smp_locks_end"],
    section: Some(".smp_locks"),
    readers: &["alternative_instructions"],
    signs: &["alternatives_enable_smp", "alternatives_smp_module_add"],
    entry: 4,
    gaps: true,
    fit: lock,
};

#[cfg(test)]
pub(super) const ALL: [&Table; 6] = [
    &JUMP_LABELS,
    &STATIC_CALLS,
    &FIXUPS,
    &BLACKLIST,
    &FTRACE_SITES,
    &LOCKS,
];

/// The image and the symbols in which tables are looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a, 's> {
    pub(super) elf: &'a Elf<'a>,
    pub(super) symbols: &'s Symbols,
}

impl<'a> Places<'a, '_> {
    pub(super) fn find(&self, table: &Table) -> Found<'a> {
        let [start, stop] = table.symbols;
        let section = table.section.and_then(|name| self.elf.section(name));
        let in_code = self.in_code(table);
        let ways = [
            self.symbols.between(start, stop),
            section.map(|section| section.at.clone()),
            in_code.clone(),
        ];
        let mut ranges = ways.into_iter().flatten();
        let Some(range) = ranges.next() else {
            let has = |name: &&str| self.symbols.address_of(name).is_some();
            return match table.signs.iter().any(has) {
                true => Found::Unknown,
                false => Found::Absent,
            };
        };
        let Some(bytes) = self.bytes(&range) else {
            return Found::Unknown;
        };
        let at = Gva(range.start);
        // `in_code` has checked the entries of its own range.
        let is_whole =
            in_code.as_ref() == Some(&range) || self.entries(table, at, bytes).1 == bytes.len();
        if is_whole && ranges.all(|other| other == range) {
            Found::At(at, bytes)
        } else {
            Found::Unknown
        }
    }

    /// Finds the table by the constants in the code of a function that walks it. Returns a range between two
    /// constants that consists of entries only. If there are several such ranges, returns the one with the most
    /// entries, and among equals the shortest, which has the least filler.
    fn in_code(&self, table: &Table) -> Option<Range<u64>> {
        /// Maximum number of bytes of each function's code that are examined.
        const LONGEST: u64 = 4096;
        /// Maximum number of bytes of possible tables that are checked.
        const MOST: usize = 1 << 25;
        let mut best = (0, Reverse(usize::MAX));
        let mut found = None;
        let mut looked = 0;
        for reader in table.readers {
            let Ok(reader) = self.symbols.lookup(reader) else {
                continue;
            };
            let end = reader.addr.0.checked_add(reader.size.min(LONGEST))?;
            let code = self.bytes(&(reader.addr.0..end)).unwrap_or_default();
            let mut ends = constants(code, reader.addr);
            ends.sort_unstable();
            ends.dedup();
            for (n, start) in ends.iter().enumerate() {
                // Extends the range while it consists of entries; no bytes are checked twice.
                let (mut count, mut len) = (0, 0);
                for end in ends.get(n + 1..).unwrap_or_default() {
                    let Some(bytes) = self.bytes(&(*start..*end)) else {
                        break;
                    };
                    let (fresh, at) = (&bytes[len..], Gva(*start).wrapping_add(len as u64));
                    let (more, further) = self.entries(table, at, fresh);
                    (count, len) = (count + more, len + further);
                    looked += further + table.entry;
                    if looked > MOST {
                        return None;
                    }
                    let merit = (count, Reverse(len));
                    if len == bytes.len() && count > 0 && merit > best {
                        (best, found) = (merit, Some(*start..*end));
                    }
                    if bytes.len() - len >= table.entry {
                        break;
                    }
                }
            }
        }
        found
    }

    /// Returns the number of entries at the start of `bytes`, and the length in bytes of these entries and their
    /// filler.
    fn entries(&self, table: &Table, at: Gva, bytes: &[u8]) -> (usize, usize) {
        let (mut count, mut len) = (0, 0);
        while let Some((entry, behind)) = bytes[len..].split_at_checked(table.entry) {
            if table.gaps && entry.iter().all(|byte| *byte == 0) {
                // Skips all zeroes at once, as there are often long runs of them between two constants.
                len += table.entry + zeroes(behind) / table.entry * table.entry;
                continue;
            }
            match (table.fit)(self.elf, at.wrapping_add(len as u64), entry) {
                Some(Fit::Entry) => count += 1,
                Some(Fit::Filler) => {}
                None => break,
            }
            len += table.entry;
        }
        (count, len)
    }

    fn bytes(&self, range: &Range<u64>) -> Option<&'a [u8]> {
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        self.elf.read(Gva(range.start), len)
    }
}

/// Returns the number of zeroes at the start of `bytes`.
fn zeroes(bytes: &[u8]) -> usize {
    const STEP: usize = 64;
    let steps = bytes.chunks_exact(STEP);
    let whole = STEP * steps.take_while(|step| **step == [0; STEP]).count();
    let rest = bytes[whole..].iter();
    whole + rest.take_while(|byte| **byte == 0).count()
}

/// Returns the address that the s32 at offset `field` of the entry at `place` refers to.
fn target(place: Gva, entry: &[u8], field: u32) -> Option<Gva> {
    let offset = i32_at(entry, usize::try_from(field).ok()?)?;
    let field = place.wrapping_add(u64::from(field));
    Some(Gva(field.0.wrapping_add_signed(i64::from(offset))))
}

fn entry_if(is: bool) -> Option<Fit> {
    is.then_some(Fit::Entry)
}

fn jump_label(elf: &Elf<'_>, place: Gva, entry: &[u8]) -> Option<Fit> {
    /// Flags in an address (`JUMP_TYPE_MASK`).
    const FLAGS: u64 = 3;
    let (code, to) = (target(place, entry, 0)?, target(place, entry, 4)?);
    let key = place.0.wrapping_add(8).wrapping_add(u64_at(entry, 8)?) & !FLAGS;
    let lands =
        |len: u64, offset: i64| code.wrapping_add(len).0.wrapping_add_signed(offset) == to.0;
    let is_label = match elf.read(code, 5)? {
        [0xeb, near, ..] => lands(2, i64::from(near.cast_signed())),
        [0xe9, far @ ..] => lands(5, i64::from(i32_at(far, 0)?)),
        // The kernel's own five-byte nops, and the two-byte nop of assemblers.
        [0x0f, 0x1f, 0x44, 0, 0] | [0x3e, 0x8d, 0x74, 0x26, 0] | [0x66, 0x90, ..] => true,
        _ => false,
    };
    entry_if(is_label && elf.is_code(code.0) && elf.is_code(to.0) && elf.is_loaded(key))
}

fn static_call(elf: &Elf<'_>, place: Gva, entry: &[u8]) -> Option<Fit> {
    /// Flags in an address (`STATIC_CALL_SITE_FLAGS`).
    const FLAGS: u64 = 3;
    let (code, key) = (
        target(place, entry, 0)?,
        target(place, entry, 4)?.0 & !FLAGS,
    );
    let is_branch = match elf.read(code, 2)? {
        [0xe8 | 0xe9, _] => true,
        [0x0f, condition] => (0x80..0x90).contains(condition),
        _ => false,
    };
    entry_if(is_branch && elf.is_code(code.0) && elf.is_loaded(key))
}

fn fixup(elf: &Elf<'_>, place: Gva, entry: &[u8]) -> Option<Fit> {
    let (code, to) = (target(place, entry, 0)?, target(place, entry, 4)?);
    entry_if(elf.is_code(code.0) && elf.is_code(to.0))
}

fn function(elf: &Elf<'_>, _: Gva, entry: &[u8]) -> Option<Fit> {
    entry_if(elf.is_code(u64_at(entry, 0)?))
}

fn ftrace_site(elf: &Elf<'_>, _: Gva, entry: &[u8]) -> Option<Fit> {
    let at = u64_at(entry, 0)?;
    let code = elf.read(Gva(at), 5)?;
    let is_call = matches!(code, [0xe8, ..] | [0x0f, 0x1f, 0x44, 0, 0]);
    entry_if(is_call && elf.is_code(at))
}

fn lock(elf: &Elf<'_>, place: Gva, entry: &[u8]) -> Option<Fit> {
    const LOCK: &[u8] = &[0xf0];
    let at = target(place, entry, 0)?;
    match elf.read(at, 1)? {
        LOCK => entry_if(elf.is_code(at.0)),
        // An alternative with the lock prefix will be patched in here. Until then, another instruction is here.
        _ => elf.is_code(at.0).then_some(Fit::Filler),
    }
}
