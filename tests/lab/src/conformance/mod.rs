//! `cargo lab conformance`: the lines that the kernel's own tests and documentation write into files of
//! definitions, filters and triggers, judged by a guest's kernel and by hvprobe.
//!
//! ```text
//!   source ──► scripts, pages ──► cases ──► a rig test (tests/tests/rig/conformance.rs) ──► a table
//!                                   └─────► what is left out, with the reason
//! ```
//! The lines are from Debian's package with the source of the guest's kernel. None of them is kept in the
//! repository.

mod cases;
mod command;
mod pages;
mod script;
mod source;
mod words;

pub(crate) use command::{Options, run};
