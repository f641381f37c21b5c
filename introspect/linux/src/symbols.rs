//! The symbol table: names of kernel addresses.
//!
//! Invariants: entries are sorted by address; entries with the same address keep the image's order (kallsyms puts
//! the best name first). Names live in one arena, and the index by name is sorted by the hash of the name, so every
//! look-up is a binary search and no symbol owns an allocation. A table is built once from an image and never
//! changes.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use globset::{GlobBuilder, GlobMatcher};
use hvprobe_arch::Gva;

/// Maximum number of names that [`LookupError::Unknown`] suggests.
const NEAR_MATCHES: usize = 5;
/// Length in bytes of the longest name for which similar names are searched. Longer ones are not typed by hand, and
/// the edit distance takes quadratic time.
const LONGEST: usize = 128;

/// The kind of a symbol, from its `nm` letter or ELF type and the section it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SymbolKind {
    /// Code, weak functions included.
    Text,
    /// Variables, constants, and labels outside code.
    Data,
    /// A number rather than an address: on kernels that link per-CPU data at zero (before 6.15), the offset of
    /// a per-CPU variable.
    Absolute,
}

/// One symbol, borrowed from its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// The name as the kernel has it, suffixes such as `.isra.0` included.
    pub name: &'a str,
    /// The address at which it begins.
    pub addr: Gva,
    /// Length in bytes: the size that the image gives. Without one, the distance to the next symbol at another
    /// address, or to the end of the surrounding section or segment if that is nearer; 0 if no section or segment
    /// surrounds the symbol.
    pub size: u64,
    /// The kind of the symbol.
    pub kind: SymbolKind,
}

/// A symbol as an image lists it, not yet part of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSymbol<'a> {
    /// The name.
    pub name: &'a str,
    /// The address at which it begins.
    pub addr: Gva,
    /// The size that the image gives; `None` if it gives none, or 0.
    pub size: Option<u64>,
    /// The kind of the symbol.
    pub kind: SymbolKind,
}

/// Why a name does not identify exactly one address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// No symbol has that name.
    #[error("unknown symbol `{name}`{}", Offer(.near))]
    Unknown {
        /// The name asked for.
        name: String,
        /// Up to five similar names, best first.
        near: Vec<String>,
    },
    /// Several symbols at different addresses share the name, as static functions may.
    #[error(
        "symbol `{name}` is ambiguous, it is at {}; give the address instead",
        first_few(.at, Gva::to_string)
    )]
    Ambiguous {
        /// The name asked for.
        name: String,
        /// All addresses for which the name may stand, ascending.
        at: Vec<Gva>,
    },
}

/// The error for a malformed pattern.
#[derive(Debug, thiserror::Error)]
#[error("bad pattern")]
pub struct PatternError(#[from] globset::Error);

/// Writes `; did you mean …?`, or nothing if there are no names.
#[derive(Debug)]
pub struct Offer<'a>(pub &'a [String]);

impl fmt::Display for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "; did you mean " } else { ", " })?;
            write!(f, "`{name}`")?;
        }
        f.write_str(if self.0.is_empty() { "" } else { "?" })
    }
}

/// Returns up to five of `names` that are similar to `name`, best first. A similar name differs only in case, is a
/// few edits away, or contains `name`. Returns none if `name` is longer than anything typed by hand.
#[must_use]
pub fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    if name.len() > LONGEST {
        return Vec::new();
    }
    let limit = (name.len() / 3).clamp(1, 4);
    let scored = names.filter_map(|candidate| {
        let is_close = candidate.len().abs_diff(name.len()) <= limit;
        let score = if candidate.eq_ignore_ascii_case(name) {
            0
        } else if is_close && strsim::osa_distance(name, candidate) <= limit {
            strsim::osa_distance(name, candidate)
        } else if name.len() >= SHORTEST_PART && candidate.contains(name) {
            limit
        } else {
            return None;
        };
        Some((score, candidate.len(), candidate))
    });
    let mut best: Vec<_> = scored.collect();
    best.sort_unstable();
    let best = best.into_iter().take(NEAR_MATCHES);
    best.map(|(_, _, candidate)| candidate.to_owned()).collect()
}

/// Length in bytes of the shortest name that is searched for inside other names; shorter ones occur in too many.
const SHORTEST_PART: usize = 4;

