//! The unwind tables of modules, read from the guest's memory.
//!
//! Invariants: nothing about a module is kept from one stack to the next, as the module may be unloaded by then.
//! The number of words read for one stack is bounded, even if the guest's list of modules or a module's table has
//! no end. Finding a rule allocates nothing.
//!
//! A module has two tables like the kernel's. They are sorted before any of the module's code runs
//! (`unwind_module_init` in arch/x86/kernel/unwind_orc.c). Their entries have the kernel's format: a module with
//! another format is not loaded.

use std::ops::Range;

use hvprobe_arch::Gva;

use super::rule::{Format, Rule};
use super::surroundings::Surroundings;

/// Maximum number of words of modules that are read for one stack. A search through fifty modules takes 300 words,
/// and a search for an address among ten thousand takes 28.
const MOST_WORDS: u32 = 1 << 13;
/// Length in bytes of an entry of the table of addresses.
const ADDRESS: u64 = 4;
/// Length in bytes of an entry of the table of rules.
const ENTRY: u64 = 6;

/// A text area of a module, as offsets in `struct module`: of its address, and of its length, a u32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text {
    pub(crate) base: u64,
    pub(crate) size: u64,
}

/// Where a kernel's modules and their unwind tables are.
#[derive(Clone, Copy, Debug)]
pub struct ModuleTables {
    /// The head of the list of modules.
    pub(crate) head: Gva,
    /// Offset in `struct module` of the link of that list.
    pub(crate) list: u64,
    /// The text that stays, and the init text.
    pub(crate) texts: [Text; 2],
    /// Offset in `struct module` of the pointer to the table of addresses.
    pub(crate) addresses: u64,
    /// Offset in `struct module` of the pointer to the table of rules.
    pub(crate) entries: u64,
    /// Offset in `struct module` of the number of entries of each of the two tables, a u32.
    pub(crate) count: u64,
}

/// State of the search in modules for one stack.
#[derive(Debug)]
pub(super) struct Search {
    left: u32,
    /// The module that was found last, with its text and init text.
    last: Option<(Gva, [Range<u64>; 2])>,
}

impl Search {
    pub(super) fn new() -> Self {
        Self {
            left: MOST_WORDS,
            last: None,
        }
    }
}

impl ModuleTables {
    /// Returns the rule for the instruction that contains `at`; `None` if the instruction is not in a module, or
    /// has no rule.
    pub(super) fn find(
        &self,
        at: Gva,
        format: Format,
        search: &mut Search,
        guest: &(impl Surroundings + ?Sized),
    ) -> Option<Rule> {
        let mut words = Words {
            guest,
            left: &mut search.left,
        };
        let contains = |texts: &[Range<u64>; 2]| texts.iter().any(|text| text.contains(&at.0));
        let known = search.last.take().filter(|(_, texts)| contains(texts));
        let (module, texts) = match known {
            Some(known) => known,
            None => self.containing(contains, &mut words)?,
        };
        search.last = Some((module, texts));
        let field = |offset| module.wrapping_add(offset);
        let count = words.u32(field(self.count))?;
        let addresses = Gva(words.u64(field(self.addresses))?);
        let entries = Gva(words.u64(field(self.entries))?);
        // If several entries have the same address, the last one counts, as in the kernel (`__orc_find`).
        let (mut behind, mut end) = (0, count);
        while behind < end {
            let middle = behind + (end - behind) / 2;
            let place = addresses.wrapping_add(ADDRESS * u64::from(middle));
            let offset = words.u32(place)?.cast_signed();
            if place.0.wrapping_add_signed(offset.into()) <= at.0 {
                behind = middle + 1;
            } else {
                end = middle;
            }
        }
        let index = u64::from(behind.checked_sub(1)?);
        let entry = words.bytes(entries.wrapping_add(ENTRY * index))?;
        Some(format.rule(entry))
    }

    /// Returns the first module whose text satisfies `contains`.
    fn containing<G: Surroundings + ?Sized>(
        &self,
        contains: impl Fn(&[Range<u64>; 2]) -> bool,
        words: &mut Words<'_, G>,
    ) -> Option<(Gva, [Range<u64>; 2])> {
        let mut link = Gva(words.u64(self.head)?);
        // A list that does not return to its head is followed until the limit for words is reached.
        while link != self.head {
            let module = link.wrapping_sub(self.list);
            let [text, init] = self.texts.map(|text| {
                let base = words.u64(module.wrapping_add(text.base))?;
                let size = words.u32(module.wrapping_add(text.size))?;
                Some(base..base.saturating_add(size.into()))
            });
            let texts = [text?, init?];
            if contains(&texts) {
                return Some((module, texts));
            }
            link = Gva(words.u64(link)?);
        }
        None
    }
}

/// Guest memory, read up to a limit of words.
struct Words<'a, G: ?Sized> {
    guest: &'a G,
    left: &'a mut u32,
}

impl<G: Surroundings + ?Sized> Words<'_, G> {
    fn u64(&mut self, at: Gva) -> Option<u64> {
        *self.left = self.left.checked_sub(1)?;
        self.guest.word(at)
    }

    fn u32(&mut self, at: Gva) -> Option<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    /// Reads up to eight bytes at `at`, which need not be aligned: the tables of a module may not be.
    fn bytes<const N: usize>(&mut self, at: Gva) -> Option<[u8; N]> {
        let first = Gva(at.0 & !7);
        let from = usize::try_from(at.0 & 7).ok()?;
        let mut both = [0; 16];
        both[..8].copy_from_slice(&self.u64(first)?.to_le_bytes());
        if from + N > 8 {
            let second = self.u64(first.wrapping_add(8))?;
            both[8..].copy_from_slice(&second.to_le_bytes());
        }
        both.get(from..from + N)?.try_into().ok()
    }
}
