//! Finds and decodes kallsyms, the kernel's own symbol table, in a stripped image.
//!
//! The table (`scripts/kallsyms.c`, `kernel/kallsyms.c`) consists of a few arrays in `.rodata` that nothing
//! points to, so they are found by the relations between them:
//!
//! * `token_table`: 256 strings. A byte of a compressed name stands for one of them; a digit stands for itself.
//!   `token_index` follows the table: 256 u16, the offset of each string.
//! * `num_syms`, `names` (for each symbol a length and that many bytes) and `markers` (the offset of every 256th
//!   name) lie before the tokens, in this order.
//! * The addresses are in an array before `num_syms` (kernels up to 6.3) or after `token_index` (from 6.4 on), in
//!   one of the encodings of [`Encoding`].
//!
//! Tested on 5.10, 6.1, 6.12 and 7.2. The encodings of versions in between follow what the kernel's own script
//! writes.
//!
//! Invariants: a table is accepted only if all of these relations hold, the addresses ascend as the kernel's own
//! binary search needs, and the image has code at `_stext`. The size of the image and the constants below bound all
//! work.

use hvprobe_arch::Gva;
use memchr::memmem;

use super::elf::{KERNEL_HALF, Part};
use super::error::KallsymsError;
use crate::bytes::{u32_at, u64_at};
use crate::symbols::{MOST_TEXT, RawSymbol, SymbolKind};

/// Number of tokens.
const TOKENS: usize = 256;
/// Number of symbols per marker.
const MARKED: usize = 256;
/// Minimum number of symbols; every kernel has more.
const FEWEST: u64 = 64;
/// Maximum number of symbols; every kernel has fewer.
const MOST: u64 = 1 << 22;
/// Longest name in bytes, with its type letter (`KSYM_NAME_LEN` is 512 from 6.1 on).
const LONGEST_NAME: usize = 512;
/// Maximum number of candidates that get the cheap checks.
const GLANCES: usize = 1 << 14;
/// Maximum number of candidates that get the full checks.
const TRIES: usize = 16;

/// Encoding of the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// An i32 each. A value that is not negative is itself the address (a per-CPU offset); a negative one stands
    /// for `base - 1 - value` (`CONFIG_KALLSYMS_ABSOLUTE_PERCPU`, x86-64 until 6.14).
    AbsolutePerCpu,
    /// A u32 each, added to the base (6.15 to 6.19).
    Relative,
    /// An i32 each, added to the address it is stored at (from 7.0 on).
    PlaceRelative,
    /// A u64 each (kernels before 6.11 without `CONFIG_KALLSYMS_BASE_RELATIVE`).
    Absolute,
}

/// A decoded table.
#[derive(Debug)]
pub(super) struct Kallsyms {
    pub(super) encoding: Encoding,
    names: Names,
    addrs: Vec<u64>,
}

impl Kallsyms {
    /// Finds and decodes the table in one of `parts`.
    pub(super) fn find(parts: &[&Part<'_>]) -> Result<Self, KallsymsError> {
        let mut error = KallsymsError::NoTokens;
        for part in parts.iter().filter(|part| !part.data.is_empty()) {
            for tokens in Tokens::candidates(part.data).take(TRIES) {
                match Self::decode(part, &tokens, parts) {
                    Ok(found) => return Ok(found),
                    Err(closer) => error = closer,
                }
            }
        }
        Err(error)
    }

    fn decode(
        part: &Part<'_>,
        tokens: &Tokens<'_>,
        parts: &[&Part<'_>],
    ) -> Result<Self, KallsymsError> {
        let mut error = KallsymsError::NoNames;
        for place in NamesPlace::candidates(part.data, tokens) {
            let Some(names) = Names::expand(part.data, &place, tokens) else {
                continue;
            };
            error = KallsymsError::NoAddresses;
            for (encoding, addrs) in address_candidates(part, &place, tokens) {
                if plausible(&names, &addrs, parts) {
                    return Ok(Self {
                        encoding,
                        names,
                        addrs,
                    });
                }
            }
        }
        Err(error)
    }

    /// Returns the symbols, in the table's order.
    pub(super) fn symbols(&self) -> impl Iterator<Item = RawSymbol<'_>> {
        self.names
            .iter()
            .zip(&self.addrs)
            .map(|((letter, name), addr)| RawSymbol {
                name,
                addr: Gva(*addr),
                size: None,
                kind: kind(letter, *addr),
            })
    }
}

/// Returns the kind that the letter of nm(1) stands for. A weak symbol may be code or data, and is nearly
/// always code.
fn kind(letter: u8, addr: u64) -> SymbolKind {
    match letter {
        b'A' | b'a' => SymbolKind::Absolute,
        _ if addr < KERNEL_HALF => SymbolKind::Absolute,
        b'T' | b't' | b'W' | b'w' => SymbolKind::Text,
        _ => SymbolKind::Data,
    }
}

/// The 256 tokens, with the offsets of their tables in the data.
struct Tokens<'a> {
    table: usize,
    /// Offset just after `token_index`.
    end: usize,
    parts: Vec<&'a [u8]>,
}

