//! Sizes of messages that the limits distinguish.

/// Maximum length of a small message, in bytes.
pub(super) const SMALL: usize = 128 << 10;
/// Maximum number of bytes that a small message may take once decoded.
pub(super) const LIGHT: usize = 1 << 20;
/// Maximum number of bytes that any message may take once decoded: twice what the largest batch of probes takes,
/// with 32 captures each.
pub(super) const HEAVIEST: usize = 128 << 20;
