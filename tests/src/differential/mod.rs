//! The proof of the instruction policy: what a kernel's instructions do in place, against what
//! every mechanism makes of them.

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
