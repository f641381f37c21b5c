//! A small made-up kernel image for tests: real structures, no real code.

use std::collections::BTreeMap;

/// Where the made-up kernel's text begins.
pub(crate) const TEXT: u64 = 0xffff_ffff_8100_0000;
/// Virtual less physical address.
pub(crate) const OFFSET: u64 = 0xffff_ffff_8000_0000;
const RODATA: u64 = 0xffff_ffff_8200_0000;
const BTF: u64 = 0xffff_ffff_8280_0000;
const DATA: u64 = 0xffff_ffff_82a0_0000;
const INIT_TEXT: u64 = 0xffff_ffff_8304_e000;
/// In the part of the first page of data that the tests of the engine use for nothing else.
pub(crate) const KPROBE_TABLE: u64 = DATA + 0xc00;
pub(crate) const KPROBE_MUTEX: u64 = DATA + 0xe00;

pub(crate) const BANNER: u64 = DATA + 0xf00;

/// Symbols of an image that has no text of any kind that must not be probed, and an empty exception
/// table.
pub(crate) const NOTHING_FORBIDDEN: [(&str, u64, u64, bool); 8] = [
    ("__start___ex_table", DATA, 0, false),
    ("__stop___ex_table", DATA, 0, false),
    ("__noinstr_text_start", TEXT + 0x4000, 0, true),
    ("__noinstr_text_end", TEXT + 0x4000, 0, true),
    ("__entry_text_start", TEXT + 0x4000, 0, true),
    ("__entry_text_end", TEXT + 0x4000, 0, true),
    ("__kprobes_text_start", TEXT + 0x4000, 0, true),
    ("__kprobes_text_end", TEXT + 0x4000, 0, true),
];

/// How kernels of several ages lay out kallsyms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Before 4.20, absolute addresses, 64-bit markers.
    Absolute,
    /// 6.1: offsets first, per-CPU symbols as they are.
    Offsets61,
    /// 6.2, and 6.1 with backports: as 6.1, with `seqs_of_names`.
    Offsets62,
    /// 6.4: offsets last.
    Offsets64,
    /// 6.15: the same without per-CPU symbols at zero.
    Offsets615,
    /// 7.0: relative to their own place, tables aligned to 4.
    Place70,
}

impl Layout {
    pub(crate) const ALL: [Self; 6] = [
        Self::Absolute,
        Self::Offsets61,
        Self::Offsets62,
        Self::Offsets64,
        Self::Offsets615,
        Self::Place70,
    ];
}

/// A symbol: letter, name, address.
pub(crate) type Raw = (char, String, u64);

