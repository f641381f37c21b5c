//! State of the functions that the engine watches.

use std::collections::BTreeSet;

use hvprobe_linux::image::KernelImage;

use crate::guest::mutex::Mutex;

/// State of the engine's hooks.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// Functions that the engine wanted to watch and could not.
    pub(crate) unhooked: BTreeSet<&'static str>,
    pub(crate) ftrace: Ftrace,
}

/// What is known about the guest's ftrace.
///
/// ```text
///   unseen ──watched from now on, lock free──► at rest ◄──hooks──► patching
///     └──watched from now on, lock held──► perhaps patching ──hook, or lock free──► at rest
/// ```
/// Invariant: while ftrace may be patching, its sites hold nothing of ours. Ftrace holds its lock while it patches.
#[derive(Debug)]
pub(crate) struct Ftrace {
    /// Lock that ftrace holds while it patches (`ftrace_lock` in kernel/trace/ftrace.c); `None` if it cannot be
    /// found.
    pub(crate) lock: Option<Mutex>,
    pub(crate) patches: Patches,
    /// Whether the hooks at the beginning and the end of patching are in place.
    pub(crate) watched: bool,
}

/// Whether the guest's ftrace is patching text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patches {
    No,
    /// Ftrace held its lock when it was not watched yet.
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
