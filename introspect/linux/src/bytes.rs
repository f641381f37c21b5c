//! Reads little-endian words of a file.

/// Reads the signed 32-bit word at offset `at`; `None` if `data` does not contain all of it.
pub(crate) fn i32_at(data: &[u8], at: usize) -> Option<i32> {
    Some(u32_at(data, at)?.cast_signed())
}

/// Reads the 64-bit word at offset `at`; `None` if `data` does not contain all of it.
pub(crate) fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    let word = data.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Reads the 32-bit word at offset `at`; `None` if `data` does not contain all of it.
pub(crate) fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let word = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}
