//! Properties of every decoder for arbitrary input.
//!
//! Each [`Target`] passes any bytes to one decoder, and panics only if the decoder breaks a promise. A target is
//! run in two ways: by libFuzzer through the programs in `fuzz/fuzz_targets`, and by the test `fuzz_corpus` with
//! the committed corpus and random mutations of it. Where random bytes would be refused at the first check, the
//! target builds a valid file around them.

mod debug_index;
mod debug_info;
mod definition;
mod detour;
mod image;
mod input;
mod insn;
mod language;
mod loader;
mod memory;
mod modules;
mod paging;
mod perf_probe;
mod script;
mod storage;
mod symbols;
mod types;
mod unwind;

pub use debug_index::debug_index;
pub use debug_info::debug_info;
pub use definition::definition;
pub use detour::{detour, fetched, record};
pub use image::{btf, image, kallsyms, tables};
pub use insn::{boundary, gate, insn};
pub use language::language;
pub use loader::{bzimage, bzimage_around, payload};
pub use modules::modules;
pub use paging::{hidden, walk};
pub use perf_probe::perf_probe;
pub use script::script;
pub use storage::{boot_entry, disk, gpt, grub, uki};
pub use symbols::pattern;
pub use unwind::unwind;

/// A decoder under test.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target: also that of its program in `fuzz/fuzz_targets` and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Runs the target. Returns whether the decoder accepted the bytes; panics if a promise is broken.
    pub run: fn(&[u8]) -> bool,
}

/// All targets, sorted by name.
pub const TARGETS: [Target; 28] = [
    target("boot_entry", boot_entry),
    target("boundary", boundary),
    target("btf", btf),
    target("bzimage", bzimage),
    target("debug_index", debug_index),
    target("debug_info", debug_info),
    target("definition", definition),
    target("detour", detour),
    target("disk", disk),
    target("fetched", fetched),
    target("gate", gate),
    target("gpt", gpt),
    target("grub", grub),
    target("hidden", hidden),
    target("image", image),
    target("insn", insn),
    target("kallsyms", kallsyms),
    target("language", language),
    target("modules", modules),
    target("pattern", pattern),
    target("payload", payload),
    target("perf_probe", perf_probe),
    target("record", record),
    target("script", script),
    target("tables", tables),
    target("uki", uki),
    target("unwind", unwind),
    target("walk", walk),
];

const fn target(name: &'static str, run: fn(&[u8]) -> bool) -> Target {
    Target { name, run }
}