/// Returns a text that lists the first few of `all`, each as `written` writes it, and gives the number of the
/// others. A longer list in a message would not help.
pub(crate) fn first_few<T>(all: &[T], written: impl Fn(&T) -> String) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = all.iter().take(SHOWN).map(written).collect();
    let shown = shown.join(", ");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[derive(Clone, Copy)]
struct Entry {
    addr: u64,
    size: u64,
    name: Name,
    kind: SymbolKind,
}

/// Position of a name in the arena.
#[derive(Clone, Copy)]
struct Name {
    start: u32,
    len: u32,
}

/// Maximum length of all names of a table together, in bytes; no kernel has more.
pub(crate) const MOST_TEXT: usize = 64 << 20;

/// All symbols of an image.
#[derive(Default)]
pub struct Symbols {
    /// Sorted by address.
    entries: Vec<Entry>,
    arena: String,
    /// Hash of the name (upper half) and index into `entries` (lower half), sorted.
    by_name: Vec<u64>,
    /// Indices of the `entries` that are parts of functions, sorted by name.
    parts: Vec<u32>,
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Symbols")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Symbols {
    /// Builds the table. `ranges` are the sections of the image or, if it has none, its segments. A symbol without
    /// a size ends where the next one begins, or where its range ends if that is nearer.
    ///
    /// Symbols without a name are left out. Once names would exceed `MOST_TEXT`, all further symbols are left out.
    pub fn new<'a>(raw: impl IntoIterator<Item = RawSymbol<'a>>, ranges: &[Range<u64>]) -> Self {
        let mut table = Self::default();
        for symbol in raw {
            if table.arena.len() + symbol.name.len() > MOST_TEXT {
                break;
            }
            let (Ok(start), Ok(len)) = (
                u32::try_from(table.arena.len()),
                u32::try_from(symbol.name.len()),
            ) else {
                continue;
            };
            if len == 0 {
                continue;
            }
            table.arena.push_str(symbol.name);
            table.entries.push(Entry {
                addr: symbol.addr.0,
                size: symbol.size.unwrap_or(0),
                name: Name { start, len },
                kind: symbol.kind,
            });
        }
        table.entries.sort_by_key(|entry| entry.addr);
        fill_sizes(&mut table.entries, ranges);
        table.by_name = table
            .entries
            .iter()
            .zip(0_u32..)
            .map(|(entry, index)| {
                u64::from(hash(text(&table.arena, entry))) << 32 | u64::from(index)
            })
            .collect();
        table.by_name.sort_unstable();
        let all = table.entries.iter().zip(0_u32..);
        let parts = all.filter(|(entry, _)| whole_of(text(&table.arena, entry)).is_some());
        let mut parts: Vec<u32> = parts.map(|(_, index)| index).collect();
        parts.sort_by(|one, other| table.name_at(*one).cmp(table.name_at(*other)));
        table.parts = parts;
        table
    }

    fn name_at(&self, index: u32) -> &str {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|at| self.entries.get(at));
        entry.map_or("", |entry| text(&self.arena, entry))
    }

    /// Returns the parts of the function `name` that the compiler moved elsewhere. They may jump back into the
    /// function.
    pub fn parts<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Symbol<'a>> {
        let first = self
            .parts
            .partition_point(|index| self.name_at(*index) < name);
        let all = self.parts[first..].iter();
        let near = all.take_while(move |index| self.name_at(**index).starts_with(name));
        let own = near.filter(move |index| whole_of(self.name_at(**index)) == Some(name));
        own.filter_map(|index| {
            let entry = self.entries.get(usize::try_from(*index).ok()?)?;
            Some(self.view(entry))
        })
    }

    /// Returns the number of symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no symbols.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns all symbols, ordered by address.
    pub fn iter(&self) -> impl Iterator<Item = Symbol<'_>> {
        self.entries.iter().map(|entry| self.view(entry))
    }

    /// Looks up the only symbol called `name`. If both code and something else have the name, only the code counts.
    /// Two symbols of that name at one address count as one.
    ///
    /// # Errors
    /// If no symbol has the name: the error suggests similar names. If several have it: the error lists their
    /// addresses.
    pub fn lookup(&self, name: &str) -> Result<Symbol<'_>, LookupError> {
        let found = self.candidates(name);
        match found.as_slice() {
            [] => Err(LookupError::Unknown {
                name: name.to_owned(),
                near: self.near(name),
            }),
            [one] => Ok(*one),
            several => Err(LookupError::Ambiguous {
                name: name.to_owned(),
                at: several.iter().map(|symbol| symbol.addr).collect(),
            }),
        }
    }

    /// Returns the range from the address of the symbol `start` up to that of `end`.
    pub(crate) fn between(&self, start: &str, end: &str) -> Option<Range<u64>> {
        let (start, end) = (self.address_of(start)?.0, self.address_of(end)?.0);
        (start <= end).then_some(start..end)
    }

    /// Returns all symbols for which `name` may stand, ordered by address and one for each address. As in
    /// [`Self::lookup`], only code counts if any code has the name.
    #[must_use]
    pub fn candidates(&self, name: &str) -> Vec<Symbol<'_>> {
        let mut found: Vec<Symbol<'_>> = self.named(name).collect();
        if found.iter().any(|symbol| symbol.kind == SymbolKind::Text) {
            found.retain(|symbol| symbol.kind == SymbolKind::Text);
        }
        found.dedup_by_key(|symbol| symbol.addr);
        found
    }

    /// Returns the address of the symbols called `name`, which may be of any kind; `None` unless all of them are at
    /// one address.
    #[must_use]
    pub fn address_of(&self, name: &str) -> Option<Gva> {
        let mut found = self.named(name);
        let first = found.next()?.addr;
        found.all(|other| other.addr == first).then_some(first)
    }

    /// Returns the symbol that contains `at`, and the offset of `at` in it. If several symbols begin at one
    /// address, prefers code to data, and then the first in the image's order.
    #[must_use]
    pub fn containing(&self, at: Gva) -> Option<(Symbol<'_>, u64)> {
        let after = self.entries.partition_point(|entry| entry.addr <= at.0);
        let addr = self.entries[..after].last()?.addr;
        let first = self.entries.partition_point(|entry| entry.addr < addr);
        let offset = at.0 - addr;
        self.entries[first..after]
            .iter()
            .filter(|entry| offset < entry.size || offset == 0)
            .min_by_key(|entry| entry.kind)
            .map(|entry| (self.view(entry), offset))
    }

    /// Returns the symbols whose names match the shell-style `pattern` (`*`, `?`, `[a-z]`, `{a,b}`), ordered by
    /// address.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn glob(&self, pattern: &str) -> Result<impl Iterator<Item = Symbol<'_>>, PatternError> {
        Ok(self.glob_from(pattern, 0)?.map(|(_, symbol)| symbol))
    }

    /// Like [`Self::glob`], but begins at position `first` in the order of all symbols, and also returns the
    /// position of each match. So a long list can be made piece by piece.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn glob_from(
        &self,
        pattern: &str,
        first: usize,
    ) -> Result<impl Iterator<Item = (usize, Symbol<'_>)>, PatternError> {
        let matcher: GlobMatcher = GlobBuilder::new(pattern).build()?.compile_matcher();
        let all = self.iter().enumerate().skip(first);
        Ok(all.filter(move |(_, symbol)| matcher.is_match(symbol.name)))
    }

    fn view(&self, entry: &Entry) -> Symbol<'_> {
        Symbol {
            name: text(&self.arena, entry),
            addr: Gva(entry.addr),
            size: entry.size,
            kind: entry.kind,
        }
    }

    /// Returns all symbols called exactly `name`, ordered by address.
    fn named<'a>(&'a self, name: &str) -> impl Iterator<Item = Symbol<'a>> {
        let wanted = u64::from(hash(name));
        let first = self.by_name.partition_point(|key| key >> 32 < wanted);
        self.by_name[first..]
            .iter()
            .take_while(move |key| *key >> 32 == wanted)
            .filter_map(|key| {
                let index = key & u64::from(u32::MAX);
                self.entries.get(usize::try_from(index).ok()?)
            })
            .map(|entry| self.view(entry))
            .filter(move |symbol| symbol.name == name)
    }

    /// Returns up to five names of code that are similar to `name`, best first. A similar name is equal except for
    /// leading underscores (`printk` finds `_printk`), has a suffix (`kmem_cache_alloc` finds
    /// `kmem_cache_alloc_noprof`), is a few edits away, has a prefix as wrappers do (`sys_read` finds
    /// `__x64_sys_read`), or contains `name`. Names of generated code come last.
    #[must_use]
    pub fn near(&self, name: &str) -> Vec<String> {
        if name.is_empty() || name.len() > LONGEST {
            return Vec::new();
        }
        let limit = (name.len() / 3).clamp(1, 4);
        let letters = letters(name);
        let mut best: Vec<(bool, usize, usize, &str)> = Vec::new();
        for entry in &self.entries {
            let candidate = text(&self.arena, entry);
            // Suggests only code, and not the padding before a function.
            if entry.kind != SymbolKind::Text
                || ["__pfx_", "__cfi_"]
                    .iter()
                    .any(|mark| candidate.starts_with(mark))
            {
                continue;
            }
            // An edit changes at most two members of the set of letters, and the length by one.
            let close = candidate.len().abs_diff(name.len()) <= limit
                && (letters ^ self::letters(candidate)).count_ones() as usize <= 2 * limit;
            let distance = if close {
                strsim::osa_distance(name, candidate)
            } else {
                usize::MAX
            };
            let goes_on = || {
                let rest = candidate.strip_prefix(name);
                name.len() >= SHORTEST_PART && rest.is_some_and(|it| it.starts_with(['_', '.']))
            };
            let bare = candidate.trim_start_matches('_');
            let score = if bare == name.trim_start_matches('_') || goes_on() {
                0
            } else if distance <= limit {
                distance
            } else if name.len() < SHORTEST_PART {
                continue;
            } else if candidate
                .strip_suffix(name)
                .is_some_and(|rest| rest.ends_with('_'))
            {
                1
            } else if candidate.contains(name) {
                limit
            } else {
                continue;
            };
            let ranked = (is_made(candidate), score, candidate.len(), candidate);
            if let Err(place) = best.binary_search(&ranked)
                && place < NEAR_MATCHES
            {
                best.insert(place, ranked);
                best.truncate(NEAR_MATCHES);
            }
        }
        best.into_iter()
            .map(|(_, _, _, name)| name.to_owned())
            .collect()
    }
}

