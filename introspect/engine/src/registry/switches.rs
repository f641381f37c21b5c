//! The global switches.

/// The global switches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switches {
    /// Whether enabled probes are armed.
    pub(crate) armed: bool,
    /// Whether jumps are used where they are possible.
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
