//! How arguments are refused.

use hvprobe_spec::ParseError;

/// Refuses what stands at `column` of the definition.
pub(super) fn refused(column: usize, message: impl Into<String>) -> ParseError {
    ParseError {
        column,
        message: message.into(),
    }
}
