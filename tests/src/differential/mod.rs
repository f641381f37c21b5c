//! The proof of the instruction policy: what a kernel's instructions do in place, against what
//! every mechanism makes of them.
//!
//! ```text
//!  text ──▶ campaign ──▶ state ─────▶ trial ─────────────────────────▶ bench
//!  every    which, and   registers,   in place, emulated, boosted,     one virtual CPU that
//!  instr.   how often    memory       trapped; then compares           runs one instruction
//! ```
//! What holds: nothing is dropped in silence. An instruction is refused by the policy, and then
//! counted by [`coverage`]; or not run, and then counted with the reason; or compared in all that
//! it leaves. The only things not compared are clocks, random numbers, and for how long `sti` holds
//! interrupts off, which no stop shows.

pub mod bench;
pub mod campaign;
pub mod coverage;
mod layout;
pub mod random;
mod special;
pub mod state;
mod system;
pub mod text;
pub mod trial;
mod watchdog;
