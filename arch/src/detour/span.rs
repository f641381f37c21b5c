//! What a jump displaces, and whether the guest would notice.
//!
//! A jump takes five bytes. If it covers more than one instruction, some of its bytes 1 to 4 are where instructions
//! began: these are *interior* boundaries. The guest may arrive at such a boundary in two ways:
//!
//! - By a branch. [`Span::find`] excludes this: it checks the whole function.
//! - By a return, because it was interrupted at the boundary. So the displacement is chosen such that the byte at
//!   the boundary is `0xcc` ([`Span::fits`]): an int3 whose hit the host translates
//!   ([`Detour::resume`](super::Detour::resume)). That is possible for bytes 1 and 2. Bytes 3 and 4 would dictate
//!   the distance of the detour. For a boundary there, it must be known that no task was interrupted at it
//!   ([`Span::needs_quiescence`]).

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

/// Length of a jump in bytes.
pub const JUMP: usize = 5;
/// [`JUMP`] as a distance.
const REACH: u64 = JUMP as u64;
/// `jmp rel32`.
const JMP_REL32: u8 = 0xe9;
/// Alignment of targets where the displacement leaves a choice.
const ALIGN: u64 = 16;

/// The instructions that a jump displaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    at: Gva,
    bytes: Vec<u8>,
    instructions: Vec<(Displaced, Copying)>,
}

/// The target is out of reach of a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a jump at {at} does not reach {target}, beyond ±2 GiB")]
pub struct OutOfReach {
    /// Address of the jump.
    pub at: Gva,
    /// Target of the jump.
    pub target: Gva,
}

impl Span {
    /// Determines what a jump at `at` displaces. `code` is the whole function at `start`, as it was before
    /// anything was planted in it.
    ///
    /// If more than one instruction is displaced, all of `code` is checked. The caller has to check parts of the
    /// function that are elsewhere (`.cold`), with [`check_branches`](Self::check_branches), and addresses at
    /// which execution continues after exceptions, with [`is_interior`](Self::is_interior).
    ///
    /// # Errors
    /// When a jump is not possible at `at`, with the reason.
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

    /// Returns the address of the jump.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns the address after the last displaced instruction, where the function continues.
    #[must_use]
    pub fn end(&self) -> Gva {
        self.at
            .wrapping_add(u64::try_from(self.bytes.len()).unwrap_or(u64::MAX))
    }

    /// Returns the bytes of the displaced instructions: at least 5, at most 19.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Iterates over the displaced instructions.
    pub fn instructions(&self) -> impl Iterator<Item = &Displaced> {
        self.instructions.iter().map(|(displaced, _)| displaced)
    }

    pub(super) fn copies(&self) -> impl Iterator<Item = &(Displaced, Copying)> {
        self.instructions.iter()
    }

    /// Iterates over the interior boundaries: the offsets, from 1 to 4, of all displaced instructions but the
    /// first.
    pub fn interior(&self) -> impl Iterator<Item = u64> {
        self.instructions().skip(1).map(|displaced| {
            // Every instruction begins within the jump, because `find` stops once it has five bytes.
            displaced.at().0.wrapping_sub(self.at.0)
        })
    }

    /// Returns whether `target` is inside the jump, or inside one of the displaced instructions.
    #[must_use]
    pub fn is_interior(&self, target: Gva) -> bool {
        let end = self.bytes.len();
        target
            .offset_from(self.at)
            .and_then(|offset| usize::try_from(offset).ok())
            .is_some_and(|offset| (1..end).contains(&offset))
    }

    /// Checks that no branch in `code`, which is at `start`, leads inside the jump.
    ///
    /// # Errors
    /// When a branch does, with its address, or when `code` may hide such a branch.
    pub fn check_branches(&self, code: &[u8], start: Gva) -> Result<(), Unfit> {
        scan::branches(code, start, |target| self.is_interior(target))
    }

    /// Returns the encoded jump to `target` that replaces the instructions.
    ///
    /// # Errors
    /// When `target` is out of reach.
    pub fn jump(&self, target: Gva) -> Result<[u8; JUMP], OutOfReach> {
        let from = self.at.wrapping_add(REACH);
        let [a, b, c, d] = distance(from, target).ok_or(OutOfReach {
            at: self.at,
            target,
        })?;
        Ok([JMP_REL32, a, b, c, d])
    }

    /// Returns whether a jump reaches `target`, and has an int3 at each interior boundary where that is possible.
    #[must_use]
    pub fn fits(&self, target: Gva) -> bool {
        let (mask, value) = self.shape();
        let displacement = target.0.wrapping_sub(self.at.wrapping_add(REACH).0);
        displacement & mask == value && self.jump(target).is_ok()
    }

    /// Returns whether there is an interior boundary at which no choice of the target puts an int3. Then the jump
    /// may only be written while no task is interrupted at that boundary.
    #[must_use]
    pub fn needs_quiescence(&self) -> bool {
        self.interior().any(|offset| offset > 2)
    }

    /// Iterates over the addresses in `within` that [fit](Self::fits), in ascending order. If the low byte of the
    /// displacement is free, only multiples of 16 are returned.
    pub fn targets(&self, within: Range<Gva>) -> impl Iterator<Item = Gva> {
        let (mask, value) = self.shape();
        let Range { start, end } = within;
        let shaped = self.at.wrapping_add(REACH).wrapping_add(value).0;
        // Fitting addresses repeat every `period` bytes, in windows of `len` bytes. Depending on the mask, no byte
        // of the displacement is fixed, or the second byte is, or the lowest, or both.
        let (first, period, len) = match mask {
            0 => (start.0, u64::MAX, u64::MAX),
            0xff00 => (shaped, 0x1_0000, 0x100),
            0xff => (shaped, 0x100, 1),
            _ => (shaped, 0x1_0000, 1),
        };
        let step = if len == 1 { 1 } else { ALIGN };
        // The last window that begins at `start` or before it.
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

    /// Returns a mask of the displacement's bits that are fixed, and the values of these bits.
    fn shape(&self) -> (u64, u64) {
        self.interior()
            .filter(|offset| *offset <= 2)
            .fold((0, 0), |(mask, value), offset| {
                let shift = 8 * (offset - 1);
                (mask | 0xff << shift, value | u64::from(INT3) << shift)
            })
    }
}
