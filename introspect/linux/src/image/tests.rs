//! Tests of whole images: made-up ones and, if one is given, a real one.

use std::time::Instant;

use hvprobe_arch::{Gpa, Gva};
use hvprobe_fixtures::kernel::{self, Layout, OFFSET, TEXT};
use proptest::prelude::*;

use super::elf::Elf;
use super::{Forbidden, ImageError, KernelImage, forbidden};
use crate::bytes::u32_at;
use crate::symbols::{LookupError, RawSymbol, SymbolKind, Symbols};

fn image(layout: Layout) -> KernelImage {
    KernelImage::parse(&kernel::vmlinux(layout)).unwrap()
}

#[test]
fn every_kallsyms_layout_decodes_to_the_same_symbols() {
    for layout in Layout::ALL {
        let (mut expected, sections) = kernel::kernel(layout);
        let image = KernelImage::parse(&kernel::elf(&sections, &[]))
            .unwrap_or_else(|error| panic!("{layout:?}: {error:?}"));
        expected.sort_by_key(|(_, _, addr)| *addr);
        let found: Vec<_> = image
            .symbols()
            .iter()
            .map(|symbol| (symbol.name.to_owned(), symbol.addr.0))
            .collect();
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(_, name, addr)| (name, addr))
            .collect();
        assert_eq!(found, expected, "{layout:?}");
    }
}

#[test]
fn image_without_section_headers_is_read_by_its_segments() {
    let mut bytes = kernel::vmlinux(Layout::Offsets61);
    bytes[40..48].fill(0);
    bytes[60..64].fill(0);
    let image = KernelImage::parse(&bytes).unwrap();
    assert_eq!(
        image.symbols().lookup("vfs_read").unwrap().addr,
        Gva(TEXT + 0x100)
    );
    assert_eq!(image.release(), Some("6.1.0-9-test"));
    assert!(image.task_layout().is_err());
}

#[test]
fn symbol_table_of_the_elf_file_goes_before_kallsyms() {
    let (_, sections) = kernel::kernel(Layout::Offsets61);
    let bytes = kernel::elf(
        &sections,
        &[
            ("_stext", TEXT, 0, true),
            ("only_here", TEXT + 0x10, 0x20, true),
            ("table", TEXT + 0x40, 0x40, false),
            ("_etext", TEXT + 0x100, 0, true),
            ("per_cpu", 0x40, 8, false),
        ],
    );
    let image = KernelImage::parse(&bytes).unwrap();
    let symbol = image.symbols().lookup("only_here").unwrap();
    assert_eq!((symbol.addr, symbol.size), (Gva(TEXT + 0x10), 0x20));
    assert_eq!(
        image.symbols().lookup("per_cpu").unwrap().kind,
        SymbolKind::Absolute
    );
    assert!(image.symbols().lookup("vfs_read").is_err());
    // Past the end of the function, before the next one.
    assert_eq!(image.symbols().containing(Gva(TEXT + 0x30)), None);
    assert!(!image.is_text(Gva(TEXT + 0x100)));
    assert!(!image.unknown_lists().is_empty());
}

#[test]
fn facts_of_the_image_are_found() {
    let image = image(Layout::Offsets62);
    assert_eq!(image.release(), Some("6.1.0-9-test"));
    assert_eq!(image.virt_to_phys_offset(), OFFSET);
    assert_eq!(image.init_top_pgt(), Some(Gpa(0x2a0_0000)));
    assert_eq!(image.idt_bp_entry(), Some(Gva(TEXT + 0x900)));
    assert_eq!(image.unknown_lists(), []);
    let layout = image.task_layout().unwrap();
    assert_eq!(
        (layout.current_task, layout.pid, layout.tgid, layout.comm),
        (0x1fb80, 16, 20, 32)
    );
    assert!(image.is_text(Gva(TEXT)) && !image.is_init_text(Gva(TEXT)));
    assert_eq!(
        image.bytes_at(Gva(TEXT + 0x620), 2),
        Some(&[0xeb, 0x10][..])
    );
    assert_eq!(image.bytes_at(Gva(TEXT + 0x3fff), 2), None);
    assert_eq!(image.bytes_at(Gva(u64::MAX), 2), None);
    let init = image.symbols().lookup("init_it").unwrap();
    assert!(image.is_init_text(init.addr) && !image.is_text(init.addr));
    assert_eq!(image.bytes_at(init.addr, 1), Some(&[0x90][..]));
    assert_eq!(init.size, 0x80);
}

