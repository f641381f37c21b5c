//! What is known of the functions that the engine watches.

use std::collections::BTreeSet;

/// What is watched, and what comes of it.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    /// Functions that the engine wanted to watch and could not.
    pub(crate) unhooked: BTreeSet<&'static str>,
    /// The guest's ftrace is patching text: its sites hold none of our int3s meanwhile.
    pub(crate) ftrace_patches: bool,
}
