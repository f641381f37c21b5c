//! The place where fetch arguments are evaluated, as far as the definition determines it.

/// Properties of a definition that determine which values exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Whether the probe is a return probe.
    pub(crate) returns: bool,
    /// Whether the probe may be at a function's entry, where the function's arguments exist.
    pub(crate) entry: bool,
}

impl Place {
    /// Returns whether the function's arguments are available.
    pub(super) fn has_arguments(self) -> bool {
        self.entry || self.returns
    }
}
