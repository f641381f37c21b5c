//! The modules a guest has loaded, read from its memory.
//!
//! What is kept true: a [`ModuleList`] is a copy taken at one moment, best while the guest is
//! stopped, and never changes. Everything in it is the guest's word: lists that do not end, tables
//! that claim more than [`ModuleReader`]'s budget and pointers to nowhere are errors, never a panic
//! or unbounded work; memory outside the part of the address space that modules have is not theirs;
//! symbols outside a module's own memory are dropped; and if a list that could
//! forbid a place in a module cannot be read, the whole module is forbidden.
//!
//! A module's state goes Unformed → Coming → Live → Going (kernel/module/main.c). Its text is final
//! from Coming on: relocations, alternatives, return thunks and the nops of ftrace are done in
//! `post_relocation`, `ftrace_module_init` and `complete_formation`, all before `do_init_module`
//! runs its init function. Init text is there until that function has returned.

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