/// Returns whether `name` is that of generated code (for a tracepoint or a static call), or of the unlikely part of
/// a function.
fn is_made(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "__SCT__",
        "__bpf_trace_",
        "__probestub_",
        "__traceiter_",
        "perf_trace_",
        "trace_event_raw_event_",
        "trace_raw_output_",
    ];
    name.ends_with(".cold") || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the name of the function of which `part` is a part; `None` if `part` is not the name of a part. GCC
/// names parts `NAME.cold`, GCC 8 `NAME.cold.N`, and clang's function splitting `NAME.__part.N`.
fn whole_of(part: &str) -> Option<&str> {
    let unnumbered = part.trim_end_matches(|c: char| c.is_ascii_digit());
    part.strip_suffix(".cold").or_else(|| {
        let is_numbered = unnumbered.len() < part.len();
        let unnumbered = is_numbered.then_some(unnumbered)?;
        unnumbered
            .strip_suffix(".cold.")
            .or_else(|| unnumbered.strip_suffix(".__part."))
    })
}

fn text<'a>(arena: &'a str, entry: &Entry) -> &'a str {
    let start = entry.name.start as usize;
    arena
        .get(start..start + entry.name.len as usize)
        .unwrap_or_default()
}

fn hash(name: &str) -> u32 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    u32::try_from(hasher.finish() >> 32).unwrap_or_default()
}

/// Sets the size of each entry that has none: to the distance to the next address of an entry, or to the end of its
/// range if that is nearer. `entries` must be sorted by address.
fn fill_sizes(entries: &mut [Entry], ranges: &[Range<u64>]) {
    let mut next = None;
    let mut at = None;
    for entry in entries.iter_mut().rev() {
        if at != Some(entry.addr) {
            next = at;
            at = Some(entry.addr);
        }
        if entry.size != 0 {
            continue;
        }
        let end = ranges
            .iter()
            .find(|range| range.contains(&entry.addr))
            .map(|range| range.end);
        let end = match (next, end) {
            (Some(next), Some(end)) => next.min(end),
            // Outside all ranges the distance means nothing: the next symbol may be anywhere.
            (_, end) => end.unwrap_or(entry.addr),
        };
        entry.size = end - entry.addr;
    }
}

/// Returns the set of the bytes in `name`; bytes whose lower six bits are equal count as the same member.
fn letters(name: &str) -> u64 {
    name.bytes()
        .fold(0, |set, byte| set | 1_u64 << (byte & 0x3f))
}

#[cfg(test)]
mod tests;
