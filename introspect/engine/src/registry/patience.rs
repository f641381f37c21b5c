//! When to look again whether somebody is under a jump.

/// When to look next, in calls of [`Registry::retry`](crate::Registry::retry).
#[derive(Debug)]
pub(crate) struct Patience {
    pub(crate) left: u32,
    pub(crate) next: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self { left: 1, next: 2 }
    }
}
