//! Reach of branches.

use crate::Gva;
use crate::detour::error::BuildError;

/// Returns the displacement from `from`, the end of a branch, to `target`; `None` if that is out of reach.
pub(super) fn distance(from: Gva, target: Gva) -> Option<[u8; 4]> {
    i32::try_from(target.0.wrapping_sub(from.0).cast_signed())
        .ok()
        .map(i32::to_le_bytes)
}

/// Like [`distance`], for a branch in the detour at `at`. The error names that detour.
pub(super) fn reach(at: Gva, from: Gva, target: Gva) -> Result<[u8; 4], BuildError> {
    distance(from, target).ok_or(BuildError::OutOfReach { target, at })
}