impl<'a> Tokens<'a> {
    /// Finds all candidates for the token table: places where the tokens of the ten digits follow each other, with
    /// an index that fits.
    fn candidates(data: &'a [u8]) -> impl Iterator<Item = Self> {
        const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
        memmem::find_iter(data, DIGITS)
            .take(GLANCES)
            .filter_map(|at| Self::around(data, at))
    }

    /// Returns the table whose token for `0` is at offset `digits`; `None` if no index after it fits.
    fn around(data: &'a [u8], digits: usize) -> Option<Self> {
        // Walks forward to the end of the table. The index after it then gives the start.
        let mut end = digits;
        for _ in usize::from(b'0')..TOKENS {
            end += token_at(data, end)?.len() + 1;
        }
        (0..4).find_map(|skip| {
            let index_at = end.next_multiple_of(4) + 4 * skip;
            let index: Vec<usize> = data
                .get(index_at..index_at + 2 * TOKENS)?
                .chunks_exact(2)
                .map(|word| usize::from(u16::from_le_bytes([word[0], word[1]])))
                .collect();
            let table = digits.checked_sub(*index.get(usize::from(b'0'))?)?;
            let mut parts = Vec::with_capacity(TOKENS);
            let mut next = 0;
            for start in index {
                if start != next {
                    return None;
                }
                let part = token_at(data, table + start)?;
                next = start + part.len() + 1;
                parts.push(part);
            }
            (table + next == end).then_some(Self {
                table,
                end: index_at + 2 * TOKENS,
                parts,
            })
        })
    }
}

/// Returns the string at `at`, up to its NUL.
fn token_at(data: &[u8], at: usize) -> Option<&[u8]> {
    let rest = data.get(at..)?;
    let rest = &rest[..rest.len().min(LONGEST_NAME)];
    Some(&rest[..memchr::memchr(0, rest)?])
}

/// Value of `num_syms`, and offsets of `num_syms` and `names` in the data.
struct NamesPlace {
    count: usize,
    num_syms: usize,
    names: usize,
}

impl NamesPlace {
    /// Finds the places before the token table at which a count is followed by that many names, and the names by
    /// markers that fit. Tries 8-byte alignment of the tables first, then 4-byte alignment. For each alignment,
    /// tries the places nearest to the token table first.
    ///
    /// Many offsets within the names look like a count with names after it. So a cheaper check comes before the
    /// names are read. Kernels that align tables to 8 bytes have zeroes between the count and the names, up to the
    /// next multiple of 8. Kernels that align tables to 4 bytes have no such gap; their markers, just before the
    /// token table, are checked instead.
    fn candidates(data: &[u8], tokens: &Tokens<'_>) -> impl Iterator<Item = Self> {
        let table = tokens.table;
        let padded = counts(data, table)
            .filter(|(_, num_syms)| u32_at(data, num_syms + 4) == Some(0))
            .map(|place| (place, 8));
        let packed = counts(data, table)
            .filter(move |(count, _)| has_markers(data, table, *count))
            .map(|place| (place, 4));
        padded
            .chain(packed)
            .map(|((count, num_syms), size)| Self {
                count,
                num_syms,
                names: num_syms + size,
            })
            .take(GLANCES)
            .filter(move |place| place.starts_well(data, tokens))
            .take(TRIES)
            .filter(move |place| place.markers_fit(data, table).is_some())
    }

