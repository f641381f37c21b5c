//! Intervals between looks for tasks under a jump.

/// Time until the next look, in calls of [`Registry::retry`](crate::Registry::retry).
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
