//! The kernel's ELF image: as a whole, and each of the tables in it within an otherwise valid image.

use hvprobe_arch::{Gva, insn};
use hvprobe_fixtures::kernel::{self, Section, TEXT};
use hvprobe_linux::image::KernelImage;

/// Size of the text in the images made here.
const TEXT_LEN: usize = 0x1000;
/// Address to which the table under test is linked.
const TABLE: u64 = 0xffff_ffff_8200_0000;
/// Tables into which [`tables`] splits its input, by the symbols at their start and end.
const LISTS: [(&str, &str); 4] = [
    ("__start_kprobe_blacklist", "__stop_kprobe_blacklist"),
    ("__start___jump_table", "__stop___jump_table"),
    ("__start_static_call_sites", "__stop_static_call_sites"),
    ("__start___ex_table", "__stop___ex_table"),
];

/// Parses any bytes as an ELF file.
pub fn image(data: &[u8]) -> bool {
    KernelImage::parse(data)
        .inspect(check)
        .inspect_err(|error| assert!(!error.to_string().is_empty()))
        .is_ok()
}

/// Parses any bytes as a section with a kallsyms table, in an image without an ELF symbol table.
pub fn kallsyms(data: &[u8]) -> bool {
    image(&kernel::elf(
        &[text(), section(".rodata", TABLE, data)],
        &[],
    ))
}

/// Parses any bytes as types and names of BTF. The first two bytes are the length of the types, for the header that
/// the target adds.
pub fn btf(data: &[u8]) -> bool {
    let Some((types, rest)) = data.split_first_chunk() else {
        return false;
    };
    let (types, strings) = rest.split_at(rest.len().min(u16::from_le_bytes(*types).into()));
    let length = |part: &[u8]| u32::try_from(part.len()).unwrap_or(u32::MAX).to_le_bytes();
    let mut table = vec![0x9f, 0xeb, 1, 0];
    for word in [
        24_u32.to_le_bytes(),
        0_u32.to_le_bytes(),
        length(types),
        length(types),
        length(strings),
    ] {
        table.extend(word);
    }
    table.extend(types);
    table.extend(strings);
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("_etext", TEXT + TEXT_LEN as u64, 0, true),
        ("pcpu_hot", TABLE, 8, false),
    ];
    let sections = [text(), section(".BTF", TABLE, &table)];
    let image = KernelImage::parse(&kernel::elf(&sections, &symbols))
        .expect("types are not needed to read an image");
    check(&image);
    super::types::check(&image, &table);
    image.task_layout().is_ok()
}

/// Parses any bytes as the kernel's lists of places that must not be probed. Each of the first four bytes is
/// the length of a list in units of 16 bytes.
pub fn tables(data: &[u8]) -> bool {
    let Some((lengths, data)) = data.split_first_chunk::<4>() else {
        return false;
    };
    let mut symbols = vec![
        ("_stext", TEXT, 0, true),
        ("one", TEXT + 0x10, 0, true),
        ("one.cold", TEXT + 0x180, 0, true),
        ("_etext", TEXT + TEXT_LEN as u64, 0, true),
    ];
    let mut at = TABLE;
    for ((start, stop), length) in LISTS.into_iter().zip(lengths) {
        symbols.push((start, at, 0, false));
        at += u64::from(*length) * 16;
        symbols.push((stop, at, 0, false));
    }
    let sections = [text(), section(".init.data", TABLE, data)];
    let image = KernelImage::parse(&kernel::elf(&sections, &symbols))
        .expect("the lists are not needed to read an image");
    check(&image);
    // Searches only the first part of the text, which is enough.
    (TEXT..)
        .take(TEXT_LEN / 8)
        .any(|at| image.forbidden(Gva(at)).is_some())
}

fn text() -> Section {
    Section {
        name: ".text",
        at: TEXT,
        exec: true,
        data: vec![0x90; TEXT_LEN],
    }
}

fn section(name: &'static str, at: u64, data: &[u8]) -> Section {
    Section {
        name,
        at,
        exec: false,
        data: data.to_vec(),
    }
}

/// Checks what must hold for every image that parses.
fn check(image: &KernelImage) {
    let symbols = image.symbols();
    let mut before = Gva(0);
    for (n, symbol) in symbols.iter().enumerate() {
        assert!(before <= symbol.addr, "symbols are sorted");
        before = symbol.addr;
        assert!(!symbol.name.is_empty());
        let (found, offset) = symbols
            .containing(symbol.addr)
            .expect("a symbol contains its first byte");
        assert_eq!((found.addr, offset), (symbol.addr, 0));
        if n < 64 {
            // Lookups take time, so only the first symbols are looked up.
            let _ = symbols.lookup(symbol.name).map_err(|e| e.to_string());
            let _ = (
                image.is_text(symbol.addr),
                image.forbidden(symbol.addr),
                image.bytes_at(symbol.addr, 2 * insn::MAX_LEN),
            );
        }
    }
    for at in [0, 1, TEXT, TEXT + 0x20, TABLE, 1 << 63, u64::MAX].map(Gva) {
        if let Some((symbol, offset)) = symbols.containing(at) {
            assert_eq!(symbol.addr.checked_add(offset), Some(at));
        }
        let _ = image.forbidden(at);
        for len in [0, 1, usize::MAX] {
            if let Some(bytes) = image.bytes_at(at, len) {
                assert_eq!(bytes.len(), len);
            }
        }
        assert!(!(image.is_text(at) && image.bytes_at(at, 1).is_none()));
    }
    if let Some(entry) = image.idt_bp_entry() {
        assert!(image.is_text(entry));
    }
    let _ = (
        symbols.lookup("vfs_raed").map_err(|e| e.to_string()),
        image.task_layout().map_err(|e| e.to_string()),
        image.release(),
        image.build_id(),
        image.init_top_pgt(),
    );
}
