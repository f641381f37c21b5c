//! The parts of x86-64 that hvprobe needs: addresses, registers, page tables, boot structures, detours, and the
//! execution of instructions that breakpoints displace.
//!
//! Everything here is pure: no KVM, no I/O, no global state. Guest memory is accessed only through
//! [`mem::PhysMemory`]. So this crate runs and is tested on machines without `/dev/kvm`.

pub mod addr;
pub mod boot;
pub mod condition;
pub mod detour;
pub mod fetch;
pub mod insn;
pub mod mem;
pub mod paging;
pub mod regs;
#[cfg(test)]
mod testing;
pub mod trap;

pub use addr::{Gpa, Gva};
pub use regs::Regs;
