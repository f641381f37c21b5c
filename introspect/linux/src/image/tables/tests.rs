use hvprobe_arch::Gva;
use hvprobe_fixtures::kernel::{self, Layout, TEXT};

use super::super::elf::Elf;
use super::super::{Forbidden, KernelImage, Unknown};
use super::{ALL, Found, Places};
use crate::symbols::{RawSymbol, SymbolKind, Symbols};

/// Functions that walk tables, each with the symbols at the ends of its table.
const READERS: [(&str, &str, &str); 6] = [
    (
        "jump_label_init",
        "__start___jump_table",
        "__stop___jump_table",
    ),
    (
        "static_call_init",
        "__start_static_call_sites",
        "__stop_static_call_sites",
    ),
    (
        "search_exception_tables",
        "__start___ex_table",
        "__stop___ex_table",
    ),
    (
        "init_kprobes",
        "__start_kprobe_blacklist",
        "__stop_kprobe_blacklist",
    ),
    ("ftrace_init", "__start_mcount_loc", "__stop_mcount_loc"),
    ("alternative_instructions", "__smp_locks", "__smp_locks_end"),
];

/// Returns sections and symbols of a kernel without `CONFIG_KALLSYMS_ALL`, and without section names that give
/// tables away. It has only symbols of functions. The functions in `readers` walk tables.
fn stripped(readers: &[(&str, &str, &str)]) -> (Vec<kernel::Section>, Vec<(String, u64, u64)>) {
    const CODE: u64 = 0x20;
    let (all, mut sections) = kernel::kernel(Layout::Offsets61);
    let at = |wanted: &str| all.iter().find(|(_, name, _)| name == wanted).unwrap().2;
    let init = sections.last_mut().unwrap();
    init.data.resize(0x200, 0x90);
    let text = all
        .iter()
        .filter(|(letter, ..)| matches!(letter, 't' | 'T'));
    let mut symbols: Vec<_> = text.map(|(_, name, at)| (name.clone(), *at, 0)).collect();
    for (n, (reader, start, stop)) in (4..).zip(readers) {
        let code = CODE * n;
        symbols.push(((*reader).to_owned(), init.at + code, CODE));
        let bytes = &mut init.data[usize::try_from(code).unwrap()..];
        // mov rdi, start; mov rsi, stop; ret
        for (bytes, (opcode, end)) in bytes.chunks_mut(7).zip([(0xc7, start), (0xc6, stop)]) {
            bytes[..3].copy_from_slice(&[0x48, 0xc7, opcode]);
            bytes[3..7].copy_from_slice(&at(end).to_le_bytes()[..4]);
        }
        bytes[14] = 0xc3;
    }
    (sections, symbols)
}

fn parse((sections, symbols): (Vec<kernel::Section>, Vec<(String, u64, u64)>)) -> KernelImage {
    let symbols = symbols.iter();
    let symbols: Vec<_> = symbols
        .map(|(name, at, size)| (name.as_str(), *at, *size, true))
        .collect();
    KernelImage::parse(&kernel::elf(&sections, &symbols)).unwrap()
}

/// Returns everything that the lists say of an address.
fn verdicts(
    image: &KernelImage,
    at: Gva,
) -> (Option<Forbidden>, Option<Forbidden>, bool, bool, bool) {
    (
        image.forbidden(at),
        image.forbidden_as_is(at, 0x3e),
        image.has_fixup(at),
        image.has_landing(at, at.wrapping_add(1)),
        image.is_ftrace_site(at),
    )
}

#[test]
fn tables_without_symbols_are_found_by_the_code_that_goes_through_them() {
    let whole = KernelImage::parse(&kernel::vmlinux(Layout::Offsets61)).unwrap();
    let stripped = parse(stripped(&READERS));
    assert!(
        stripped
            .symbols()
            .address_of("__start___jump_table")
            .is_none()
    );
    assert_eq!(stripped.unknown_lists(), []);
    for at in (TEXT..TEXT + 0xb00).map(Gva) {
        assert_eq!(verdicts(&stripped, at), verdicts(&whole, at), "{at}");
    }
}

#[test]
fn tables_without_symbols_are_found_by_their_sections() {
    let whole = KernelImage::parse(&kernel::vmlinux(Layout::Offsets61)).unwrap();
    for (reader, name) in [
        ("search_exception_tables", "__ex_table"),
        ("alternative_instructions", ".smp_locks"),
    ] {
        let (_, start, stop) = READERS.iter().find(|it| it.0 == reader).unwrap();
        let others: Vec<_> = READERS
            .iter()
            .filter(|it| it.0 != reader)
            .copied()
            .collect();
        let (mut sections, mut symbols) = stripped(&others);
        symbols.push(("alternatives_enable_smp".to_owned(), TEXT, 0));
        let (all, _) = kernel::kernel(Layout::Offsets61);
        let at = |wanted: &str| all.iter().find(|it| it.1 == wanted).unwrap().2;
        let (start, stop) = (at(start), at(stop));
        // The table gets a section of its own, and the data after it another.
        let data = sections.iter_mut().find(|it| it.name == ".data").unwrap();
        let place = |at: u64| usize::try_from(at - data.at).unwrap();
        let (from, to) = (place(start), place(stop));
        let behind = data.data.split_off(to);
        let table = data.data.split_off(from);
        let section = |name, at, data| kernel::Section {
            name,
            at,
            exec: false,
            data,
        };
        sections.extend([section(name, start, table), section(".rest", stop, behind)]);
        let stripped = parse((sections, symbols));
        assert_eq!(stripped.unknown_lists(), [], "{name}");
        for at in (TEXT + 0x600..TEXT + 0x700).map(Gva) {
            assert_eq!(verdicts(&stripped, at), verdicts(&whole, at), "{name} {at}");
        }
    }
}

