//! The names that a definition may hold, and how long they may be.

use crate::parse_error::{ParseError, error};
use crate::symbol::symbol_length;

/// The longest event or group name, as in the kernel (`MAX_EVENT_NAME_LEN` less the final NUL).
const LONGEST_NAME: usize = 63;
/// The longest symbol name, as in the kernel (`KSYM_NAME_LEN` less the final NUL).
pub(super) const LONGEST_SYMBOL: usize = 511;
/// The longest name of a module, as in the kernel (`MODULE_NAME_LEN` less the final NUL).
pub(super) const LONGEST_MODULE: usize = 55;

/// What perf and bpftrace call the kernel itself where a module can be named.
pub const KERNEL: &str = "vmlinux";

/// Whether `name` can be given as the name of a symbol.
#[must_use]
pub fn is_symbol_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= LONGEST_SYMBOL && symbol_length(name) == name.len()
}

/// Whether `name` can be given as the name of an event.
#[must_use]
pub fn is_event_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME && identifier(0, name).is_ok()
}

/// An event or group name: `[A-Za-z_][A-Za-z0-9_]*`.
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
