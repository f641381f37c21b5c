//! What a jump displaces, and whether anything would notice.
//!
//! A jump is five bytes. Where it covers more than one instruction, its bytes 1 to 4 hold what was
//! the beginning of instructions (*interior* boundaries), and the guest may arrive at one in two
//! ways: by a branch, which [`Span::find`] excludes by looking at the whole function; or because it
//! was interrupted just there, and returns. For the latter, the displacement is chosen so that the
//! byte there is `0xcc` ([`Span::fits`]): an int3 whose hit the host translates
//! ([`Detour::resume`](super::Detour::resume)). That can be done for bytes 1 and 2; bytes 3 and 4
//! would ask for a distance of their own. There it must be known that no one was interrupted
//! ([`Span::needs_quiescence`]).

mod copy;
mod distance;
mod scan;
#[cfg(test)]
mod tests;
mod unfit;

use copy::Copying;
pub(super) use copy::{here, jump};
use distance::distance;
pub use unfit::Unfit;

use crate::Gva;
use crate::insn::{Displaced, Refusal, classify};
use crate::trap::INT3;
use std::ops::Range;

/// The length of a jump in bytes.
pub const JUMP: usize = 5;
/// The same as a distance.
const REACH: u64 = JUMP as u64;
/// `jmp rel32`.
const JMP_REL32: u8 = 0xe9;
/// What targets are multiples of where the displacement leaves a choice.
const ALIGN: u64 = 16;

/// The instructions that a jump displaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    at: Gva,
    bytes: Vec<u8>,
    instructions: Vec<(Displaced, Copying)>,
}

/// A jump does not reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a jump at {at} does not reach {target}, beyond ±2 GiB")]
pub struct OutOfReach {
    /// Where the jump is to be.
    pub at: Gva,
    /// Where it is to lead.
    pub target: Gva,
}

impl Span {
    /// What a jump at `at` displaces. `code` is the whole function at `start`, as it was before
    /// anything was planted in it.
    ///
    /// Where more than one instruction is displaced, all of `code` is looked at; parts of the
    /// function elsewhere (`.cold`) are the caller's to check with
    /// [`check_branches`](Self::check_branches), and places where exceptions continue with
    /// [`is_interior`](Self::is_interior).
    ///
    /// # Errors
    /// Why that cannot be done.
    pub fn find(code: &[u8], start: Gva, at: Gva) -> Result<Self, Unfit> {
        let none = Unfit::NotAnInstruction { at, start };
        let end = start.wrapping_add(u64::try_from(code.len()).unwrap_or(u64::MAX));
        let from = at
            .offset_from(start)
            .and_then(|offset| usize::try_from(offset).ok())
            .ok_or(none)?;
        let own = code.get(from..).filter(|own| !own.is_empty()).ok_or(none)?;
        let mut span = Self {
            at,
            bytes: Vec::new(),
            instructions: Vec::new(),
        };
        while span.bytes.len() < JUMP {
            let rest = &own[span.bytes.len()..];
            let at_next = span.end();
            if let Some((last, Copying::Call { .. } | Copying::IndirectCall { .. })) =
                span.instructions.last()
            {
                return Err(Unfit::Call { at: last.at() });
            }
            let displaced = classify(rest, at_next).map_err(|reason| match reason {
                Refusal::Truncated { .. } => Unfit::PastEnd { at, end },
                reason => Unfit::Refused {
                    at: at_next,
                    reason,
                },
            })?;
            let copying = Copying::of(&displaced)?;
            span.bytes.extend_from_slice(displaced.bytes());
            span.instructions.push((displaced, copying));
        }
        if span.instructions.len() > 1 {
            if !scan::is_boundary(code, start, at) {
                return Err(none);
            }
            span.check_branches(code, start)?;
        }
        Ok(span)
    }

    /// Where the jump goes.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// The address after the last instruction displaced, where the function continues.
    #[must_use]
    pub fn end(&self) -> Gva {
        self.at
            .wrapping_add(u64::try_from(self.bytes.len()).unwrap_or(u64::MAX))
    }

    /// The instructions' bytes: from 5 to 19.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The instructions.
    pub fn instructions(&self) -> impl Iterator<Item = &Displaced> {
        self.instructions.iter().map(|(displaced, _)| displaced)
    }

