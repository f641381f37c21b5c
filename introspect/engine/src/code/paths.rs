//! Which code of ours a task may still come to, so that only the rest is given to others.
//!
//! Code that is given back as a whole is a *piece*: the detour of a former jump, or the stubs of a
//! return probe together with the instances they use. A task comes to a piece
//!
//! - from a *root*: a word of the guest's memory (a return address on a stack, the RIP or a register
//!   of something that was interrupted), a register of a virtual CPU, a call that the host follows;
//! - from another piece that it can come to. A detour leads to the stubs and instances of its return
//!   probes. A stub leads to where its instances return to; that is another return probe's stub if
//!   that probe was entered first, and then the newer stub is all that is seen on the stack.
//!
//! Invariant: a piece is free only if no path leads from a root to it.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;

/// A step from a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lead {
    /// To a piece, by its number.
    Piece(usize),
    /// To an address, which may lie in a piece or elsewhere.
    Address(Gva),
}

/// The pieces there are, and what leads where.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    /// By where its code begins: the length of the code, and the piece's number.
    code: BTreeMap<Gva, (u64, usize)>,
    leads: Vec<Vec<Lead>>,
}

impl Paths {
    /// Adds a piece; returns its number. The code of pieces does not overlap. One without code is
    /// only come to from others.
    pub(crate) fn piece(&mut self, code: Option<(Gva, u64)>, leads: Vec<Lead>) -> usize {
        let number = self.leads.len();
        self.leads.push(leads);
        if let Some((start, len)) = code {
            self.code.insert(start, (len, number));
        }
        number
    }

    /// The piece whose code `at` lies in.
    fn at(&self, at: Gva) -> Option<usize> {
        let (start, (len, number)) = self.code.range(..=at).next_back()?;
        let offset = at.offset_from(*start)?;
        (offset < *len).then_some(*number)
    }

    /// Whether each piece can be come to, by its number: from one of `roots`, or from where so many
    /// bytes of code from an address on are `seen`.
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
        /// As a walk from each root, one step after the other, would find it.
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
