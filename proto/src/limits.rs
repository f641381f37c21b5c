//! Limits of requests that both ends know.

use crate::failure::Failure;
use crate::v1::ErrorKind;

/// Entries of one batch.
pub const BATCH: usize = 16_384;
/// Bytes of one definition, and of a pattern.
pub const DEFINITION: usize = 1024;
/// Pages of a list. A page has at least one item, and a machine has at most this many probes.
pub const PAGES: usize = 65_536;
/// Types described at once. The longest description has 256 KiB.
pub const TYPES: usize = 16;
/// Bytes of a build id: linkers produce 8 to 20, unless a user chooses the id.
pub const BUILD_ID: usize = 64;

/// Checks that `length` does not exceed `limit`. `what` names what has that length, for the error.
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
