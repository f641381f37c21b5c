//! Little-endian words of a file.

/// The signed word at `at`.
pub(crate) fn i32_at(data: &[u8], at: usize) -> Option<i32> {
    Some(u32_at(data, at)?.cast_signed())
}

/// The long word at `at`.
pub(crate) fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    let word = data.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// The little-endian word at `at`.
pub(crate) fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let word = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}
