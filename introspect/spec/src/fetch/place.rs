//! Where fetch arguments are evaluated, as far as the definition says it.

/// What the rest of a definition says about the values there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Whether it is a return probe.
    pub(crate) returns: bool,
    /// Whether it may be at a function's entry, so that there are its arguments.
    pub(crate) entry: bool,
}

impl Place {
    /// Whether a function's arguments can be had.
    pub(super) fn has_arguments(self) -> bool {
        self.entry || self.returns
    }
}
