//! The unwind tables of a kernel.
//!
//! What is kept true: addresses ascend, each has a rule, and an address outside of the text that the
//! tables are about has none. Finding a rule allocates nothing.
//!
//! The kernel has two: the s32s of `.orc_unwind_ip`, each relative to its own place, are the addresses
//! from which on the entries of `.orc_unwind` hold, one each. They are sorted when the kernel is linked
//! (scripts/sorttable.c, since 5.6). A kernel has some hundred thousand, of which some hundred are
//! different, so that those are kept once.

use std::ops::Range;

use hvprobe_arch::Gva;
use rustc_hash::FxHashMap;

use super::error::OrcError;
use super::rule::{Format, Rule};

/// Bytes of an entry of the table of addresses, and of that of rules.
const ADDRESS: usize = 4;
const ENTRY: usize = 6;
/// More than any kernel has: Debian's have 430,000.
const MOST: usize = 1 << 22;

/// The unwind tables of a kernel.
#[derive(Debug)]
pub struct Orc {
    text: Range<u64>,
    /// Text that is freed at the end of boot. The idle task of the first processor has come from there.
    init_text: Range<u64>,
    /// The low halves of addresses, which are all in the same 4 GiB.
    from: Box<[u32]>,
    /// Which rule holds from each on.
    rule: Box<[u16]>,
    rules: Box<[Rule]>,
    /// That of the entries, of the kernel and its modules.
    format: Format,
    /// What return addresses the kernel puts in the place of those of calls that it follows itself.
    trampolines: Box<[Gva]>,
}

/// The two tables as they are in memory, and what is needed to understand them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    /// Where the addresses are.
    pub(crate) at: Gva,
    /// The addresses.
    pub(crate) addresses: &'a [u8],
    /// The entries.
    pub(crate) entries: &'a [u8],
}

impl Orc {
    /// Reads the tables about `text`, in which `functions` begin, and `init_text`.
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
        // Neither is copied: with all their entries they are larger than what is made of them.
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

    /// Whether `at` is in the text that the tables are about.
    pub(super) fn covers(&self, at: Gva) -> bool {
        self.text.contains(&at.0) || self.init_text.contains(&at.0)
    }

    /// The rule for the instruction that `at` is in.
    pub(super) fn find(&self, at: Gva) -> Option<&Rule> {
        if !self.covers(at) {
            return None;
        }
        // Of entries for the same address the last one counts, as for the kernel (`__orc_find`).
        let behind = self.from.partition_point(|from| *from <= low(at.0));
        let index = self.rule.get(behind.checked_sub(1)?)?;
        self.rules.get(usize::from(*index))
    }

    /// How entries are written, those of modules as well.
    pub(super) fn format(&self) -> Format {
        self.format
    }

    /// Whether the kernel puts `at` in the place of return addresses, and keeps these elsewhere.
    pub(super) fn is_trampoline(&self, at: Gva) -> bool {
        self.trampolines.contains(&at)
    }
}

/// The low half of an address.
fn low(at: u64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the high halves are all the same"
    )]
    let low = at as u32;
    low
}

/// What format the entries are in.
fn format(
    from: &[u32],
    entries: &[[u8; ENTRY]],
    functions: impl Iterator<Item = Gva>,
) -> Option<Format> {
    /// `sp_offset` and `bp_offset` at a function's entry, where the return address is on top.
    const OFFSETS: [u8; 4] = [8, 0, 0, 0];
    /// A frame of registers, by a type of two bits.
    const TYPE: u16 = 3 << 8;
    const REGISTERS: u16 = 1 << 8;
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
