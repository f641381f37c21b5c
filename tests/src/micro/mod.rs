//! A kernel of a few pages, for tests that must run on any KVM, even one that cannot run Linux.

mod elf;
pub mod host;
mod kernel;
pub mod recorder;

pub use kernel::{
    APIC, Asm, IDT_BASE, LAST_BREAKPOINT, MicroKernel, OWN_BREAKPOINTS, PMD, RESULTS,
    UNEXPECTED_EXCEPTION, UNMAPPED, WINDOW,
};
