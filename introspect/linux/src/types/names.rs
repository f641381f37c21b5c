//! From names to the ids of types.
//!
//! What is kept true: entries are sorted by the hash of the name and then by id, and no name owns an
//! allocation: who looks one up compares the names of the few whose hash is the same.

use std::hash::Hasher;

use rustc_hash::FxHasher;

/// The index.
#[derive(Default)]
pub(super) struct Names {
    /// Hash of the name, and id.
    entries: Vec<(u32, u32)>,
}

impl Names {
    /// Takes in the types that have a name.
    pub(super) fn new<'a>(named: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut entries: Vec<_> = named.map(|(name, id)| (hash(name), id)).collect();
        entries.sort_unstable();
        Self { entries }
    }

    /// The ids of types that may have this name, ascending.
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
