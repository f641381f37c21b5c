//! Reads the unwind tables of an image.

use std::ops::Range;

use hvprobe_arch::Gva;

use super::elf::Elf;
use crate::symbols::{SymbolKind, Symbols};
use crate::unwind::{Orc, OrcError, Tables};

/// Trampolines of the kernel's kretprobes (from 5.18 on; 5.15 to 5.17; before 5.15), and that of its function graph
/// tracer. The kernel puts their addresses in place of the return addresses of calls that it follows.
const TRAMPOLINES: [&str; 4] = [
    "arch_rethook_trampoline",
    "__kretprobe_trampoline",
    "kretprobe_trampoline",
    "return_to_handler",
];

/// Reads the unwind tables of `text` and of init text. They are found by their sections or, without these, by the
/// symbols at their ends.
pub(super) fn read(elf: &Elf<'_>, symbols: &Symbols, text: Range<u64>) -> Result<Orc, OrcError> {
    let table = |section, start, stop| {
        if let Some(section) = elf.section(section) {
            return Some((Gva(section.at.start), section.data));
        }
        let at = symbols.between(start, stop)?;
        let len = usize::try_from(at.end - at.start).ok()?;
        Some((Gva(at.start), elf.read(Gva(at.start), len)?))
    };
    let addresses = table(
        ".orc_unwind_ip",
        "__start_orc_unwind_ip",
        "__stop_orc_unwind_ip",
    );
    let entries = table(".orc_unwind", "__start_orc_unwind", "__stop_orc_unwind");
    let ((at, addresses), (_, entries)) = addresses.zip(entries).ok_or(OrcError::Missing)?;
    let tables = Tables {
        at,
        addresses,
        entries,
    };
    let functions = symbols
        .iter()
        .filter(|symbol| symbol.kind == SymbolKind::Text && text.contains(&symbol.addr.0))
        .map(|symbol| symbol.addr);
    let trampolines = TRAMPOLINES
        .iter()
        .filter_map(|name| symbols.address_of(name));
    let init_text = symbols.between("_sinittext", "_einittext");
    // All addresses must have the same upper 32 bits, so init text elsewhere is left out.
    let init_text = init_text.filter(|init| init.start >> 32 == text.start >> 32);
    let text = (text.clone(), init_text.unwrap_or_default());
    Orc::read(tables, text, functions, trampolines.collect())
}
