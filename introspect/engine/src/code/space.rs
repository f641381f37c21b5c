//! Free bytes of an address range.
//!
//! Invariant: pieces in use never overlap; a released piece is merged with its free neighbours.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;

/// Free pieces of an address range.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Lengths of the free pieces, by their starts; no two touch.
    free: BTreeMap<u64, u64>,
}

impl Space {
    /// Creates a space in which all `len` bytes at `start` are free.
    pub(crate) fn new(start: Gva, len: u64) -> Self {
        Self {
            free: BTreeMap::from([(start.0, len)]),
        }
    }

    /// Returns the number of free bytes.
    pub(crate) fn free(&self) -> u64 {
        self.free.values().sum()
    }

    /// Takes `len` bytes at the first address that `choose` finds in a free piece. `choose` gets the start of
    /// the piece and the last address at which `len` bytes still fit.
    pub(crate) fn take(
        &mut self,
        len: u64,
        choose: impl Fn(Gva, Gva) -> Option<Gva>,
    ) -> Option<Gva> {
        let pieces = self.free.iter().filter(|(_, size)| **size >= len);
        let mut places = pieces.map(|(start, size)| (*start, *size, start + size - len));
        let (start, size, at) = places.find_map(|(start, size, last)| {
            let at = choose(Gva(start), Gva(last))?.0;
            (start..=last).contains(&at).then_some((start, size, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + len < start + size {
            self.free.insert(at + len, start + size - at - len);
        }
        Some(Gva(at))
    }

    /// Releases the `len` bytes at `at`, which must be in use.
    pub(crate) fn release(&mut self, at: Gva, len: u64) {
        let (mut start, mut end) = (at.0, at.0 + len);
        if let Some(behind) = self.free.remove(&end) {
            end += behind;
        }
        if let Some((&before, &size)) = self.free.range(..start).next_back()
            && before + size == start
        {
            start = before;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a function that finds the first multiple of `align` in a piece.
    fn aligned(align: u64) -> impl Fn(Gva, Gva) -> Option<Gva> {
        move |first, last| Some(Gva(first.0.next_multiple_of(align))).filter(|at| *at <= last)
    }

    #[test]
    fn a_space_is_used_to_its_last_byte_and_whole_afterwards() {
        let mut space = Space::new(Gva(0x1000), 64);
        let taken: Vec<_> = (0..4).map(|_| space.take(16, aligned(16))).collect();
        assert_eq!(
            taken,
            [0x1000, 0x1010, 0x1020, 0x1030].map(|at| Some(Gva(at)))
        );
        assert_eq!(space.take(1, aligned(1)), None);
        for at in [0x1020, 0x1000, 0x1030, 0x1010] {
            space.release(Gva(at), 16);
        }
        assert_eq!(space.take(64, aligned(64)), Some(Gva(0x1000)));
    }

    #[test]
    fn a_place_outside_what_was_offered_is_not_taken() {
        let mut space = Space::new(Gva(0x1000), 64);
        assert_eq!(space.take(16, |_, last| Some(last.wrapping_add(1))), None);
        assert_eq!(space.take(16, |_, last| Some(last)), Some(Gva(0x1030)));
    }

    proptest! {
        #[test]
        fn pieces_never_overlap(steps in prop::collection::vec((any::<bool>(), 1..80_u64, 0..6_u32), 1..80)) {
            let mut space = Space::new(Gva(0), 1024);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (take, len, align) in steps {
                if take {
                    if let Some(at) = space.take(len, aligned(1 << align)) {
                        prop_assert!(at.0 + len <= 1024);
                        let apart = |(start, size): &(u64, u64)| at.0 + len <= *start || start + size <= at.0;
                        prop_assert!(taken.iter().all(apart));
                        taken.push((at.0, len));
                    }
                } else if !taken.is_empty() {
                    let index = usize::try_from(len).unwrap() % taken.len();
                    let (at, len) = taken.swap_remove(index);
                    space.release(Gva(at), len);
                }
            }
            for (at, len) in taken {
                space.release(Gva(at), len);
            }
            prop_assert_eq!(space.take(1024, aligned(1)), Some(Gva(0)));
        }
    }
}
