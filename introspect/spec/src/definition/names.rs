//! Names in a definition, and their maximum lengths.

use crate::parse_error::{ParseError, error};
use crate::symbol::symbol_length;

/// Maximum length of an event or group name, as in the kernel (`MAX_EVENT_NAME_LEN` less the final NUL).
const LONGEST_NAME: usize = 63;
/// Maximum length of a symbol name, as in the kernel (`KSYM_NAME_LEN` less the final NUL).
pub(super) const LONGEST_SYMBOL: usize = 511;
/// Maximum length of a module's name, as in the kernel (`MODULE_NAME_LEN` less the final NUL).
pub(super) const LONGEST_MODULE: usize = 55;

/// Name that perf and bpftrace use for the kernel itself, in place of a module's name.
pub const KERNEL: &str = "vmlinux";

/// Returns whether `name` is valid as the name of a symbol.
#[must_use]
pub fn is_symbol_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= LONGEST_SYMBOL && symbol_length(name) == name.len()
}

/// Returns whether `name` is valid as the name of an event.
#[must_use]
pub fn is_event_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME && identifier(0, name).is_ok()
}

/// Checks an event or group name: `[A-Za-z_][A-Za-z0-9_]*`.
pub(super) fn identifier(column: usize, name: &str) -> Result<(), ParseError> {
    if name.is_empty() {
        return error(
            column,
            "missing name after `:`; leave out the `:` or name it",
        );
    }
    if name.len() > LONGEST_NAME {
        return error(
            column + LONGEST_NAME,
            format!("name longer than {LONGEST_NAME} characters"),
        );
    }
    for (i, c) in name.char_indices() {
        if !(c == '_' || c.is_ascii_alphabetic() || i > 0 && c.is_ascii_digit()) {
            return error(
                column + i,
                format!(
                    "`{c}` cannot be here: a name has letters, digits and `_`, and starts with no digit"
                ),
            );
        }
    }
    Ok(())
}
