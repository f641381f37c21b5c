//! Pages of RAM that were ever touched: those that the host has allocated, in memory or swapped out.
//!
//! Invariant: a page that is not returned has always read as zero, up to the call.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use hvprobe_arch::Gpa;

use super::slot::Slot;

/// File in which the host kernel has a word for each page of this process
/// (Documentation/admin-guide/mm/pagemap.rst). Bit 63 is set if the page is in memory, bit 62 if it is swapped out.
const PAGEMAP: &str = "/proc/self/pagemap";
const PAGE: u64 = 4096;
const WORD: usize = 8;
const GIVEN: u64 = 3 << 62;
/// Number of words per read.
const AT_ONCE: usize = 8192;

/// Returns the touched pages of `slots`, as guest physical addresses and lengths in bytes.
///
/// # Errors
/// When pagemap cannot be read.
pub(super) fn touched<'a>(slots: impl Iterator<Item = &'a Slot>) -> io::Result<Vec<(Gpa, u64)>> {
    let pagemap = File::open(PAGEMAP)?;
    let mut bytes = vec![0; AT_ONCE * WORD];
    let mut found: Vec<(Gpa, u64)> = Vec::new();
    for slot in slots {
        // Page number of the slot's first byte in this process.
        let first = slot.map.as_ptr().addr() as u64 / PAGE;
        let pages = slot.len() / PAGE;
        for number in (0..pages).step_by(AT_ONCE) {
            let count = usize::try_from(pages - number).map_or(AT_ONCE, |left| left.min(AT_ONCE));
            let words = &mut bytes[..count * WORD];
            pagemap.read_exact_at(words, (first + number) * WORD as u64)?;
            for (word, page) in words.as_chunks().0.iter().zip(number..) {
                if u64::from_le_bytes(*word) & GIVEN == 0 {
                    continue;
                }
                let at = Gpa(slot.start).wrapping_add(page * PAGE);
                match found.last_mut() {
                    Some((start, len)) if start.wrapping_add(*len) == at => *len += PAGE,
                    _ => found.push((at, PAGE)),
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::mem::PhysMemory;

    use crate::memory::GuestRam;

    use super::*;

    #[test]
    fn pages_are_reported_from_when_they_are_touched() {
        const GIB: u64 = 1 << 30;
        // RAM on both sides of the hole below 4 GiB.
        let ram = GuestRam::with_limits(4 * GIB, 1 << 20, 8 * GIB, 48).unwrap();
        assert_eq!(ram.touched(), []);
        let all: u64 = ram.ranges().iter().map(|(_, len)| len).sum();
        let places = [5 * PAGE + 7, GIB, 4 * GIB + 3 * PAGE].map(Gpa);
        for at in places {
            ram.write(at, &[1]).unwrap();
        }
        let touched = ram.touched();
        for at in places {
            let is_in = |(start, len): &(Gpa, u64)| (start.0..start.0 + len).contains(&at.0);
            assert!(touched.iter().any(is_in), "{at}: {touched:?}");
        }
        // The host may allocate more at a time than was touched.
        let sum: u64 = touched.iter().map(|(_, len)| len).sum();
        assert!(sum <= 3 * (2 << 20) && sum < all, "{touched:?}");
    }
}
