//! Reads from a guest's memory which modules are loaded, and what they consist of.
//!
//! Invariants: a [`ModuleList`] is a copy taken at one moment, best while the guest is stopped, and never
//! changes. Everything in it is the guest's claim:
//!
//! - Lists that do not end, tables that exceed [`ModuleReader`]'s budget and invalid pointers are errors, never
//!   a panic or unbounded work.
//! - Memory outside the address range of modules does not count as a module's.
//! - Symbols outside a module's own memory are dropped.
//! - If a list that could forbid addresses in a module cannot be read, the whole module is forbidden.
//!
//! A module's state goes Unformed → Coming → Live → Going (kernel/module/main.c). Its text is final from Coming
//! on: relocations, alternatives, return thunks and the nops of ftrace are done in `post_relocation`,
//! `ftrace_module_init` and `complete_formation`, all before `do_init_module` runs the init function. Init text
//! exists until that function has returned.

mod build_id;
mod error;
mod layout;
mod list;
mod read;
#[cfg(test)]
mod tests;
mod types;

pub use error::{ModuleError, ModuleLookupError, NoModuleTypes};
pub use list::{Module, ModuleList, ModuleState};
pub use read::ModuleReader;