#[test]
fn what_an_unknown_table_might_name_is_forbidden() {
    let at = |offset| Gva(TEXT + offset);
    // No function walks the tables, but the functions that need them exist.
    let (sections, mut symbols) = stripped(&[]);
    for name in [
        "static_key_enable",
        "__static_call_update",
        "register_kprobe",
        "alternatives_enable_smp",
    ] {
        symbols.push((name.to_owned(), TEXT, 0));
    }
    let image = parse((sections, symbols));
    assert_eq!(
        image.unknown_lists(),
        [Unknown::JumpLabels, Unknown::Fixups, Unknown::Locks]
    );
    let unknown = |list| Some(Forbidden::Unknown(list));
    // A nop of five bytes, a short jump, and an instruction that can be neither.
    assert_eq!(image.forbidden(at(0x610)), unknown(Unknown::JumpLabels));
    assert_eq!(image.forbidden(at(0x620)), unknown(Unknown::JumpLabels));
    assert_eq!(image.forbidden(at(0x640)), None);
    assert!(image.has_landing(at(0x6a0), at(0x6a1)) && image.has_fixup(at(0x6a0)));
    assert_eq!(
        image.forbidden_as_is(at(0x6a0), 0x3e),
        unknown(Unknown::Locks)
    );
    assert_eq!(image.forbidden_as_is(at(0x6a0), 0xf0), None);
    // The function is found by its name, as the blacklist is not found.
    let function = "do_int3".to_owned();
    assert_eq!(
        image.forbidden(at(0x400)),
        Some(Forbidden::Blacklisted { function })
    );
    let error = Forbidden::Unknown(Unknown::JumpLabels).to_string();
    assert_eq!(
        error,
        "the kernel's list of jump labels cannot be found, so it is not known whether it may be probed"
    );
}

#[test]
fn kernel_without_those_who_need_a_table_has_none() {
    let image = parse(stripped(&READERS[2..3]));
    assert_eq!(image.unknown_lists(), []);
    assert_eq!(image.forbidden(Gva(TEXT + 0x610)), None);
}

#[test]
fn table_with_an_entry_that_is_none_is_unknown() {
    let (symbols, sections) = kernel::kernel(Layout::Offsets61);
    let data =
        |sections: &[kernel::Section]| sections.iter().position(|it| it.name == ".data").unwrap();
    for (symbol, list) in [
        ("__stop___jump_table", Unknown::JumpLabels),
        ("__stop___ex_table", Unknown::Fixups),
    ] {
        let mut sections: Vec<_> = sections
            .iter()
            .map(|it| kernel::Section {
                data: it.data.clone(),
                ..*it
            })
            .collect();
        let data = data(&sections);
        let end = symbols.iter().find(|it| it.1 == symbol).unwrap().2;
        let end = usize::try_from(end - sections[data].at).unwrap();
        // Overwrites the last 8 bytes of the last entry: the key of a jump label, or the target and the data of a
        // fixup.
        sections[data].data[end - 8..end].fill(0x7f);
        let image = KernelImage::parse(&kernel::elf(&sections, &[])).unwrap();
        assert_eq!(image.unknown_lists(), [list]);
    }
}

#[test]
fn static_calls_without_a_table_are_found_by_where_they_lead() {
    let (mut sections, mut symbols) = stripped(&READERS[2..3]);
    symbols.push(("__static_call_update".to_owned(), TEXT, 0));
    // call, jmp and jne to `__SCT__x` at +0x700; a call elsewhere.
    let text = &mut sections[0].data;
    text[0x210..0x215].copy_from_slice(&[0xe8, 0xeb, 0x04, 0, 0]);
    text[0x220..0x225].copy_from_slice(&[0xe9, 0xdb, 0x04, 0, 0]);
    text[0x230..0x236].copy_from_slice(&[0x0f, 0x85, 0xca, 0x04, 0, 0]);
    text[0x240..0x245].copy_from_slice(&[0xe8, 0xbc, 0x04, 0, 0]);
    let image = parse((sections, symbols));
    for (offset, expected) in [
        (0x210, true),
        (0x214, true),
        (0x215, false),
        (0x220, true),
        (0x230, true),
        (0x240, false),
        (0x700, true),
    ] {
        let why = image.forbidden(Gva(TEXT + offset));
        assert_eq!(
            why,
            expected.then_some(Forbidden::StaticCall),
            "{offset:#x}"
        );
    }
}

/// Checks that all ways to find a table find the same one. Needs a kernel that offers all of them.
#[test]
fn real_kernels_tables_are_found_by_their_code_alone() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let bytes = std::fs::read(path).unwrap();
    let elf = Elf::parse(&bytes).unwrap();
    let image = KernelImage::parse(&bytes).unwrap();
    let text = image
        .symbols()
        .iter()
        .filter(|it| it.kind == SymbolKind::Text);
    let text = text.filter(|symbol| elf.is_code(symbol.addr.0));
    let raw = text.map(|symbol| RawSymbol {
        name: symbol.name,
        addr: symbol.addr,
        size: Some(symbol.size),
        kind: symbol.kind,
    });
    let ranges: Vec<_> = elf.parts().map(|part| part.at.clone()).collect();
    let symbols = Symbols::new(raw, &ranges);
    let of = |symbols| Places { elf: &elf, symbols };
    for table in ALL {
        let (all, code) = (of(image.symbols()).find(table), of(&symbols).find(table));
        assert!(matches!(all, Found::At(..)), "{}", table.symbols[0]);
        assert!(all == code, "{}", table.symbols[0]);
    }
    assert_eq!(image.unknown_lists(), []);
}
