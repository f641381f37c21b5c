//! `grub.cfg`: reads its script, runs what can be run without the machine, and returns the menu.
//!
//! The script is run as GRUB runs it: variables, functions, conditions, `source`. What GRUB would ask the machine,
//! such as its platform, is unknown here. Variables that depend on it become unknown, menu entries whose existence
//! depends on it are marked, and entries that need an unknown value cannot be used.
//!
//! Invariant: running ends. The script, its nesting, the steps, the menu and values have limits.

mod budget;
mod condition;
mod environment;
mod expand;
mod lexer;
mod loading;
pub(super) mod menu;
mod parser;
mod run;
mod search;
pub(super) mod state;
pub(super) mod world;
