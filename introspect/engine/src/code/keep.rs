//! How much of the memory of probes that have left is kept.

/// How much there is, or may be, of probes that have left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep {
    /// Bytes of detours and stubs.
    pub(crate) code: u64,
    /// Bytes of instances.
    pub(crate) instances: u64,
    /// Probes, each of which has counters.
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
    /// With so much more than when it was last looked through the guest's memory for who may still
    /// come there, it is worth another look.
    fn default() -> Self {
        Self {
            code: 1 << 20,
            instances: 1 << 20,
            sources: 8192,
        }
    }
}
