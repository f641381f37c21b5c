//! Looking through all of the guest's memory for addresses of code.
//!
//! Return addresses and the instruction pointers of interrupted tasks lie on stacks at multiples of 8
//! (SDM vol. 3, 6.14.2), so an address that no aligned word holds, while the virtual CPUs stand
//! still elsewhere, is one that nobody is going to.

use std::collections::HashSet;
use std::ops::Range;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;

/// The words of the guest's memory, and those of `rips`, that lie in `within` and are `wanted`;
/// `None` if its memory cannot be looked through.
pub(crate) fn addresses(
    mem: &dyn PhysMemory,
    rips: impl IntoIterator<Item = Gva>,
    within: &Range<Gva>,
    wanted: impl Fn(Gva) -> bool,
) -> Option<HashSet<Gva>> {
    let ranges = mem.ranges();
    if ranges.is_empty() {
        return None;
    }
    let mut found = HashSet::new();
    let len = within.end.offset_from(within.start).unwrap_or(0);
    let is_within = |at: u64| at.wrapping_sub(within.start.0) < len;
    let mut note = |at: u64| {
        if is_within(at) && wanted(Gva(at)) {
            found.insert(Gva(at));
        }
    };
    rips.into_iter().for_each(|at| note(at.0));
    let mut page = [0; 4096];
    for (start, len) in ranges {
        for offset in (0..len).step_by(page.len()) {
            mem.read(start.wrapping_add(offset), &mut page).ok()?;
            let (words, _) = page.as_chunks();
            // Nearly all pages hold none, and the virtual CPUs are waiting: a loop without branches.
            let any = |any, word: &[u8; 8]| any | is_within(u64::from_le_bytes(*word));
            if words.iter().fold(false, any) {
                words
                    .iter()
                    .for_each(|word| note(u64::from_le_bytes(*word)));
            }
        }
    }
    Some(found)
}
