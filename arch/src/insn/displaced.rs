//! The stored form of a displaced instruction.

use super::decode::MAX_LEN;
use super::emulate::Emulated;
use super::relocation::Relocation;
use crate::Gva;

/// An instruction that a breakpoint displaces, with what is needed to carry it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Displaced {
    pub(super) at: Gva,
    pub(super) bytes: [u8; MAX_LEN],
    pub(super) len: u8,
    pub(super) action: Action,
    /// How a copy is made; `None` if a copy would not do the same.
    pub(super) relocation: Option<Relocation>,
}

impl Displaced {
    /// Returns the address of the instruction.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns the bytes of the instruction.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the address just after the instruction.
    #[must_use]
    pub fn next(&self) -> Gva {
        self.at.wrapping_add(u64::from(self.len))
    }

    /// Returns how a copy is made; `None` if a copy would not do the same.
    pub(crate) fn copying(&self) -> Option<Relocation> {
        self.relocation
    }

    /// Returns the cheapest way to carry the instruction out.
    #[must_use]
    pub fn action(&self) -> Action {
        self.action
    }
}

/// How a displaced instruction is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// By the host, on the saved registers, with [`Displaced::emulate`].
    Emulate(Emulated),
    /// By the guest, which runs the copy that [`Displaced::boosted`] makes.
    Boost,
}
