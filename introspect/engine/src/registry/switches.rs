//! What is turned on and off as a whole.

/// The global switches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switches {
    /// Enabled probes are armed.
    pub(crate) armed: bool,
    /// Jumps are used where they can be.
    pub(crate) optimize: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            armed: true,
            optimize: true,
        }
    }
}