#[test]
fn current_task_is_found_in_pcpu_hot() {
    let image = image(Layout::Offsets64);
    assert_eq!(image.task_layout().unwrap().current_task, 0x1fb80);
    let image = self::image(Layout::Place70);
    let hot = image.symbols().address_of("pcpu_hot").unwrap();
    assert_eq!(image.task_layout().unwrap().current_task, hot.0 + 8);
}

#[test]
fn addresses_are_forbidden_over_the_bytes_of_each_entry() {
    let image = image(Layout::Offsets61);
    let blacklisted = |function: &str| {
        Some(Forbidden::Blacklisted {
            function: function.to_owned(),
        })
    };
    for (offset, expected) in [
        (0x100, None),
        (0x3ff, None),
        (0x400, blacklisted("do_int3")),
        (0x4ff, blacklisted("do_int3")),
        (0x500, blacklisted("do_int3.cold")),
        (0x600, None),
        (0x60f, None),
        (0x610, Some(Forbidden::JumpLabel)),
        (0x614, Some(Forbidden::JumpLabel)),
        (0x615, None),
        (0x621, Some(Forbidden::JumpLabel)),
        (0x622, None),
        (0x630, Some(Forbidden::StaticCall)),
        (0x634, Some(Forbidden::StaticCall)),
        (0x635, None),
        (0x640, None),
        (0x707, Some(Forbidden::StaticCall)),
        (0x708, None),
        (0x800, Some(Forbidden::NoInstr)),
        (0x900, Some(Forbidden::Entry)),
        (0xa00, Some(Forbidden::Thunk)),
        (0xb00, None),
    ] {
        assert_eq!(image.forbidden(Gva(TEXT + offset)), expected, "{offset:#x}");
    }
}

#[test]
fn preambles_are_forbidden_up_to_their_function() {
    let text = |name, addr| RawSymbol {
        name,
        addr: Gva(addr),
        size: None,
        kind: SymbolKind::Text,
    };
    // Eleven nops, `mov eax, HASH`, and the function.
    let names = [
        text("before", TEXT),
        text("__cfi_foo", TEXT + 0x40),
        text("foo", TEXT + 0x50),
    ];
    let ranges = [TEXT..TEXT + 0x100, 0..0];
    let symbols = Symbols::new(names, &ranges);
    let find = |offset| forbidden::Lists::default().find(Gva(TEXT + offset), &symbols);
    for offset in [0x40, 0x4b, 0x4c, 0x4f] {
        assert_eq!(find(offset), Some(Forbidden::Preamble), "{offset:#x}");
    }
    assert_eq!((find(0x3f), find(0x50)), (None, None));
}

#[test]
fn lists_that_forbid_nothing_are_looked_up_apart() {
    let image = image(Layout::Offsets61);
    let at = |offset| Gva(TEXT + offset);
    assert!(image.has_fixup(at(0x640)));
    assert!(!image.has_fixup(at(0x63f)) && !image.has_fixup(at(0x641)));
    assert!(image.is_ftrace_site(at(0x104)) && image.is_ftrace_site(at(0x660)));
    // The bytes look like such a site, but the list decides.
    assert!(!image.is_ftrace_site(at(0x610)));
    assert_eq!(image.forbidden(at(0x650)), None);
    let lock = |offset, first| image.forbidden_as_is(at(offset), first);
    assert_eq!(lock(0x650, 0x3e), Some(Forbidden::LockPrefix));
    assert_eq!(lock(0x650, 0xf0), None);
    assert_eq!(lock(0x651, 0x3e), None);
    // Filler in the list of lock prefixes is not an entry.
    assert_eq!(image.lists.locks(), 1);
}

#[test]
fn without_a_list_an_ftrace_site_is_recognized_by_its_bytes() {
    let (_, mut sections) = kernel::kernel(Layout::Offsets61);
    // call TEXT+0x200; call TEXT+0x300
    sections[0].data[0x104..0x109].copy_from_slice(&[0xe8, 0xf7, 0, 0, 0]);
    sections[0].data[0x109..0x10e].copy_from_slice(&[0xe8, 0xf2, 1, 0, 0]);
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("__fentry__", TEXT + 0x200, 0x10, true),
        ("_etext", TEXT + 0x4000, 0, true),
    ];
    let image = KernelImage::parse(&kernel::elf(&sections, &symbols)).unwrap();
    assert!(image.is_ftrace_site(Gva(TEXT + 0x104)));
    assert!(!image.is_ftrace_site(Gva(TEXT + 0x109)));
    assert!(image.is_ftrace_site(Gva(TEXT + 0x610)));
    assert!(!image.is_ftrace_site(Gva(TEXT + 0x620)));
    assert!(!image.is_ftrace_site(Gva(0)));
}