/// Encodes a kallsyms table that begins at `at`. `symbols` are sorted by address.
pub(crate) fn kallsyms(symbols: &[Raw], layout: Layout, at: u64) -> Vec<u8> {
    let align = if layout == Layout::Place70 { 4 } else { 8 };
    let base = symbols
        .iter()
        .map(|(_, _, addr)| *addr)
        .find(|addr| *addr >= 1 << 63)
        .unwrap();
    let mut out = Vec::new();
    // `seqs_of_names`: which order it tells does not matter here, but its length does.
    let seqs = || {
        (0_u32..)
            .take(symbols.len())
            .flat_map(|i| i.to_be_bytes().into_iter().skip(1))
    };
    let pad = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(align), 0);
    let offsets = |out: &mut Vec<u8>| {
        for (_, _, addr) in symbols {
            let offset = match layout {
                Layout::Place70 => addr.wrapping_sub(at + out.len() as u64),
                Layout::Offsets615 => addr - base,
                _ if *addr < 1 << 63 => *addr,
                _ => base.wrapping_sub(1).wrapping_sub(*addr),
            };
            out.extend_from_slice(&offset.to_le_bytes()[..4]);
        }
        pad(out);
        if layout != Layout::Place70 {
            out.extend_from_slice(&base.to_le_bytes());
        }
    };

    match layout {
        Layout::Absolute => {
            for (_, _, addr) in symbols {
                out.extend_from_slice(&addr.to_le_bytes());
            }
        }
        Layout::Offsets61 | Layout::Offsets62 => offsets(&mut out),
        _ => {}
    }
    out.extend_from_slice(&u32::try_from(symbols.len()).unwrap().to_le_bytes());
    pad(&mut out);

    let tokens: BTreeMap<u8, &str> =
        [(0, "zero_"), (0x80, "vfs_"), (0x81, "__"), (0xff, "filler")].into();
    let names = out.len();
    let mut markers = Vec::new();
    for (i, (letter, name, _)) in symbols.iter().enumerate() {
        if i % 256 == 0 {
            markers.push(out.len() - names);
        }
        let mut text = format!("{letter}{name}").into_bytes();
        for (code, part) in &tokens {
            while let Some(at) = text.windows(part.len()).position(|w| w == part.as_bytes()) {
                text.splice(at..at + part.len(), [*code]);
            }
        }
        match u8::try_from(text.len()) {
            Ok(len) if len < 0x80 => out.push(len),
            _ => {
                let [low, high, ..] = (text.len() << 1).to_le_bytes();
                out.extend([low >> 1 | 0x80, high]);
            }
        }
        out.extend(text);
    }
    pad(&mut out);
    let width = if layout == Layout::Absolute { 8 } else { 4 };
    for marker in markers {
        out.extend_from_slice(&(marker as u64).to_le_bytes()[..width]);
    }
    pad(&mut out);
    if matches!(layout, Layout::Offsets62) {
        out.extend(seqs());
        pad(&mut out);
    }
    let mut index = Vec::new();
    let table = out.len();
    for code in 0..=u8::MAX {
        index.extend_from_slice(&u16::try_from(out.len() - table).unwrap().to_le_bytes());
        match tokens.get(&code) {
            Some(part) => out.extend_from_slice(part.as_bytes()),
            None if code.is_ascii_graphic() => out.push(code),
            None => out.extend_from_slice(b"xyz"),
        }
        out.push(0);
    }
    pad(&mut out);
    out.extend(index);
    pad(&mut out);
    if matches!(
        layout,
        Layout::Offsets64 | Layout::Offsets615 | Layout::Place70
    ) {
        offsets(&mut out);
        pad(&mut out);
        out.extend(seqs());
    }
    out
}

/// A section to be written.
pub(crate) struct Section {
    pub(crate) name: &'static str,
    pub(crate) at: u64,
    pub(crate) exec: bool,
    pub(crate) data: Vec<u8>,
}

