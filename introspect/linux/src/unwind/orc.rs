//! The unwind tables of a kernel.
//!
//! Invariants: the addresses in the tables ascend, and there is a rule for each of them. No rule is found for an
//! address outside the text that the tables cover. Finding a rule allocates nothing.
//!
//! The kernel has two tables. `.orc_unwind_ip` has an s32 for each entry of `.orc_unwind`: the address from which
//! the entry applies, relative to the s32's own address. Both tables are sorted when the kernel is linked
//! (scripts/sorttable.c, since 5.6). A kernel has some hundred thousand entries, of which only some hundred differ,
//! so each distinct rule is kept once.

use std::ops::Range;

use hvprobe_arch::Gva;
use rustc_hash::FxHashMap;

use super::error::OrcError;
use super::rule::{Format, Rule};

/// Length in bytes of an entry of the table of addresses.
const ADDRESS: usize = 4;
/// Length in bytes of an entry of the table of rules.
const ENTRY: usize = 6;
/// Maximum number of entries; Debian's kernels have 430,000.
const MOST: usize = 1 << 22;

/// The unwind tables of a kernel.
#[derive(Debug)]
pub struct Orc {
    text: Range<u64>,
    /// Text that is freed at the end of boot. The outermost calls of the first processor's idle task are in it.
    init_text: Range<u64>,
    /// The low halves of the addresses from which rules apply. All these addresses are in the same 4 GiB.
    from: Box<[u32]>,
    /// For each address in `from`, the index into `rules` of the rule that applies from there on.
    rule: Box<[u16]>,
    rules: Box<[Rule]>,
    /// Format of the entries. It is the same for the kernel and its modules.
    format: Format,
    /// Addresses of the kernel's trampolines, which it puts in place of the return addresses of calls that it
    /// follows.
    trampolines: Box<[Gva]>,
}

/// The two tables as they are in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    /// Address of the table of addresses.
    pub(crate) at: Gva,
    /// Bytes of the table of addresses.
    pub(crate) addresses: &'a [u8],
    /// Bytes of the table of entries.
    pub(crate) entries: &'a [u8],
}

impl Orc {
    /// Reads the tables that cover `text` and `init_text`. `functions` are the addresses at which functions in
    /// `text` begin.
    pub(crate) fn read(
        tables: Tables<'_>,
        (text, init_text): (Range<u64>, Range<u64>),
        functions: impl Iterator<Item = Gva>,
        trampolines: Box<[Gva]>,
    ) -> Result<Self, OrcError> {
        let Tables {
            at,
            addresses,
            entries,
        } = tables;
        // The tables are not copied: with all their entries they are larger than the result.
        let (addresses, _) = addresses.as_chunks::<ADDRESS>();
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let count = addresses.len();
        if count != entries.len() {
            return Err(OrcError::Lengths {
                addresses: count,
                rules: entries.len(),
            });
        }
        if count > MOST || text.start >> 32 != text.end >> 32 {
            return Err(OrcError::TooMany);
        }
        let places = (at.0..).step_by(ADDRESS);
        let places = places.zip(addresses).map(|(place, offset)| {
            let offset = i32::from_le_bytes(*offset);
            place.wrapping_add_signed(offset.into())
        });
        let mut from = Vec::with_capacity(count);
        let mut last = 0;
        for place in places {
            if place < last || place >> 32 != text.start >> 32 {
                return Err(OrcError::Unsorted);
            }
            last = place;
            from.push(low(place));
        }
        if from.is_empty() {
            return Err(OrcError::Missing);
        }
        let format = format(&from, entries, functions).ok_or(OrcError::Format)?;
        let mut rules = Vec::new();
        let mut known = FxHashMap::default();
        let mut rule = Vec::with_capacity(count);
        for entry in entries {
            let index = match known.get(entry) {
                Some(index) => *index,
                None => {
                    let index = u16::try_from(rules.len()).map_err(|_| OrcError::TooMany)?;
                    rules.push(format.rule(*entry));
                    known.insert(*entry, index);
                    index
                }
            };
            rule.push(index);
        }
        Ok(Self {
            text,
            init_text,
            from: from.into(),
            rule: rule.into(),
            rules: rules.into(),
            format,
            trampolines,
        })
    }

    /// Returns whether `at` is in the text that the tables cover.
    pub(super) fn covers(&self, at: Gva) -> bool {
        self.text.contains(&at.0) || self.init_text.contains(&at.0)
    }

    /// Returns the rule for the instruction that contains `at`; `None` if there is none.
    pub(super) fn find(&self, at: Gva) -> Option<&Rule> {
        if !self.covers(at) {
            return None;
        }
        // If several entries have the same address, the last one counts, as in the kernel (`__orc_find`).
        let behind = self.from.partition_point(|from| *from <= low(at.0));
        let index = self.rule.get(behind.checked_sub(1)?)?;
        self.rules.get(usize::from(*index))
    }

    /// Returns the format of the entries. Those of modules have the same format.
    pub(super) fn format(&self) -> Format {
        self.format
    }

    /// Returns whether `at` is one of the trampolines that the kernel puts in place of return addresses.
    pub(super) fn is_trampoline(&self, at: Gva) -> bool {
        self.trampolines.contains(&at)
    }
}

/// Returns the low half of an address.
fn low(at: u64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the high halves are all the same"
    )]
    let low = at as u32;
    low
}

/// Determines the format of the entries from those at the starts of functions. `from` has the low halves of the
/// addresses of all entries.
fn format(
    from: &[u32],
    entries: &[[u8; ENTRY]],
    functions: impl Iterator<Item = Gva>,
) -> Option<Format> {
    /// `sp_offset` and `bp_offset` at a function's entry, where the return address is on top of the stack.
    const OFFSETS: [u8; 4] = [8, 0, 0, 0];
    /// The bits of the type, in formats with a type of two bits.
    const TYPE: u16 = 3 << 8;
    /// The type of a frame of registers, in these formats.
    const REGISTERS: u16 = 1 << 8;
    /// The bit above the type. For a frame of registers, it is set only in 6.3.
    const SIGNAL: u16 = 1 << 10;
    let mut begin: FxHashMap<u16, usize> = FxHashMap::default();
    let mut all = 0;
    for function in functions {
        let Ok(index) = from.binary_search(&low(function.0)) else {
            continue;
        };
        let Some([a, b, c, d, e, f]) = entries.get(index) else {
            continue;
        };
        all += 1;
        if [*a, *b, *c, *d] == OFFSETS {
            *begin.entry(u16::from_le_bytes([*e, *f])).or_default() += 1;
        }
    }
    let words = || {
        entries
            .iter()
            .map(|[.., e, f]| u16::from_le_bytes([*e, *f]))
    };
    let signals = words().any(|word| word & TYPE == REGISTERS && word & SIGNAL != 0);
    Format::of(|word| begin.get(&word).copied().unwrap_or(0), all, signals)
}
