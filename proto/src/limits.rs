//! Limits of requests that both ends know.

use crate::failure::Failure;
use crate::v1::ErrorKind;

/// Maximum number of entries in one batch.
pub const BATCH: usize = 16_384;
/// Maximum length of a definition or a pattern, in bytes.
pub const DEFINITION: usize = 1024;
/// Maximum number of pages in a list. A page has at least one item, and a machine has at most this many probes.
pub const PAGES: usize = 65_536;
/// Maximum number of types that are described at once. The longest description has 256 KiB.
pub const TYPES: usize = 16;
/// Maximum length of a build id, in bytes. Linkers produce 8 to 20 bytes, unless a user chooses the id.
pub const BUILD_ID: usize = 64;

/// Checks that `length` does not exceed `limit`. `what` names the checked item in the error.
///
/// # Errors
/// When it does.
pub fn at_most(what: &str, length: usize, limit: usize) -> Result<(), Failure> {
    if length <= limit {
        return Ok(());
    }
    let message = format!("{what} is too large: {length}, at most {limit}");
    Err(Failure::invalid(ErrorKind::TooLarge, message))
}
