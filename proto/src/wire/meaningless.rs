//! Errors of conversions from messages.

/// Why a message means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Meaningless {
    /// A required field is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An enumeration has no such value.
    #[error("{number} is no {what}")]
    Unknown {
        /// Name of the enumeration.
        what: &'static str,
        /// The value.
        number: i32,
    },
    /// A number is too large for the engine.
    #[error("{what} of {number} is too large")]
    TooLarge {
        /// What the number counts.
        what: &'static str,
        /// The number.
        number: u32,
    },
}