    /// Returns whether each of the first names begins with a type letter: a cheap check before all names are
    /// walked.
    fn starts_well(&self, data: &[u8], tokens: &Tokens<'_>) -> bool {
        let mut at = self.names;
        (0..self.count.min(MARKED)).all(|_| {
            let Some((name, next)) = name_at(data, at) else {
                return false;
            };
            at = next;
            name.first()
                .and_then(|first| tokens.parts.get(usize::from(*first))?.first())
                .is_some_and(|letter| b"AaBbCDdGgIiNnRrSsTtUuVvWw".contains(letter))
        })
    }

    /// Walks all names, and checks that the markers after them give their offsets. Returns `None` if a name or a
    /// marker does not fit.
    fn markers_fit(&self, data: &[u8], limit: usize) -> Option<()> {
        let mut marks = Vec::with_capacity(self.count / MARKED + 1);
        let mut at = self.names;
        for i in 0..self.count {
            if i % MARKED == 0 {
                marks.push(u32::try_from(at - self.names).ok()?);
            }
            at = name_at(data, at)?.1;
            (at <= limit).then_some(())?;
        }
        // A marker is a u32; before 4.20, a u64.
        let found = [4, 8].into_iter().any(|width| {
            [at.next_multiple_of(8), at.next_multiple_of(4)]
                .into_iter()
                .any(|start| {
                    marks.iter().enumerate().all(|(i, mark)| {
                        u32_at(data, start + width * i) == Some(*mark)
                            && (width == 4 || u32_at(data, start + width * i + 4) == Some(0))
                    })
                })
        });
        found.then_some(())
    }
}

/// Returns each count that is plausible for its distance to the token table, with its offset. Those nearest to the
/// table come first.
fn counts(data: &[u8], table: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..=table.saturating_sub(8) / 4)
        .rev()
        .map(|word| 4 * word)
        .filter_map(move |num_syms| {
            let count = u64::from(u32_at(data, num_syms)?);
            // A name takes at least two bytes, and on average far fewer than 64. Together with the markers this
            // bounds the distance to the token table.
            let distance = u64::try_from(table - num_syms).ok()?;
            (FEWEST..=MOST).contains(&count).then_some(())?;
            (2 * count <= distance && distance <= 64 * count + 4096).then_some(())?;
            Some((usize::try_from(count).ok()?, num_syms))
        })
}

/// Returns whether the markers of `count` names, a u32 each, can be just before the token table. Checks that the
/// first few ascend from 0.
fn has_markers(data: &[u8], table: usize, count: usize) -> bool {
    const LOOKED_AT: usize = 4;
    let marks = count.div_ceil(MARKED);
    let mark = |i: usize| u32_at(data, table.checked_sub(4 * marks)? + 4 * i);
    mark(0) == Some(0) && (1..marks.min(LOOKED_AT)).all(|i| mark(i - 1) < mark(i))
}

/// Returns the compressed name at `at` and the offset of the next one.
fn name_at(data: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let low = usize::from(*data.get(at)?);
    // A length above 127 has its low seven bits here, and the rest in a second byte (from 6.1 on).
    let (len, start) = if low < 0x80 {
        (low, at + 1)
    } else {
        (low & 0x7f | usize::from(*data.get(at + 1)?) << 7, at + 2)
    };
    let name = data.get(start..start.checked_add(len)?)?;
    // A name has at least one token, and a token at least one character.
    (1..=LONGEST_NAME)
        .contains(&len)
        .then_some((name, start + len))
}

/// All names, each preceded by its type letter, in one string.
#[derive(Debug)]
struct Names {
    text: String,
    ends: Vec<usize>,
}

impl Names {
    fn expand(data: &[u8], place: &NamesPlace, tokens: &Tokens<'_>) -> Option<Self> {
        // There are many times as many tokens to append as names. Nearly all tokens are appended by one copy of a
        // constant length.
        const WIDE: usize = 16;
        let padded = |part: &[u8]| {
            let mut wide = [0; WIDE];
            let short = part.len().min(WIDE);
            wide[..short].copy_from_slice(&part[..short]);
            wide
        };
        // Accepts only the characters that assemblers and compilers use in names.
        let is_text = |part: &&[u8]| part.iter().all(u8::is_ascii_graphic);
        let parts = tokens.parts.iter();
        let parts: Vec<_> = parts
            .map(|part| Some((padded(part), *part)).filter(|(_, part)| is_text(part)))
            .collect();
        let mut text = Vec::new();
        let mut ends = Vec::with_capacity(place.count);
        let mut at = place.names;
        let mut whole = [0; LONGEST_NAME + WIDE];
        for _ in 0..place.count {
            let (name, next) = name_at(data, at)?;
            at = next;
            let mut len = 0;
            for byte in name {
                let (wide, part) = (*parts.get(usize::from(*byte))?)?;
                whole.get_mut(len..len + WIDE)?.copy_from_slice(&wide);
                if part.len() > WIDE {
                    whole.get_mut(len..len + part.len())?.copy_from_slice(part);
                }
                len += part.len();
                (len <= LONGEST_NAME).then_some(())?;
            }
            // At least a type letter and one character.
            (len >= 2).then_some(())?;
            text.extend_from_slice(&whole[..len]);
            (text.len() <= MOST_TEXT).then_some(())?;
            ends.push(text.len());
        }
        Some(Self {
            text: String::from_utf8(text).ok()?,
            ends,
        })
    }

