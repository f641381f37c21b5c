//! Errors of arguments.

use hvprobe_spec::ParseError;

/// Returns an error for the part at `column` of the definition.
pub(super) fn refused(column: usize, message: impl Into<String>) -> ParseError {
    ParseError {
        column,
        message: message.into(),
    }
}
