//! Execution of instructions that breakpoints displace.
//!
//! The original bytes are not put back to execute an instruction, and nothing is single-stepped. [`classify`]
//! decodes an instruction once, when a probe is registered, and decides how it is carried out:
//!
//! ```text
//!                 classify
//!   code bytes ────────────▶ Displaced ─┬─ Emulate: emulate(regs, memory)
//!             └──▶ Refusal              ├─ Boost:   boosted(slot): copy, jump back; one exit
//!                                       └─ (either) trapped(slot): copy, int3; two exits,
//!                                                   if the state in between must be seen
//! ```
//!
//! In all cases the registers and memory end up exactly as if the instruction had run at its own address.
//! `classify`, `boosted` and `trapped` work out what is needed for that. The calls made on every hit
//! ([`Displaced::emulate`], [`Displaced::trap_end`], [`Displaced::in_place`]) neither decode nor allocate.

mod body;
mod boundary;
mod decode;
mod displaced;
mod emulate;
mod gate;
mod loader;
mod memory;
mod policy;
mod refs;
mod relocation;
mod slot;
#[cfg(test)]
pub(crate) mod testing;
mod text;

pub use body::{code_len, may_return};
pub use boundary::{BoundaryError, boundary, instruction_len};
pub use decode::MAX_LEN;
pub(crate) use decode::{decode, instructions};
pub use displaced::{Action, Displaced};
pub use emulate::Emulated;
pub use gate::{ENDBR64, GateError, GateHead};
pub use loader::Loader;
pub use memory::{Effect, Memory, MemoryFault};
pub use policy::{Refusal, classify, is_endbr64, is_nop4};
pub use refs::{PerCpuLoad, constants, per_cpu_loads};
pub(crate) use relocation::Relocation;
pub use slot::{RelocateError, SLOT_SIZE, SlotCode, SlotKind};
pub use text::text;