#[test]
fn code_known_by_its_name_alone_is_forbidden() {
    let (_, sections) = kernel::kernel(Layout::Offsets61);
    let symbol = |name, offset: u64, size| (name, TEXT + offset, size, true);
    let symbols = [
        symbol("_stext", 0, 0),
        symbol("ftrace_caller", 0x100, 0),
        symbol("ftrace_call", 0x120, 0),
        symbol("ftrace_caller_end", 0x140, 0x20),
        symbol("relocate_kernel", 0x200, 0x40),
        symbol("identity_mapped", 0x240, 0x40),
        symbol("swap_pages", 0x280, 0x40),
        symbol("core_restore_code", 0x300, 0x20),
        symbol("bpf_dispatcher_old_func", 0x400, 0x10),
        symbol("bpf_dispatcher_new_func", 0x410, 0x10),
        symbol("bpf_dispatcher_nop_func", 0x420, 0x10),
        symbol("__SCT__bpf_dispatcher_new_call", 0x500, 8),
        symbol("__x86_indirect_thunk_array", 0x600, 0x20),
        symbol("srso_return_thunk", 0x620, 0x20),
        symbol("__x86_return_thunk", 0x640, 0x10),
        symbol("__noinstr_text_start", 0x700, 0),
        symbol("__noinstr_text_end", 0x700, 0),
        symbol("__entry_text_start", 0x700, 0),
        symbol("__entry_text_end", 0x700, 0),
        symbol("__kprobes_text_start", 0x700, 0),
        symbol("__kprobes_text_end", 0x700, 0),
        symbol("_etext", 0x4000, 0),
    ];
    let image = KernelImage::parse(&kernel::elf(&sections, &symbols)).unwrap();
    for (offset, expected) in [
        (0xff, None),
        (0x100, Some(Forbidden::Copied)),
        (0x13f, Some(Forbidden::Copied)),
        (0x140, None),
        (0x200, Some(Forbidden::Copied)),
        (0x2bf, Some(Forbidden::Copied)),
        (0x2c0, None),
        (0x31f, Some(Forbidden::Copied)),
        (0x320, None),
        (0x400, Some(Forbidden::BpfDispatcher)),
        (0x408, Some(Forbidden::BpfDispatcher)),
        (0x409, None),
        (0x410, None),
        (0x420, None),
        (0x500, Some(Forbidden::StaticCall)),
        (0x600, Some(Forbidden::Thunk)),
        (0x64f, Some(Forbidden::Thunk)),
        (0x650, None),
    ] {
        assert_eq!(image.forbidden(Gva(TEXT + offset)), expected, "{offset:#x}");
    }
}

#[test]
fn members_are_found_by_their_paths() {
    let image = image(Layout::Offsets61);
    let questions = [
        ("task_struct", "comm"),
        ("task_struct", "tgid"),
        ("pcpu_hot", "current_task"),
        ("task_struct", "comm[3]"),
        // Index out of range; neither array nor structure; a pointer; no such member; bad path; not a
        // structure.
        ("task_struct", "comm[16]"),
        ("task_struct", "pid[0]"),
        ("task_struct", "pid.x"),
        ("pcpu_hot", "current_task.pid"),
        ("task_struct", "nothing"),
        ("task_struct", ""),
        ("task_struct", "comm[x]"),
        ("task_struct", "comm[3"),
        ("int", "pid"),
        ("", "pid"),
    ];
    let found: Vec<_> = image
        .members(&questions)
        .unwrap()
        .into_iter()
        .map(|member| member.map(|it| (it.offset, it.size)))
        .collect();
    let mut expected = vec![Some((32, 16)), Some((20, 4)), Some((8, 8)), Some((35, 1))];
    expected.resize(questions.len(), None);
    assert_eq!(found, expected);
    assert_eq!(image.member_offset("task_struct", "pid"), Ok(16));
    let error = image.member_offset("task_struct", "pjd").unwrap_err();
    assert_eq!(error.to_string(), "no field `pjd` in `struct task_struct`");
}