    pub(super) fn copies(&self) -> impl Iterator<Item = &(Displaced, Copying)> {
        self.instructions.iter()
    }

    /// The instructions' beginnings but the first, as offsets from 1 to 4.
    pub fn interior(&self) -> impl Iterator<Item = u64> {
        self.instructions().skip(1).map(|displaced| {
            // The last instruction begins within the jump, or there were enough bytes before it.
            displaced.at().0.wrapping_sub(self.at.0)
        })
    }

    /// Whether going on at `target` would mean going on inside the jump, or inside an instruction
    /// that it displaces.
    #[must_use]
    pub fn is_interior(&self, target: Gva) -> bool {
        let end = self.bytes.len();
        target
            .offset_from(self.at)
            .and_then(|offset| usize::try_from(offset).ok())
            .is_some_and(|offset| (1..end).contains(&offset))
    }

    /// Checks that no branch of `code`, at `start`, may lead inside the jump.
    ///
    /// # Errors
    /// The branch that may, or where such a branch might hide.
    pub fn check_branches(&self, code: &[u8], start: Gva) -> Result<(), Unfit> {
        scan::branches(code, start, |target| self.is_interior(target))
    }

    /// The jump to `target` that takes the instructions' place.
    ///
    /// # Errors
    /// When `target` is out of its reach.
    pub fn jump(&self, target: Gva) -> Result<[u8; JUMP], OutOfReach> {
        let from = self.at.wrapping_add(REACH);
        let [a, b, c, d] = distance(from, target).ok_or(OutOfReach {
            at: self.at,
            target,
        })?;
        Ok([JMP_REL32, a, b, c, d])
    }

    /// Whether a jump to `target` reaches it and is an int3 at each interior boundary where that can
    /// be had.
    #[must_use]
    pub fn fits(&self, target: Gva) -> bool {
        let (mask, value) = self.shape();
        let displacement = target.0.wrapping_sub(self.at.wrapping_add(REACH).0);
        displacement & mask == value && self.jump(target).is_ok()
    }

    /// Whether there are interior boundaries that no choice of the target makes an int3, so that
    /// the jump may only be written when no one was interrupted there.
    #[must_use]
    pub fn needs_quiescence(&self) -> bool {
        self.interior().any(|offset| offset > 2)
    }

    /// Addresses in `within` that [fit](Self::fits), in ascending order; multiples of 16 where the
    /// low byte is free.
    pub fn targets(&self, within: Range<Gva>) -> impl Iterator<Item = Gva> {
        let (mask, value) = self.shape();
        let Range { start, end } = within;
        let shaped = self.at.wrapping_add(REACH).wrapping_add(value).0;
        // Fitting addresses repeat every `period`, in windows of `len` bytes: nothing is given, or
        // the displacement's second byte is, or its lowest, or both.
        let (first, period, len) = match mask {
            0 => (start.0, u64::MAX, u64::MAX),
            0xff00 => (shaped, 0x1_0000, 0x100),
            0xff => (shaped, 0x100, 1),
            _ => (shaped, 0x1_0000, 1),
        };
        let step = if len == 1 { 1 } else { ALIGN };
        // The window that `start` is in, or the next.
        let skipped = start.0.wrapping_sub(first) % period;
        let window = start.0.checked_sub(skipped);
        let windows = std::iter::successors(window, move |window| window.checked_add(period))
            .take_while(move |window| *window < end.0);
        windows
            .flat_map(move |window| {
                let from = window.max(start.0).checked_next_multiple_of(step);
                let to = window.saturating_add(len).min(end.0);
                std::iter::successors(from, move |target| target.checked_add(step))
                    .take_while(move |target| *target < to)
            })
            .map(Gva)
            .filter(|target| self.fits(*target))
    }

    /// Which bits of the displacement are given, and what they are.
    fn shape(&self) -> (u64, u64) {
        self.interior()
            .filter(|offset| *offset <= 2)
            .fold((0, 0), |(mask, value), offset| {
                let shift = 8 * (offset - 1);
                (mask | 0xff << shift, value | u64::from(INT3) << shift)
            })
    }
}
