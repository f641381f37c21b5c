//! Finds the code of ours that a task may still reach; only the rest is released.
//!
//! A *piece* is code that is released as a whole: the detour of a retired jump, or the stubs of a return probe
//! together with the instances they use. A task reaches a piece
//!
//! - from a *root*: a word of the guest's memory (a return address on a stack, or the saved RIP or a saved
//!   register of interrupted code), a register of a virtual CPU, or a call that the host follows;
//! - from another piece that it can reach. A detour leads to the stubs and instances of its return probes. A
//!   stub leads to the return addresses in its instances. Such a return address is the stub of another return
//!   probe if that probe was entered first; then only the newer stub is on the stack.
//!
//! Invariant: a piece is free only if no path leads from a root to it.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;

/// A step from a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lead {
    /// To the piece with this index.
    Piece(usize),
    /// To an address, in a piece or elsewhere.
    Address(Gva),
}

/// The pieces, and the steps between them.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    /// Length of a piece's code and index of the piece, by the start of the code.
    code: BTreeMap<Gva, (u64, usize)>,
    leads: Vec<Vec<Lead>>,
}

impl Paths {
    /// Adds a piece and returns its index. The code of pieces must not overlap. A piece without code is
    /// reached only from other pieces.
    pub(crate) fn piece(&mut self, code: Option<(Gva, u64)>, leads: Vec<Lead>) -> usize {
        let number = self.leads.len();
        self.leads.push(leads);
        if let Some((start, len)) = code {
            self.code.insert(start, (len, number));
        }
        number
    }

    /// Returns the piece whose code contains `at`.
    fn at(&self, at: Gva) -> Option<usize> {
        let (start, (len, number)) = self.code.range(..=at).next_back()?;
        let offset = at.offset_from(*start)?;
        (offset < *len).then_some(*number)
    }

    /// Returns for each piece, by its index, whether it can be reached: from one of `roots`, or because `seen`
    /// returns true for its code, given as start and length.
    pub(crate) fn reached(
        &self,
        roots: impl IntoIterator<Item = Lead>,
        seen: impl Fn(Gva, u64) -> bool,
    ) -> Vec<bool> {
        let mut reached = vec![false; self.leads.len()];
        let mut ahead: Vec<Lead> = roots.into_iter().collect();
        let code = self.code.iter();
        let code = code.filter(|(start, (len, _))| seen(**start, *len));
        ahead.extend(code.map(|(_, (_, number))| Lead::Piece(*number)));
        while let Some(lead) = ahead.pop() {
            let piece = match lead {
                Lead::Piece(number) => Some(number),
                Lead::Address(at) => self.at(at),
            };
            let Some(number) = piece else { continue };
            if let Some(seen) = reached.get_mut(number)
                && !std::mem::replace(seen, true)
            {
                ahead.extend_from_slice(&self.leads[number]);
            }
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn code(at: u64) -> Option<(Gva, u64)> {
        Some((Gva(at), 0x10))
    }

    #[test]
    fn what_only_another_stub_leads_to_is_reached() {
        let mut paths = Paths::default();
        let outer = paths.piece(code(0x100), vec![Lead::Address(Gva(0xdead))]);
        let inner = paths.piece(code(0x200), vec![Lead::Address(Gva(0x108))]);
        let idle = paths.piece(code(0x300), vec![Lead::Piece(outer)]);
        let none = paths.piece(None, Vec::new());
        let roots = [0x20f, 0x210, 0xff].map(|at| Lead::Address(Gva(at)));
        let reached = paths.reached(roots, |start, _| start == Gva(0x300));
        assert_eq!(
            [outer, inner, idle, none].map(|n| reached[n]),
            [true, true, true, false]
        );
        assert_eq!(paths.reached([], |_, _| false), [false; 4]);
    }

    #[test]
    fn pieces_in_a_circle_are_reached_together_or_not_at_all() {
        let mut paths = Paths::default();
        paths.piece(code(0x100), vec![Lead::Address(Gva(0x200))]);
        paths.piece(code(0x200), vec![Lead::Address(Gva(0x100))]);
        assert_eq!(paths.reached([], |_, _| false), [false, false]);
        assert_eq!(paths.reached([Lead::Piece(1)], |_, _| false), [true, true]);
    }

    proptest! {
        /// Compares with a step-by-step walk from each root.
        #[test]
        fn reached_is_what_a_walk_comes_to(
            leads in prop::collection::vec(prop::collection::vec(0..12_usize, 0..4), 1..12),
            roots in prop::collection::vec(0..12_usize, 0..3),
        ) {
            let at = |number: usize| Gva(0x100 * number as u64 + 8);
            let mut paths = Paths::default();
            for (number, to) in leads.iter().enumerate() {
                let to = to.iter().map(|to| Lead::Address(at(*to))).collect();
                paths.piece(code(0x100 * number as u64), to);
            }
            let mut walked = vec![false; 12];
            roots.iter().for_each(|root| walked[*root] = true);
            for _ in 0..12 {
                for (number, to) in leads.iter().enumerate() {
                    if walked[number] {
                        to.iter().for_each(|to| walked[*to] = true);
                    }
                }
            }
            walked.truncate(leads.len());
            let roots = roots.into_iter().map(|n| Lead::Address(at(n)));
            prop_assert_eq!(paths.reached(roots, |_, _| false), walked);
        }
    }
}
