//! What is known of the functions that the engine watches.

use std::collections::BTreeSet;

use hvprobe_linux::image::KernelImage;

use crate::guest::mutex::Mutex;

/// What is watched, and what comes of it.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// Functions that the engine wanted to watch and could not.
    pub(crate) unhooked: BTreeSet<&'static str>,
    pub(crate) ftrace: Ftrace,
}

/// The guest's ftrace, as far as it is known.
///
/// ```text
///   unseen ──it is watched from now on, and holds no lock──► at rest ◄──told──► patching
///     └──it is watched from now on, and holds its lock──► perhaps patching ──told, or the lock is free──► at rest
/// ```
/// Invariant: where it may be patching, its sites hold nothing of ours. It patches with its lock held.
#[derive(Debug)]
pub(crate) struct Ftrace {
    /// What it holds while it patches (`ftrace_lock` in kernel/trace/ftrace.c), unless that cannot be found.
    pub(crate) lock: Option<Mutex>,
    pub(crate) patches: Patches,
    /// Whether it is told when it begins and ends.
    pub(crate) watched: bool,
}

/// Whether the guest's ftrace is patching text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patches {
    No,
    /// It had its lock when it was not watched yet.
    Perhaps,
    Yes,
}

impl Hooks {
    pub(crate) fn of(image: &KernelImage) -> Self {
        Self {
            unhooked: BTreeSet::new(),
            ftrace: Ftrace {
                lock: Mutex::of(image, "ftrace_lock"),
                patches: Patches::No,
                watched: false,
            },
        }
    }
}
