//! Differential test of the instruction policy: compares the effect of a kernel's instructions in place with their
//! effect through every mechanism.
//!
//! ```text
//!  text ──▶ campaign ──▶ state ─────▶ trial ─────────────────────────▶ bench
//!  every    which, and   registers,   in place, emulated, boosted,     one virtual CPU that
//!  instr.   how often    memory       trapped; then compares           runs one instruction
//! ```
//! Invariant: nothing is left out silently. Either the policy refuses an instruction, and [`coverage`] counts it;
//! or the instruction is not run, and counted with the reason; or its whole resulting state is compared. The only
//! things not compared are clocks, random numbers, and how long `sti` holds interrupts off, which a stop does not
//! show.

pub mod bench;
pub mod campaign;
pub mod coverage;
mod draft;
mod layout;
pub mod random;
mod special;
mod start;
pub mod state;
mod system;
pub mod text;
pub mod trial;
mod watchdog;
