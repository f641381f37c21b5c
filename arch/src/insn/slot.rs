//! A displaced instruction that runs from a slot: the copy in the slot, and the meaning of addresses in the
//! slot.
//!
//! ```text
//!   boosted:  copy ; jmp rel32 next        the guest continues without an exit
//!   trapped:  copy ; int3                  the int3 shows that the copy is complete
//!             jcc +1 ; int3 ; int3         conditional jump: first int3 if not taken, second int3 if taken
//! ```
//!
//! The copy is the original, byte for byte, except for a RIP-relative displacement, which is recomputed, and a
//! conditional jump, which is encoded anew. It never stores its own address, and leaves the slot only as shown:
//! instructions that would do otherwise are emulated or refused. So nothing but RIP can refer to a slot. RIP can
//! refer only to the start of one of the instructions above, and [`Displaced::in_place`] translates it. The rest of
//! a slot is int3.

use super::displaced::Displaced;
use super::relocation::Relocation;
use crate::Gva;
use crate::trap::INT3;

/// Size of a slot in bytes.
pub const SLOT_SIZE: usize = 32;

/// `jmp rel32`.
const JMP_REL32: u8 = 0xe9;

/// What follows the copy in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// A jump back to the instruction after the original.
    Boosted,
    /// An int3.
    Trapped,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCode {
    at: Gva,
    bytes: [u8; SLOT_SIZE],
    /// Length of the copy.
    len: u8,
    kind: SlotKind,
}

impl SlotCode {
    /// Returns the address of the slot.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns all bytes of the slot.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SLOT_SIZE] {
        &self.bytes
    }

    /// Returns what follows the copy.
    #[must_use]
    pub fn kind(&self) -> SlotKind {
        self.kind
    }

    /// Returns the bytes of the copy.
    #[must_use]
    pub fn instruction(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the address just after the copy: that of the jump back, or of the first int3.
    #[must_use]
    pub fn next(&self) -> Gva {
        self.at.wrapping_add(u64::from(self.len))
    }

    fn new(at: Gva, kind: SlotKind, instruction: &[u8], len: u8) -> Self {
        let mut bytes = [INT3; SLOT_SIZE];
        bytes[..instruction.len()].copy_from_slice(instruction);
        Self {
            at,
            bytes,
            len,
            kind,
        }
    }
}

/// Why an instruction cannot be copied into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelocateError {
    /// The distance is too large for a 32-bit offset.
    #[error("the instruction at {at} leads to {target}, beyond ±2 GiB of its slot at {slot}")]
    OutOfReach {
        /// Address of the instruction.
        at: Gva,
        /// Address that it refers to, or at which it continues.
        target: Gva,
        /// Address of the slot it was to be copied to.
        slot: Gva,
    },
    /// The instruction is emulated; a copy would not do the same at another address.
    #[error("the instruction at {at} can only be emulated and takes no slot")]
    Emulated {
        /// Address of the instruction.
        at: Gva,
    },
}

impl Displaced {
    /// Returns the content of the slot at `slot`: a copy of the instruction, and a jump to the instruction after
    /// the original.
    ///
    /// # Errors
    /// When the instruction has no copy, or when an address that it refers to or continues at is out of reach of
    /// `slot`.
    pub fn boosted(&self, slot: Gva) -> Result<SlotCode, RelocateError> {
        let mut code = match self.relocation()? {
            Relocation::Jcc { condition, target } => {
                const LEN: u8 = 6;
                let [a, b, c, d] = self.distance(slot, LEN, target)?;
                let near = [0x0f, 0x80 | condition, a, b, c, d];
                SlotCode::new(slot, SlotKind::Boosted, &near, LEN)
            }
            relocation => self.copy(slot, SlotKind::Boosted, relocation)?,
        };
        const LEN: u8 = 5;
        let [a, b, c, d] = self.distance(slot, code.len + LEN, self.next())?;
        let back = usize::from(code.len);
        code.bytes[back..back + usize::from(LEN)].copy_from_slice(&[JMP_REL32, a, b, c, d]);
        Ok(code)
    }

    /// Returns the content of the slot at `slot`: a copy of the instruction and an int3, or a conditional jump and
    /// two int3s.
    ///
    /// # Errors
    /// When the instruction has no copy, or when an address that it refers to is out of reach of `slot`.
    pub fn trapped(&self, slot: Gva) -> Result<SlotCode, RelocateError> {
        match self.relocation()? {
            Relocation::Jcc { condition, .. } => {
                let over_int3 = [0x70 | condition, 1];
                Ok(SlotCode::new(slot, SlotKind::Trapped, &over_int3, 2))
            }
            relocation => self.copy(slot, SlotKind::Trapped, relocation),
        }
    }

    /// Iterates over the addresses to which a copy may lead: the next instruction, and the target of a
    /// conditional jump.
    pub fn leads_to(&self) -> impl Iterator<Item = Gva> + use<> {
        let target = match self.relocation {
            Some(Relocation::Jcc { target, .. }) => Some(target),
            _ => None,
        };
        std::iter::once(self.next()).chain(target)
    }

    /// Returns the address at which the guest continues after the int3 at `at`; `None` if `at` is not the address
    /// of an int3 that [`trapped`](Self::trapped) put at the end of `slot`. Hit path.
    #[must_use]
    pub fn trap_end(&self, slot: &SlotCode, at: Gva) -> Option<Gva> {
        if slot.kind != SlotKind::Trapped {
            return None;
        }
        match self.relocation {
            _ if at == slot.next() => Some(self.next()),
            Some(Relocation::Jcc { target, .. }) if at == slot.next().wrapping_add(1) => {
                Some(target)
            }
            _ => None,
        }
    }

    /// Translates `rip` in `slot` to the address at which the guest would be if the instruction had run in its
    /// own place; `None` if no instruction of the slot begins at `rip`. Hit path.
    #[must_use]
    pub fn in_place(&self, slot: &SlotCode, rip: Gva) -> Option<Gva> {
        if rip == slot.at {
            Some(self.at)
        } else if rip == slot.next() {
            Some(self.next())
        } else {
            self.trap_end(slot, rip)
        }
    }

    fn relocation(&self) -> Result<Relocation, RelocateError> {
        self.relocation
            .ok_or(RelocateError::Emulated { at: self.at })
    }

    /// Returns a slot with all of the instruction's bytes. `relocation` says whether a displacement among them is
    /// recomputed.
    fn copy(
        &self,
        slot: Gva,
        kind: SlotKind,
        relocation: Relocation,
    ) -> Result<SlotCode, RelocateError> {
        let mut code = SlotCode::new(slot, kind, self.bytes(), self.len);
        if let Relocation::Displacement { offset, target } = relocation {
            let offset = usize::from(offset);
            let displacement = self.distance(slot, self.len, target)?;
            code.bytes[offset..offset + 4].copy_from_slice(&displacement);
        }
        Ok(code)
    }

    /// Returns the 32-bit offset of `target` from the end of the first `len` bytes of `slot`.
    fn distance(&self, slot: Gva, len: u8, target: Gva) -> Result<[u8; 4], RelocateError> {
        let end = slot.wrapping_add(u64::from(len));
        i32::try_from(target.0.wrapping_sub(end.0).cast_signed())
            .map(i32::to_le_bytes)
            .map_err(|_| RelocateError::OutOfReach {
                at: self.at,
                target,
                slot,
            })
    }
}

#[cfg(test)]
mod tests;