#[test]
fn other_processors_and_other_files_are_refused() {
    let mut bytes = kernel::vmlinux(Layout::Offsets61);
    bytes[18] = 0xb7;
    assert!(matches!(
        KernelImage::parse(&bytes),
        Err(ImageError::Machine(0xb7))
    ));
    assert!(matches!(
        KernelImage::parse(b"MZ"),
        Err(ImageError::NotElf(_))
    ));
    assert!(matches!(
        KernelImage::parse(&[]),
        Err(ImageError::NotElf(_))
    ));
    let (_, mut sections) = kernel::kernel(Layout::Offsets61);
    sections.retain(|section| section.name != ".rodata");
    let error = KernelImage::parse(&kernel::elf(&sections, &[])).unwrap_err();
    assert!(matches!(error, ImageError::NoSymbols(_)), "{error:?}");
}

#[test]
fn sections_that_claim_the_same_bytes_are_refused() {
    let (_, sections) = kernel::kernel(Layout::Offsets61);
    let mut bytes = kernel::elf(&sections, &[]);
    let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap());
    let table = usize::try_from(table).unwrap();
    for section in 1..=5 {
        let header = table + 64 * section;
        let len = bytes.len() as u64 - 64;
        bytes[header + 24..][..8].copy_from_slice(&64_u64.to_le_bytes());
        bytes[header + 32..][..8].copy_from_slice(&len.to_le_bytes());
    }
    assert!(matches!(
        KernelImage::parse(&bytes),
        Err(ImageError::Overlap)
    ));
}

/// Calls every look-up that a damaged image could break.
fn poke(image: &KernelImage) {
    for at in (TEXT..TEXT + 0x1000)
        .step_by(7)
        .chain([0, u64::MAX, 1 << 63])
    {
        let at = Gva(at);
        let _ = (
            image.forbidden(at),
            image.forbidden_as_is(at, 0x3e),
            image.has_fixup(at),
            image.is_ftrace_site(at),
            image.bytes_at(at, 16),
            image.symbols().containing(at),
        );
    }
    let _ = (
        image.symbols().lookup("vfs_raed"),
        image.task_layout(),
        image.idt_bp_entry(),
    );
}

proptest! {
    #[test]
    fn garbage_is_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let _ = KernelImage::parse(&bytes);
    }

    #[test]
    fn truncated_images_are_never_a_panic(layout in 0..6_usize, keep in any::<prop::sample::Index>()) {
        let bytes = kernel::vmlinux(Layout::ALL[layout]);
        if let Ok(image) = KernelImage::parse(&bytes[..keep.index(bytes.len())]) {
            poke(&image);
        }
    }

    #[test]
    fn damaged_images_are_never_a_panic(
        layout in 0..6_usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
        in_headers in proptest::collection::vec((0..400_usize, any::<u8>()), 0..3),
    ) {
        let mut bytes = kernel::vmlinux(Layout::ALL[layout]);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        for (at, value) in in_headers {
            bytes[at] = value;
        }
        if let Ok(image) = KernelImage::parse(&bytes) {
            poke(&image);
        }
    }

    #[test]
    fn damaged_btf_is_never_a_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = kernel::btf();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut.index(bytes.len() / 2));
        if let Ok(btf) = crate::types::Types::parse(&bytes) {
            let _ = btf.field("task_struct", "comm", 16);
            let _ = btf.field("pcpu_hot", "current_task", 8);
            let _ = btf.members(&[("task_struct", "comm[7]"), ("pcpu_hot", "current_task.pid")]);
        }
    }
}

