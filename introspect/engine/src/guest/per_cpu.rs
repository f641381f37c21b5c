//! Addressing of per-CPU data.

/// Returns the displacement from the base of GS for per-CPU data at `at`: 32 bits that the processor
/// sign-extends. `at` is a small number, or since Linux 6.15 an address as linked, in the last 2 GiB.
pub(crate) fn per_cpu(at: u64) -> Option<u32> {
    let displacement = i32::try_from(at.cast_signed()).ok()?;
    Some(displacement.cast_unsigned())
}
