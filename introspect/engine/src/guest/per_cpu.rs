//! Per-CPU data, as code names it.

/// What code adds to the base of GS, 32 bits that the processor extends by their sign, for per-CPU
/// data that is `at` beyond it: a small number, or since Linux 6.15 an address as linked, within the
/// last 2 GiB.
pub(crate) fn per_cpu(at: u64) -> Option<u32> {
    let displacement = i32::try_from(at.cast_signed()).ok()?;
    Some(displacement.cast_unsigned())
}
