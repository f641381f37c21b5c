//! An index from names to the ids of types.
//!
//! Invariants: entries are sorted by the hash of the name, and then by id. No name owns an allocation: a look-up
//! returns the few entries with the same hash, and its caller compares their names.

use std::hash::Hasher;

use rustc_hash::FxHasher;

/// An index of types by name.
#[derive(Default)]
pub(super) struct Names {
    /// Hash of the name, and id of the type; sorted.
    entries: Vec<(u32, u32)>,
}

impl Names {
    /// Builds the index from the names and ids of types.
    pub(super) fn new<'a>(named: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut entries: Vec<_> = named.map(|(name, id)| (hash(name), id)).collect();
        entries.sort_unstable();
        Self { entries }
    }

    /// Returns the ids of the types that may have this name, ascending.
    pub(super) fn candidates(&self, name: &str) -> impl Iterator<Item = u32> {
        let wanted = hash(name);
        let first = self.entries.partition_point(|(hash, _)| *hash < wanted);
        self.entries[first..]
            .iter()
            .take_while(move |(hash, _)| *hash == wanted)
            .map(|(_, id)| *id)
    }
}

fn hash(name: &str) -> u32 {
    let mut hasher = FxHasher::default();
    hasher.write(name.as_bytes());
    u32::try_from(hasher.finish() >> 32).unwrap_or_default()
}