    /// Returns type letter and name of each symbol.
    fn iter(&self) -> impl Iterator<Item = (u8, &str)> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| {
            let (letter, name) = self.text[start..*end].split_at(1);
            (letter.as_bytes()[0], name)
        })
    }
}

/// Returns every array that may hold the addresses, decoded in each encoding that it may have.
fn address_candidates(
    part: &Part<'_>,
    place: &NamesPlace,
    tokens: &Tokens<'_>,
) -> impl Iterator<Item = (Encoding, Vec<u64>)> {
    let data = part.data;
    let count = place.count;
    let offsets_len = 4 * count;

    // Before `num_syms`: offsets, padding to 8 bytes, the base.
    let before = place.num_syms.checked_sub(8).and_then(|base| {
        let offsets = base.checked_sub(offsets_len.next_multiple_of(8))?;
        Some((offsets, base))
    });
    // After `token_index`: offsets, padding to 8 bytes, the base.
    let after_base = (tokens.end + offsets_len).next_multiple_of(8);
    let after = (tokens.end, after_base);

    let based = before
        .into_iter()
        .chain([after])
        .filter_map(move |(offsets, base)| {
            let base = u64_at(data, base)?;
            // The base is the lowest address of the kernel's text.
            (base >= KERNEL_HALF).then_some(())?;
            Some((data.get(offsets..offsets + offsets_len)?, base))
        })
        .flat_map(|(offsets, base)| {
            [Encoding::AbsolutePerCpu, Encoding::Relative]
                .map(|encoding| (encoding, based_addresses(offsets, base, encoding)))
        });
    let place_relative = data
        .get(tokens.end..tokens.end + offsets_len)
        .map(|offsets| {
            let mut place = part.at.start.wrapping_add(tokens.end as u64);
            let addrs = words(offsets)
                .map(|offset| {
                    let addr = place.wrapping_add_signed(i64::from(offset.cast_signed()));
                    place = place.wrapping_add(4);
                    addr
                })
                .collect();
            (Encoding::PlaceRelative, addrs)
        });
    let absolute = place
        .num_syms
        .checked_sub(8 * count)
        .and_then(|start| data.get(start..place.num_syms))
        .map(|addrs| {
            let addrs = words(addrs)
                .zip(words(addrs).skip(1))
                .step_by(2)
                .map(|(low, high)| u64::from(high) << 32 | u64::from(low))
                .collect();
            (Encoding::Absolute, addrs)
        });
    based.chain(place_relative).chain(absolute)
}

fn based_addresses(offsets: &[u8], base: u64, encoding: Encoding) -> Vec<u64> {
    words(offsets)
        .map(|offset| {
            let signed = i64::from(offset.cast_signed());
            if encoding == Encoding::Relative {
                base.wrapping_add(u64::from(offset))
            } else if signed < 0 {
                base.wrapping_sub(1).wrapping_add_signed(-signed)
            } else {
                u64::from(offset)
            }
        })
        .collect()
}

/// Returns whether `addrs` can be the addresses of `names`: they ascend, and the image has code at `_stext`.
fn plausible(names: &Names, addrs: &[u64], parts: &[&Part<'_>]) -> bool {
    let text_start = names
        .iter()
        .zip(addrs)
        .find(|((_, name), _)| *name == "_stext")
        .map(|(_, addr)| *addr);
    addrs.is_sorted()
        && text_start.is_some_and(|addr| {
            parts
                .iter()
                .any(|part| part.exec && part.at.contains(&addr))
        })
}

fn words(data: &[u8]) -> impl Iterator<Item = u32> {
    data.chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}
