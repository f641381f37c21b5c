//! The instruction a breakpoint displaces, and how it takes effect nonetheless.
//!
//! Nothing here ever needs the original bytes back in place, nor a single-step. [`classify`]
//! decodes the instruction once, when a probe is registered, and decides how it is carried out:
//!
//! ```text
//!                 classify
//!   code bytes ────────────▶ Displaced ─┬─ Emulate: emulate(regs, memory)
//!             └──▶ Refusal              ├─ Boost:   boosted(slot): copy, jump back; one exit
//!                                       └─ (either) trapped(slot): copy, int3; two exits,
//!                                                   for whom must see the state in between
//! ```
//!
//! Either way the registers and memory end up exactly as if the instruction had run at its own
//! address. What is needed for that is worked out by `classify`, `boosted` and `trapped`; the
//! calls made on every hit ([`Displaced::emulate`], [`Displaced::trap_end`],
//! [`Displaced::in_place`]) neither decode nor allocate.

mod body;
mod boundary;
mod emulate;
mod gate;
mod policy;
mod refs;
mod slot;
#[cfg(test)]
pub(crate) mod testing;
mod text;

pub use body::may_return;
pub use boundary::{BoundaryError, boundary, instruction_len};
pub use emulate::Emulated;
pub use gate::{ENDBR64, GateError, GateHead};
pub use policy::{Refusal, classify, is_endbr64, is_nop4};
pub use refs::{PerCpuLoad, constants, per_cpu_loads};
pub use slot::{RelocateError, SLOT_SIZE, SlotCode, SlotKind};
pub use text::text;

use crate::Gva;
use crate::paging::WalkError;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction};
pub(crate) use slot::Relocation;

/// The length in bytes of the longest instruction (SDM vol. 2, 2.3.11).
pub const MAX_LEN: usize = 15;

/// An instruction that a breakpoint displaces, with what is needed to carry it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Displaced {
    at: Gva,
    bytes: [u8; MAX_LEN],
    len: u8,
    action: Action,
    /// How a copy is made; `None` where a copy would not do the same.
    relocation: Option<Relocation>,
}

impl Displaced {
    /// Where the instruction is.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The address just after it.
    #[must_use]
    pub fn next(&self) -> Gva {
        self.at.wrapping_add(u64::from(self.len))
    }

    /// How a copy of it is made; `None` where a copy would not do the same.
    pub(crate) fn copying(&self) -> Option<Relocation> {
        self.relocation
    }

    /// The cheapest way to carry it out.
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

/// The guest's memory, as the kernel sees it at a hit.
pub trait Memory {
    /// The 64-bit word at `at`, which need not be aligned.
    ///
    /// # Errors
    /// When the guest could not read there.
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault>;

    /// Stores `value` at `at`, which need not be aligned.
    ///
    /// # Errors
    /// When the guest could not write there; then nothing has changed.
    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault>;
}

/// Memory cannot be accessed where the instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot reach the word at {at}")]
pub struct MemoryFault {
    /// The word's address, or the address the instruction was to continue at.
    pub at: Gva,
    /// Why.
    #[source]
    pub cause: WalkError,
}

/// What remains of an emulated instruction beyond the registers and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    Done,
    /// `sti` enabled interrupts: they stay held off until after the next instruction (SDM vol. 2,
    /// STI). The caller tells the processor so.
    Shadow,
}

/// Why bytes are no instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeFailure {
    /// No processor would take them for one.
    Invalid,
    /// The instruction goes on past the bytes given.
    Truncated,
}

/// Decodes the first instruction of `code`, which is at `at`.
pub(crate) fn decode(
    code: &[u8],
    at: Gva,
) -> Result<(Instruction, iced_x86::ConstantOffsets), DecodeFailure> {
    let code = &code[..code.len().min(MAX_LEN)];
    let mut decoder = Decoder::with_ip(64, code, at.0, DecoderOptions::NONE);
    let instruction = decoder.decode();
    match decoder.last_error() {
        DecoderError::None if !instruction.is_invalid() => {
            Ok((instruction, decoder.get_constant_offsets(&instruction)))
        }
        // With all the bytes an instruction may have, more would not help.
        DecoderError::NoMoreBytes if code.len() < MAX_LEN => Err(DecodeFailure::Truncated),
        _ => Err(DecodeFailure::Invalid),
    }
}
