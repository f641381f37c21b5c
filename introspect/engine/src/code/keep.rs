//! Limits on the memory kept for probes that have left.

/// Amounts, or limits, of the memory kept for probes that have left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep {
    /// Bytes of detours and stubs.
    pub(crate) code: u64,
    /// Bytes of instances.
    pub(crate) instances: u64,
    /// Number of probes, each of which has counters.
    pub(crate) sources: usize,
}

impl Keep {
    pub(crate) const NOTHING: Self = Self {
        code: 0,
        instances: 0,
        sources: 0,
    };
}

impl Default for Keep {
    /// Returns the growth of the ghosts after which another look is worth its cost.
    fn default() -> Self {
        Self {
            code: 1 << 20,
            instances: 1 << 20,
            sources: 8192,
        }
    }
}