/// Checks what is read from a real kernel. Runs only if `HVPROBE_TEST_VMLINUX` names an uncompressed x86-64
/// `vmlinux`. Written for Debian's 6.1 cloud kernel, but any kernel with kprobes, BTF and `KALLSYMS_ALL` should
/// pass.
#[test]
fn real_kernel_is_understood_when_one_is_given() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let bytes = std::fs::read(path).unwrap();
    let start = Instant::now();
    let image = KernelImage::parse(&bytes).unwrap();
    eprintln!(
        "{} symbols of {:?} in {:?}",
        image.symbols().len(),
        image.release(),
        start.elapsed()
    );
    eprintln!("{:?}", image.lists);
    let symbols = image.symbols();
    assert!(symbols.len() > 20_000);
    assert_eq!(image.unknown_lists(), []);
    assert!(image.release().is_some() && image.init_top_pgt().is_some());
    let layout = image.task_layout().unwrap();
    assert_eq!(layout.tgid, layout.pid + 4);

    for name in ["vfs_read", "vfs_write", "do_sys_openat2", "schedule"] {
        let symbol = symbols.lookup(name).unwrap();
        assert!(image.is_text(symbol.addr), "{name}");
        assert_eq!(image.forbidden(symbol.addr), None, "{name}");
        assert_eq!(
            symbols.containing(symbol.addr.wrapping_add(5)),
            Some((symbol, 5))
        );
    }
    for name in ["do_int3", "exc_int3", "asm_exc_int3", "kprobe_int3_handler"] {
        let symbol = symbols.lookup(name).unwrap();
        assert!(image.forbidden(symbol.addr).is_some(), "{name}");
    }
    let error = symbols.lookup("vfs_raed").unwrap_err();
    assert!(
        matches!(&error, LookupError::Unknown { near, .. } if near[0] == "vfs_read"),
        "{error}"
    );
    // `__ksymtab` lists exported symbols a second time: {s32 value, s32 name, s32 namespace}, each relative to
    // its own address.
    let elf = Elf::parse(&bytes).unwrap();
    let exports = elf.section("__ksymtab").unwrap();
    let mut exported = 0;
    for (entry, at) in exports
        .data
        .chunks_exact(12)
        .zip((exports.at.start..).step_by(12))
    {
        let relative = |field: usize| {
            let offset = u32_at(entry, field).unwrap().cast_signed();
            Gva(at + field as u64)
                .0
                .wrapping_add_signed(i64::from(offset))
        };
        let name: Vec<u8> = (relative(4)..)
            .map(|at| elf.read(Gva(at), 1).unwrap()[0])
            .take_while(|byte| *byte != 0)
            .collect();
        let name = String::from_utf8(name).unwrap();
        let found = symbols
            .iter()
            .any(|s| s.name == name && s.addr == Gva(relative(0)));
        // This includes per-CPU variables and the like, which are exported by offset.
        assert!(found, "{name}");
        exported += 1;
        if exported == 500 {
            break;
        }
    }
    assert_eq!(exported, 500);

    // Code that the kernel copies is forbidden. Functions that hvprobe itself watches are not forbidden, and ftrace
    // can trace them.
    for (name, forbidden) in [
        ("ftrace_caller", Some(Forbidden::Copied)),
        ("relocate_kernel", Some(Forbidden::Copied)),
        ("do_init_module", None),
        ("free_module", None),
        ("do_task_dead", None),
    ] {
        let symbol = symbols.lookup(name).unwrap();
        assert_eq!(image.forbidden(symbol.addr), forbidden, "{name}");
        if forbidden.is_none() {
            // At its entry, or after the ENDBR there.
            let sites = (0..16).filter(|n| image.is_ftrace_site(symbol.addr.wrapping_add(*n)));
            let sites: Vec<u64> = sites.collect();
            assert!(sites == [0] || sites == [4], "{name}: {sites:?}");
        }
    }
    let member = image.members(&[("module", "kallsyms"), ("module", "list")]);
    assert!(matches!(member.as_deref(), Ok([Some(_), Some(_)])));

    // Entries of the lock list are lock prefixes, except for a few inside alternatives. Entries of the list of
    // calls to `__fentry__` are calls or nops.
    let (mut locks, mut others) = (0, 0);
    for (at, code) in (image.text.at.start..).zip(&image.text.bytes) {
        let at = Gva(at);
        if image.forbidden_as_is(at, 0x3e).is_some() {
            locks += 1;
            others += u32::from(*code != 0xf0);
        }
        if image.is_ftrace_site(at) {
            assert!(matches!(code, 0xe8 | 0x0f), "{at}");
        }
    }
    assert!(locks > 1000 && others < locks / 100, "{others} of {locks}");

    // Every address that is forbidden as a jump label has a `jmp` or a nop.
    let mut labels = 0;
    let (start, end) = (image.text.at.start, image.text.at.end);
    let mut before = None;
    for at in (start..end).map(Gva) {
        let now = image.lists.find(at, symbols);
        if now == Some(Forbidden::JumpLabel) && before != now {
            labels += 1;
            let code = image.bytes_at(at, 2).unwrap();
            assert!(
                matches!(code, [0xeb | 0xe9, _] | [0x66, 0x90] | [0x0f, 0x1f]),
                "{at}: {code:x?}"
            );
        }
        before = now;
    }
    assert!(labels > 500, "{labels}");
}