/// Writes an ELF file with these sections, each in a segment of its own, and optionally a symbol
/// table of (name, address, size, is function).
pub(crate) fn elf(sections: &[Section], symtab: &[(&str, u64, u64, bool)]) -> Vec<u8> {
    const HEADER: usize = 64;
    const PROGRAM: usize = 56;
    let mut out = vec![0; HEADER + PROGRAM * sections.len()];
    let mut names = vec![0];
    let mut name = |text: &str| {
        let at = u32::try_from(names.len()).unwrap();
        names.extend_from_slice(text.as_bytes());
        names.push(0);
        at
    };
    // name, type, flags, address, offset, size, link, info, entry size
    let mut headers: Vec<[u64; 9]> = vec![[0; 9]];
    for (i, section) in sections.iter().enumerate() {
        out.resize(out.len().next_multiple_of(16), 0);
        let (offset, size) = (out.len() as u64, section.data.len() as u64);
        out.extend_from_slice(&section.data);
        let program = &mut out[HEADER + PROGRAM * i..][..PROGRAM];
        program[..4].copy_from_slice(&1_u32.to_le_bytes());
        program[4] = if section.exec { 5 } else { 4 };
        let phys = section.at.wrapping_sub(OFFSET);
        for (k, word) in [offset, section.at, phys, size, size, 1]
            .into_iter()
            .enumerate()
        {
            program[8 + 8 * k..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let flags = if section.exec { 6 } else { 2 };
        headers.push([
            name(section.name).into(),
            1,
            flags,
            section.at,
            offset,
            size,
            0,
            0,
            0,
        ]);
    }
    if !symtab.is_empty() {
        let mut strings = vec![0];
        let mut table = vec![0; 24];
        for (text, at, size, function) in symtab {
            table.extend_from_slice(&u32::try_from(strings.len()).unwrap().to_le_bytes());
            table.extend([if *function { 0x12 } else { 0x11 }, 0, 1, 0]);
            table.extend_from_slice(&at.to_le_bytes());
            table.extend_from_slice(&size.to_le_bytes());
            strings.extend_from_slice(text.as_bytes());
            strings.push(0);
        }
        let link = headers.len() as u64 + 1;
        let (offset, size) = (out.len() as u64, table.len() as u64);
        headers.push([name(".symtab").into(), 2, 0, 0, offset, size, link, 1, 24]);
        out.extend(table);
        headers.push([
            name(".strtab").into(),
            3,
            0,
            0,
            out.len() as u64,
            strings.len() as u64,
            0,
            0,
            0,
        ]);
        out.extend(strings);
    }
    let shstrtab = name(".shstrtab");
    headers.push([
        shstrtab.into(),
        3,
        0,
        0,
        out.len() as u64,
        names.len() as u64,
        0,
        0,
        0,
    ]);
    out.extend(names);
    let table = out.len() as u64;
    for [name, kind, flags, at, offset, size, link, info, entry] in &headers {
        out.extend_from_slice(&name.to_le_bytes()[..4]);
        out.extend_from_slice(&kind.to_le_bytes()[..4]);
        for word in [flags, at, offset, size] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&link.to_le_bytes()[..4]);
        out.extend_from_slice(&info.to_le_bytes()[..4]);
        out.extend_from_slice(&1_u64.to_le_bytes());
        out.extend_from_slice(&entry.to_le_bytes());
    }
    let count = u16::try_from(headers.len()).unwrap();
    out[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
    out[20] = 1;
    out[24..32].copy_from_slice(&TEXT.wrapping_sub(OFFSET).to_le_bytes());
    out[32] = 64;
    out[40..48].copy_from_slice(&table.to_le_bytes());
    out[52] = 64;
    out[54] = 56;
    out[56] = u8::try_from(sections.len()).unwrap();
    out[58] = 64;
    out[60..62].copy_from_slice(&count.to_le_bytes());
    out[62..64].copy_from_slice(&(count - 1).to_le_bytes());
    out
}

/// BTF in which `task_struct` has `pid`, `tgid` and `comm` (behind a typedef and in an anonymous
/// structure), `pcpu_hot` a `current_task` in an anonymous union, and a `kprobe` and a `mutex` are as
/// in 6.1, as far as the engine looks at them.
pub(crate) fn btf() -> Vec<u8> {
    let mut strings = vec![0];
    let mut types = Vec::new();
    let mut s = |text: &str| {
        let at = u32::try_from(strings.len()).unwrap();
        strings.extend_from_slice(text.as_bytes());
        strings.push(0);
        at
    };
    let mut ty = |words: &[u32]| {
        words
            .iter()
            .for_each(|w| types.extend_from_slice(&w.to_le_bytes()))
    };
    let kind = |kind: u32, len: u32| kind << 24 | len;
    ty(&[s("int"), kind(1, 0), 4, 32]); // 1
    ty(&[s("pid_t"), kind(8, 0), 1]); // 2
    ty(&[s("char"), kind(1, 0), 1, 8]); // 3
    ty(&[0, kind(3, 0), 0, 3, 1, 16]); // 4: char [16]
    let pair = [s("pid"), 2, 0, s("tgid"), 2, 32];
    ty(&[&[0, kind(4, 2), 8][..], &pair].concat()); // 5
    // 6: the bit field in front must not be taken for `comm`.
    ty(&[s("task_struct"), 1 << 31 | kind(4, 3), 64]);
    ty(&[s("comm"), 1, 1 << 24, 0, 5, 16 * 8, s("comm"), 4, 32 * 8]);
    ty(&[0, kind(2, 0), 6]); // 7: struct task_struct *
    ty(&[0, kind(4, 1), 16, s("current_task"), 7, 64]); // 8
    ty(&[0, kind(5, 1), 64, 0, 8, 0]); // 9
    ty(&[s("pcpu_hot"), kind(4, 1), 64, 0, 9, 0]); // 10
    ty(&[s("hlist_node"), kind(4, 0), 16]); // 11
    ty(&[s("kprobe"), kind(4, 2), 48, s("hlist"), 11, 0]);
    ty(&[s("addr"), 7, 40 * 8]); // 12
    ty(&[s("mutex"), kind(4, 1), 32, s("owner"), 7, 0]); // 13
    let mut out = vec![0x9f, 0xeb, 1, 0];
    let len = |part: &[u8]| u32::try_from(part.len()).unwrap();
    for word in [24, 0, len(&types), len(&types), len(&strings)] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend(types);
    out.extend(strings);
    out
}

/// A whole made-up kernel. Its functions, from [`TEXT`] on, 0x100 bytes each:
/// `startup_64`, `vfs_read`, `twin` (twice), `do_int3` (blacklisted), `do_int3.cold`, one with a
/// jump label at +0x10 (five bytes) and +0x20 (two bytes), a static call at +0x30, an exception
/// table entry at +0x40, a lock prefix at +0x50 and an ftrace site at +0x60 (`sites`), `__SCT__x`, `exc_int3` (noinstr), `asm_exc_int3` (entry),
/// `thunk`, then fillers of 0x10 bytes, then [`WATCHED`] of as many.
pub(crate) fn vmlinux(layout: Layout) -> Vec<u8> {
    elf(&kernel(layout).1, &[])
}

/// The symbols and sections of [`vmlinux`].
pub(crate) fn kernel(layout: Layout) -> (Vec<Raw>, Vec<Section>) {
    let functions = [
        "startup_64",
        "vfs_read",
        "twin",
        "twin",
        "do_int3",
        "do_int3.cold",
        "sites",
        "__SCT__x",
        "exc_int3",
        "asm_exc_int3",
        "thunk",
    ];
    let mut symbols: Vec<Raw> = Vec::new();
    let mut add = |letter: char, name: &str, at: u64| symbols.push((letter, name.to_owned(), at));
    if layout != Layout::Offsets615 && layout != Layout::Place70 {
        add('A', "__per_cpu_start", 0);
        add('A', "current_task", 0x1fb80);
        add('A', "cpu_number", 0x1fb88);
    }
    add('T', "_stext", TEXT);
    for (i, name) in functions.into_iter().enumerate() {
        let at = TEXT + 0x100 * i as u64;
        match name {
            "exc_int3" => add('T', "__noinstr_text_start", at),
            "asm_exc_int3" => {
                add('T', "__noinstr_text_end", at);
                add('T', "__entry_text_start", at);
            }
            "thunk" => {
                add('T', "__entry_text_end", at);
                add('T', "__indirect_thunk_start", at);
            }
            _ => {}
        }
        add(if name == "twin" { 't' } else { 'T' }, name, at);
    }
    let fillers = TEXT + 0x100 * functions.len() as u64;
    add('T', "__indirect_thunk_end", fillers);
    add('T', "__kprobes_text_start", fillers);
    add('T', "__kprobes_text_end", fillers);
    for i in 0..600 {
        add('t', &format!("filler_{i:03}"), fillers + 0x10 * i);
        if i < 100 {
            // Encoded, this ends like a count of symbols that more names follow.
            add(
                't',
                &format!("pad_{i:03}azero_zero_zero_"),
                fillers + 0x10 * i,
            );
        }
    }
    for (i, name) in (0..).zip(WATCHED) {
        add('T', name, fillers + 0x2580 + 0x10 * i);
    }
    let long = format!("_R{}", "long".repeat(100));
    add('t', &long, fillers + 0x2650);
    let text_len = 0x4000;
    add('T', "_etext", TEXT + text_len);

    let mut text = vec![0x90; usize::try_from(text_len).unwrap()];
    let sites = 0x600;
    text[sites + 0x10..][..5].copy_from_slice(&[0x0f, 0x1f, 0x44, 0, 0]);
    text[sites + 0x20..][..2].copy_from_slice(&[0xeb, 0x10]);
    for site in [0x30, 0x60] {
        text[sites + site..][..5].copy_from_slice(&[0xe8, 0, 0, 0, 0]);
    }
    text[sites + 0x50..][..3].copy_from_slice(&[0xf0, 0xff, 0x07]);
    text[0x104..][..5].copy_from_slice(&[0x0f, 0x1f, 0x44, 0, 0]);

    let mut data = Vec::new();
    let place = |data: &[u8], at: u64| at.wrapping_sub(DATA + data.len() as u64).to_le_bytes();
    add('D', "init_top_pgt", DATA);
    add('d', "kprobe_table", KPROBE_TABLE);
    add('d', "kprobe_mutex", KPROBE_MUTEX);
    add('D', "linux_banner", BANNER);
    data.resize(0x1000, 0);
    add('D', "__start_kprobe_blacklist", DATA + data.len() as u64);
    data.extend_from_slice(&(TEXT + 0x400).to_le_bytes());
    add('D', "__stop_kprobe_blacklist", DATA + data.len() as u64);
    add('D', "__start___jump_table", DATA + data.len() as u64);
    let relative = |data: &mut Vec<u8>, to: u64| {
        let offset = place(data, to);
        data.extend_from_slice(&offset[..4]);
    };
    for (site, to) in [(0x610, 0x6f0), (0x620, 0x632)] {
        relative(&mut data, TEXT + site);
        relative(&mut data, TEXT + to);
        let key = place(&data, DATA);
        data.extend(key);
    }
    add('D', "__stop___jump_table", DATA + data.len() as u64);
    add('D', "__start_static_call_sites", DATA + data.len() as u64);
    relative(&mut data, TEXT + 0x630);
    relative(&mut data, DATA);
    add('D', "__stop_static_call_sites", DATA + data.len() as u64);
    add('D', "__start___ex_table", DATA + data.len() as u64);
    relative(&mut data, TEXT + 0x640);
    relative(&mut data, TEXT + 0x6f0);
    data.extend([0; 4]);
    add('D', "__stop___ex_table", DATA + data.len() as u64);
    add('D', "__smp_locks", DATA + data.len() as u64);
    let lock = place(&data, TEXT + 0x650);
    data.extend_from_slice(&lock[..4]);
    data.resize(data.len() + 12, 0);
    add('D', "__smp_locks_end", DATA + data.len() as u64);
    add('D', "__start_mcount_loc", DATA + data.len() as u64);
    for site in [0x104, 0x660] {
        data.extend_from_slice(&(TEXT + site).to_le_bytes());
    }
    add('D', "__stop_mcount_loc", DATA + data.len() as u64);
    if layout == Layout::Offsets615 || layout == Layout::Place70 {
        add('D', "pcpu_hot", DATA + data.len() as u64);
        data.resize(data.len() + 64, 0);
        add('D', "cpu_number", DATA + data.len() as u64);
        data.resize(data.len() + 8, 0);
    }
    add('T', "_sinittext", INIT_TEXT);
    add('t', "init_it", INIT_TEXT);
    add('T', "_einittext", INIT_TEXT + 0x80);

    let mut rodata =
        b"%s version %s\nLinux version %s (%s)\0Linux version 6.1.0-9-test (a@b)\0".to_vec();
    // Digits that are no token table, as in tables of character classes.
    rodata.extend(b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00".iter());
    rodata.resize(rodata.len().next_multiple_of(8) + 4096, 0);
    let at = RODATA + rodata.len() as u64;
    rodata.extend(kallsyms(&symbols, layout, at));
    rodata.resize(rodata.len() + 4096, 0);

    let section = |name, at, exec, data| Section {
        name,
        at,
        exec,
        data,
    };
    let sections = vec![
        section(".text", TEXT, true, text),
        section(".rodata", RODATA, false, rodata),
        section(".BTF", BTF, false, btf()),
        section(".data", DATA, false, data),
        section(".init.text", INIT_TEXT, true, vec![0x90; 0x80]),
    ];
    (symbols, sections)
}

/// Functions that the engine has an interest in.
pub(crate) const WATCHED: [&str; 13] = [
    "__switch_to",
    "do_task_dead",
    "do_init_module",
    "free_module",
    "ftrace_arch_code_modify_prepare",
    "ftrace_arch_code_modify_post_process",
    "arch_prepare_kprobe",
    "register_kprobe",
    "fixup_exception",
    "__schedule",
    "__put_task_struct",
    "machine_kexec",
    "page_fault_oops",
];

/// As [`vmlinux`], with something in its functions: `vfs_read` is as in [`VFS_READ`], and `sites`
/// at the entry of the exception table as in [`FIXUP`]; of the `filler`s those with an even number
/// begin with `push rbp; mov rbp, rsp`, the others with `mov rax, [rdi+8]; push rbp`, and all end in
/// `ret`, as does `__schedule`.
pub(crate) fn probed() -> Vec<u8> {
    elf(&probed_kernel(), &[])
}

/// The sections of [`probed`].
pub(crate) fn probed_kernel() -> Vec<Section> {
    probed_kernel_of(Layout::Offsets61)
}

/// The same of another age.
pub(crate) fn probed_kernel_of(layout: Layout) -> Vec<Section> {
    let (_, mut sections) = kernel(layout);
    let text = &mut sections[0].data;
    text[0x640..][..FIXUP.len()].copy_from_slice(&FIXUP);
    text[0x100..][..VFS_READ.len()].copy_from_slice(&VFS_READ);
    for (n, filler) in text[0xb00..][..600 * 0x10]
        .chunks_exact_mut(0x10)
        .enumerate()
    {
        if n % 2 == 0 {
            filler[..4].copy_from_slice(&[0x55, 0x48, 0x89, 0xe5]);
        } else {
            filler[..5].copy_from_slice(&[0x48, 0x8b, 0x47, 0x08, 0x55]);
        }
        filler[0xf] = 0xc3;
    }
    let schedule = WATCHED.iter().position(|name| *name == "__schedule");
    text[0xb00 + 0x2580 + 0x10 * schedule.unwrap() + 0xf] = 0xc3;
    sections
}

/// The function `vfs_read` of [`probed`].
pub(crate) const VFS_READ: [u8; 0x1a] = [
    0xf3, 0x0f, 0x1e, 0xfa, // +0x00 endbr64
    0x0f, 0x1f, 0x44, 0x00, 0x00, // +0x04 nop5, where ftrace puts its call
    0x55, // +0x09 push rbp
    0x48, 0x89, 0xe5, // +0x0a mov rbp, rsp
    0x48, 0x8b, 0x47, 0x08, // +0x0d mov rax, [rdi+8]
    0xff, 0xd0, // +0x11 call rax
    0x0f, 0x0b, // +0x13 ud2
    0xcc, // +0x15 int3
    0xeb, 0x00, // +0x16 jmp +0x18
    0x5d, // +0x18 pop rbp
    0xc3, // +0x19 ret
];

/// What `sites` of [`probed`] has at its entry of the exception table and after it. It does not
/// return.
pub(crate) const FIXUP: [u8; 12] = [
    0x0f, 0xb6, 0x47, 0x08, // +0x40 movzx eax, byte ptr [rdi+8]
    0x74, 0x02, // +0x44 je +0x48
    0xfb, // +0x46 sti
    0x90, // +0x47 nop
    0xf3, 0x0f, 0xb8, 0xc1, // +0x48 popcnt eax, ecx
];
