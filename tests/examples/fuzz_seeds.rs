//! Writes the initial inputs for mutation, small and mostly valid, into `fuzz/corpus`:
//!
//! ```text
//! cargo run --package hvprobe-tests --example fuzz_seeds
//! ```

use std::io::Write;
use std::path::Path;

use hvprobe_tests::fuzz::bzimage_around;

use hvprobe_fixtures::disk;
use hvprobe_fixtures::kernel::{self, Layout, TEXT};
use hvprobe_fixtures::{MODULE_VIRT, btf, kernel_file};
use hvprobe_linux::debug_info::DebugFile;

/// Address to which the targets link the table under test.
const TABLE: u64 = 0xffff_ffff_8200_0000;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (target, name, bytes) in seeds() {
        std::fs::create_dir_all(corpus.join(target))?;
        std::fs::write(corpus.join(target).join(name), bytes)?;
    }
    Ok(())
}

/// Returns target, name and content of each input.
fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut add = |target, name: &str, bytes: Vec<u8>| seeds.push((target, name.to_owned(), bytes));
    for layout in Layout::ALL {
        let symbols = symbols(layout);
        let mut rodata = b"Linux version 6.1.0-9-test (a@b)\0".to_vec();
        rodata.resize(rodata.len().next_multiple_of(8), 0);
        let at = TABLE + rodata.len() as u64;
        rodata.extend(kernel::kallsyms(&symbols, layout, at));
        let name = format!("{layout:?}").to_lowercase();
        add("kallsyms", &name, rodata);
    }
    add("image", "symtab", small_image());
    for (name, btf) in [("task", kernel::btf()), ("file", btf::sample().bytes())] {
        let types = u16::from_le_bytes([btf[12], btf[13]]);
        add("btf", name, [&types.to_le_bytes()[..], &btf[24..]].concat());
    }
    add("tables", "all", lists());
    for (format, (name, call, registers, end)) in [
        ("old", 0x005_u16, 0x105_u16, 0x400_u16),
        ("new", 0x205, 0xb05, 0x100),
        ("v72", 0x203, 0xb03, 0x100),
    ]
    .into_iter()
    .enumerate()
    {
        add("unwind", name, stack(format, [call, registers, end]));
    }
    for (name, age) in [("old", 0), ("new", 1)] {
        add("modules", name, modules(age));
    }

    let file = hvprobe_fixtures::dwarf::file();
    let of = DebugFile::parse(&file).expect("debug information");
    let index = of.index().expect("sound debug information");
    add("debug_index", "index", index.to_bytes());
    add("debug_info", "file", file);
    let module = hvprobe_fixtures::module_file::file(hvprobe_fixtures::dwarf::BUILD_ID, true);
    add("debug_info", "module", module);

    let kernel = small_kernel();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&kernel).expect("into memory");
    let gzip = gzip.finish().expect("into memory");
    add("bzimage", "elf", kernel.clone());
    add("bzimage", "gzip", bzimage_around(&gzip));
    add("payload", "plain", kernel.clone());
    for (name, relocations) in relocations() {
        add("payload", name, [relocated_kernel(), relocations].concat());
    }
    add("payload", "gzip", gzip);
    let block = lz4_flex::block::compress(&kernel);
    let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
    lz4.extend(u32::try_from(block.len()).expect("small").to_le_bytes());
    lz4.extend(block);
    add("payload", "lz4", with_size(lz4, &kernel));
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let zstd = ruzstd::encoding::compress_to_vec(kernel.as_slice(), level);
    add("payload", "zstd", with_size(zstd, &kernel));
    // With the options of the kernel's build (scripts/xz_wrap.sh): CRC32, and the x86 branch filter.
    let mut options = lzma_rust2::XzOptions::with_preset(1);
    options.set_check_sum_type(lzma_rust2::CheckType::Crc32);
    options.prepend_pre_filter(lzma_rust2::FilterType::BcjX86, 0);
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), options).expect("the options are sound");
    xz.write_all(&kernel).expect("into memory");
    let xz = xz.finish().expect("into memory");
    add("payload", "xz", with_size(xz, &kernel));

    for (name, text) in [
        ("symbol", "p vfs_read"),
        ("offset", "p:mine/read_more vfs_read+0x10"),
        ("address", " p:at\t0xffffffff81000010 "),
        ("cold", "p do_exit.cold+16"),
        ("return", "r8:back vfs_read"),
        ("arguments", "p vfs_read $arg1 +8(%di):u64 if pid == 1"),
        (
            "casts",
            "r f (s,m.n)(+u8(a->b.c))->d:x8[4] this_cpu_read(@v) $retval->e",
        ),
        (
            "every",
            "p f $arg* @v-8 @0x1000 $stack3 $current->pid b=\\-1 \\\"x\":string",
        ),
        (
            "filter",
            "p f a:b3@2/8 if !(a >= 0x10 && comm ~ \"*[!b]?\") || a & 6",
        ),
        (
            "file",
            "p:e f a=%di # a\nevents/kprobes/e/filter:a > 1\necho 'hist:keys=a' >> events/kprobes/e/trigger",
        ),
        (
            "types",
            "p f a:symstr +0(b):string[2] c:%pD d=$comm e:symbol",
        ),
    ] {
        add("definition", name, text.into());
    }
    for (name, text) in [
        ("capture", "+0x10(%di):32"),
        ("change", "@0xffffffff81000000 = u32:-ENOMEM"),
        ("condition", "%r8 >= -1"),
        ("decision", "%ax=1, +8(%si)=hex:00ff, return=-EIO"),
        ("ask", "1500ms,jump=0x1000"),
    ] {
        add("language", name, text.into());
    }
    for (name, text) in [
        ("line", "fs/read_write.c:450 count"),
        ("range", "vfs_read@fs/read_write.c:3-7"),
        (
            "every",
            "my:ev=vfs_read@read_write.c:12 n=file->f_pos:x64 a.b[2]->c buf:string@user %ax \
             $vars if n > 3",
        ),
        ("text", "ev=vfs_read;ret=x $params b=+0(%di):u32"),
    ] {
        add("perf_probe", name, text.into());
    }
    for (name, text) in [
        (
            "count",
            "kprobe:vfs_read /arg2 > 100/ { @[comm] = hist(arg2); }",
        ),
        (
            "aside",
            "BEGIN { printf(\"begun %%\\n\"); time(); } interval:s:5, i:ms:10 { print(@x, 3); clear(@x); } \
             END { delete(@x); exit() } k:f { @x = count() }",
        ),
        (
            "returns",
            "kretprobe:ext4:ext4_*, kr:vfs_read /retval >= 0 && !(pid == 1 || comm != \"dd\")/ { \
             @ns[func, str(args.file->f_path)] = lhist(duration, 0, 1000, 100); \
             @[\"x\", 3, ksym(arg0)] = sum(retval); }",
        ),
        (
            "print",
            "k:a+4 { /* c */ printf(\"%-8.3s|%#08lx %c %p\\t%u\", kstack, tid, 65, curtask, nsecs); // d\n}",
        ),
    ] {
        add("script", name, text.into());
    }
    for (name, text) in [
        ("star", "vfs_*\0vfs_open"),
        ("class", "[!a-u]fs_rea?\0"),
        ("either", "{vfs,__x64_sys}_{read,write}"),
        ("typo", "vfs_raed\0vfs_reader"),
    ] {
        add("pattern", name, text.into());
    }
    for (name, code) in INSTRUCTIONS {
        let mut bytes = vec![u8::try_from(code.len()).expect("short")];
        bytes.extend(*code);
        bytes.extend(TEXT.to_le_bytes());
        bytes.extend((-0x10_0000_i32).to_le_bytes());
        bytes.push(0);
        bytes.extend((0x1000_u64..0x1012).flat_map(u64::to_le_bytes));
        add("insn", name, bytes);
    }
    let at = |at: u64, code: &[u8]| [&at.to_le_bytes()[..], code].concat();
    for (name, code) in [
        ("nops", &b"\x90\x90\x90\xfc\x6a\xff"[..]),
        ("clac", b"\x0f\x01\xca\xfc\x6a\xff"),
        ("endbr", b"\xf3\x0f\x1e\xfa\x0f\x01\xca\xfc"),
    ] {
        add("gate", name, at(TEXT, code));
    }
    let function =
        b"\xf3\x0f\x1e\xfa\x0f\x1f\x44\0\0\x55\x48\x89\xe5\xe8\0\0\0\0\x74\x02\x5d\xc3\x0f\x0b";
    add("boundary", "function", at(TEXT, function));
    add("boundary", "wrapping", at(u64::MAX - 3, function));
    let mut reading = vec![4, 0, 0];
    reading.extend(b"\xf3\x0f\x1e\xfa\x0f\x1f\x44\0\0\x55\x48\x89\xe5");
    reading.resize(3 + 256, 0x90);
    reading.extend(reads());
    add("detour", "reading", reading);
    add("fetched", "items", [reads(), record()].concat());
    add("fetched", "cut", [&reads()[..], &record()[..60]].concat());
    for five in [false, true] {
        let name = if five { "five" } else { "four" };
        add("walk", name, walk(five));
        add("hidden", name, hidden(five));
    }
    for (target, name, bytes) in storage() {
        add(target, name, bytes);
    }
    seeds
}

/// Returns the inputs of the targets about disk images. That of `disk` with ext4 was made by `mke2fs`, and the zeros
/// at its end were cut off.
fn storage() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let image = disk::uki(&[
        (".osrel", b"PRETTY_NAME=\"A 1\""),
        (".cmdline", b"quiet"),
        (".linux", b"kernel"),
        (".initrd", b"initrd"),
    ]);
    let entry =
        b"# a\ntitle A\nversion 6.1\nsort-key a\nlinux /linux\ninitrd /initrd\noptions a $b ${c}\n";
    let volume = disk::fat(&[
        ("/loader/loader.conf", b"default a*\n"),
        ("/loader/entries/a.conf", entry),
        ("/EFI/Linux/b.efi", &image),
        ("/linux", b"kernel"),
        ("/initrd", b"initrd"),
    ]);
    let script = b"if [ -s $prefix/grubenv ]; then load_env; fi
if [ \"${next_entry}\" ] ; then set default=\"${next_entry}\"; else set default=0; fi
menuentry_id_option=\"--id\"; export menuentry_id_option
function video { insmod all_video; }
menuentry 'A' --class a $menuentry_id_option 'a' {
  video
  if [ x$grub_platform = xxen ]; then insmod xzio; else search --file --set=root /vmlinuz; fi
  linux /vmlinuz root=UUID=1 \"a b\"
  initrd /initrd.img
}
submenu B { menuentry C { linux ($root)/vmlinuz } }
if [ \"$grub_platform\" = efi ]; then menuentry D { fwsetup }; fi
";
    let entries = disk::gpt(&[
        (disk::ESP, "EFI", &[0; 512]),
        (disk::LINUX, "root", &[0; 512]),
    ]);
    vec![
        ("boot_entry", "every", entry.to_vec()),
        ("disk", "fat", volume.clone()),
        (
            "disk",
            "mbr",
            disk::mbr(&[(0x83, &[0; 512]), (0x0c, &volume)]),
        ),
        ("gpt", "two", entries[1024..1024 + 256].to_vec()),
        ("grub", "every", script.to_vec()),
        ("uki", "every", image),
    ]
}

/// Returns the items that a detour reads, in the format of the targets `detour` and `fetched`.
fn reads() -> Vec<u8> {
    let mut bytes = vec![4];
    // RDI itself; 12 bytes through two pointers from RSI; a text at RSI; a text at a constant address.
    bytes.extend([0x70, 8, 0]);
    bytes.extend([0x68, 0, 8, 0, 0, 0, 2, 0xf0, 0xff, 0xff, 0xff, 12, 0]);
    bytes.extend([0x64, 1, 0, 0, 0, 0, 60, 0x80]);
    bytes.extend([0x05, 1, 2, 3, 4, 5, 6, 7, 8]);
    bytes.extend([4, 0, 0, 0, 0, 0, 0, 0, 0x80, 7, 0x80]);
    bytes
}

/// Returns a record with the items of [`reads`]: RDI and the word of bits, then areas of 1, 2, 8 and 1 words.
fn record() -> Vec<u8> {
    let text = |text: &[u8]| {
        let mut bytes = text.to_vec();
        bytes.resize(text.len().next_multiple_of(8), 0);
        bytes
    };
    let words = [
        // Time, flags, RDI, and the word of bits: the second item could not be read.
        [[0; 24].as_slice(), &[2, 0, 0, 0, 0, 0, 0, 0]].concat(),
        vec![0x11; 8],
        vec![0x22; 16],
        text(b"a text that ends in its second cell, which is not the first one"),
        text(b"1234567"),
    ]
    .concat();
    let mut bytes = Vec::new();
    for cell in words.chunks(56) {
        bytes.extend([3, 0, 0, 0, 9, 0, 0, 3]);
        bytes.extend(cell);
    }
    bytes
}

fn with_size(mut stream: Vec<u8>, kernel: &[u8]) -> Vec<u8> {
    stream.extend(u32::try_from(kernel.len()).expect("small").to_le_bytes());
    stream
}

/// Returns just enough symbols for a kallsyms table. One of the names is so long that its length takes two bytes.
fn symbols(layout: Layout) -> Vec<kernel::Raw> {
    let mut symbols = Vec::new();
    if !matches!(layout, Layout::Offsets615 | Layout::Place70) {
        symbols.push(('A', "current_task".to_owned(), 0x40));
    }
    symbols.push(('T', "_stext".to_owned(), TEXT));
    for n in 0..66 {
        symbols.push(('t', format!("vfs_{n}"), TEXT + 0x10 * n));
    }
    symbols.push(('t', "x".repeat(0x90), TEXT + 0x800));
    symbols.push(('T', "_etext".to_owned(), TEXT + 0x1000));
    symbols
}

fn section(name: &'static str, at: u64, exec: bool, data: Vec<u8>) -> kernel::Section {
    kernel::Section {
        name,
        at,
        exec,
        data,
    }
}

fn small_image() -> Vec<u8> {
    let banner = b"Linux version 6.1.0-9-test (a@b)\0".to_vec();
    kernel::elf(
        &[
            section(".text", TEXT, true, vec![0x90; 0x100]),
            section(".rodata", TABLE, false, banner),
            section(".BTF", TABLE + 0x1000, false, kernel::btf()),
        ],
        &[
            ("_stext", TEXT, 0, true),
            ("asm_exc_int3", TEXT + 0x10, 0x20, true),
            ("_etext", TEXT + 0x100, 0, true),
            ("current_task", 0x40, 8, false),
            ("init_top_pgt", TABLE, 8, false),
        ],
    )
}

/// Returns a bootable file with one segment at 16 MiB.
fn small_kernel() -> Vec<u8> {
    // The file has the physical address and the entry point of a kernel: the link address less `kernel::OFFSET`.
    kernel::elf(&[section(".text", TEXT, true, vec![0xf4; 0x40])], &[])
}

fn lists() -> Vec<u8> {
    let sizes = [1_u8, 2, 1, 2];
    let mut bytes = sizes.to_vec();
    let start = bytes.len();
    let here = |bytes: &Vec<u8>| TABLE + (bytes.len() - start) as u64;
    bytes.extend((TEXT + 0x10).to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    // Jump labels, static calls, exceptions: entries of 16, 8 and 12 bytes. Their first four bytes are an address
    // relative to the entry's own.
    for (size, entry) in sizes.into_iter().skip(1).zip([16, 8, 12]) {
        let end = bytes.len() + usize::from(size) * 16;
        while bytes.len() + entry <= end {
            let target = TEXT + 0x100 + 2 * bytes.len() as u64;
            let offset = target.wrapping_sub(here(&bytes)).to_le_bytes();
            bytes.extend(&offset[..4]);
            bytes.resize(bytes.len() + entry - 4, 0);
        }
        bytes.resize(end, 0);
    }
    bytes
}

/// Returns an input with the unwind tables of three functions, and a stack with their frames: one function has 24
/// bytes on the stack, one was interrupted, and one is the outermost.
fn stack(format: usize, words: [u16; 3]) -> Vec<u8> {
    /// Index of the stack's word at which the saved registers begin.
    const REGISTERS: usize = 5;
    let mut bytes = vec![u8::try_from(format).expect("small"), 3];
    for (offset, word) in [32_u16, 0, 0].into_iter().zip(words) {
        bytes.extend(offset.to_le_bytes());
        bytes.extend([0, 0]);
        bytes.extend(word.to_le_bytes());
    }
    // At the beginning of the first function, with RSP at the beginning of the stack.
    bytes.extend([0x10, 0, 0, 0]);
    bytes.extend(0_u64.to_le_bytes());
    let mut stack = [0; REGISTERS + 24];
    stack[0] = TEXT + 0x28;
    stack[4] = TEXT + 0x38;
    stack[REGISTERS + 16] = TEXT + 0x48;
    stack[REGISTERS + 17] = 0x10;
    stack[REGISTERS + 19] = 0xffff_c900_0000_0000 + 8 * 20;
    bytes.extend(stack.iter().flat_map(|word: &u64| word.to_le_bytes()));
    bytes
}

/// Returns an input with a guest whose first module is renamed, and a stack that leads through two modules.
fn modules(age: u8) -> Vec<u8> {
    /// Place of the first module's name in the target's format, and the kind of a write of eight bytes.
    const NAME: u16 = 0x1018;
    const WORD: u8 = 0;
    let mut bytes = vec![age];
    bytes.extend(NAME.to_le_bytes());
    bytes.push(WORD);
    bytes.extend(b"renamed\0");
    bytes.extend([0xff; 11]);
    // Interrupted at 0x120 of the first module, with RSP at the beginning of the stack.
    bytes.extend([0x20, 1, 0, 0]);
    bytes.extend(0_u64.to_le_bytes());
    let mut stack = [0; 8];
    stack[4] = MODULE_VIRT.0 + 0x3020;
    stack[7] = TEXT + 0x28;
    bytes.extend(stack.iter().flat_map(|word: &u64| word.to_le_bytes()));
    bytes
}

/// Name and code of instructions of every kind.
const INSTRUCTIONS: &[(&str, &[u8])] = &[
    ("nop", &[0x0f, 0x1f, 0x44, 0, 0]),
    ("endbr64", &[0xf3, 0x0f, 0x1e, 0xfa]),
    ("push", &[0x41, 0x57]),
    ("pop", &[0x5d]),
    ("mov", &[0x48, 0x89, 0xe5]),
    ("lea", &[0x48, 0x8d, 0x44, 0x8f, 0x10]),
    ("add", &[0x48, 0x83, 0xc0, 1]),
    ("sub", &[0x48, 0x83, 0xec, 0x28]),
    ("test", &[0x48, 0x85, 0xff]),
    ("cmp", &[0x48, 0x39, 0xf7]),
    ("call", &[0xe8, 0, 1, 0, 0]),
    ("call_register", &[0xff, 0xd0]),
    ("call_memory", &[0xff, 0x15, 0, 1, 0, 0]),
    ("jmp", &[0xeb, 0x10]),
    ("jmp_memory", &[0xff, 0x24, 0xc5, 0, 0x40, 0x80, 0xff]),
    ("je", &[0x74, 0x10]),
    ("jne_near", &[0x0f, 0x85, 0x10, 0, 0, 0]),
    ("ret", &[0xc3]),
    ("ret_n", &[0xc2, 8, 0]),
    ("pushf", &[0x9c]),
    ("popf", &[0x9d]),
    ("cli", &[0xfa]),
    ("sti", &[0xfb]),
    ("load", &[0x48, 0x8b, 0x47, 8]),
    ("rip_relative", &[0x48, 0x8b, 0x05, 0xf0, 0xff, 0xff, 0xff]),
    ("per_cpu", &[0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0xad, 1, 0]),
    ("lock", &[0xf0, 0x48, 0x0f, 0xb1, 0x0f]),
    ("rep", &[0xf3, 0x48, 0xab]),
    ("avx", &[0xc5, 0xfd, 0x6f, 0x05, 0, 4, 0, 0]),
    ("movabs", &[0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8]),
];

/// An address with index 1 in the tables of levels 4 to 1. It is canonical with four and with five levels.
const ONES: u64 = 0x0000_0080_4020_1000;

/// Returns tables in the format of the target `walk`. Each table is in the page after its parent, and the last one
/// maps the page after itself.
fn entries(five: bool) -> Vec<u8> {
    let mut bytes = vec![u8::from(five)];
    // The five-level root has its one entry at index 0, as ONES is below 2^47.
    let (levels, top): (u16, u16) = if five { (5, 0) } else { (4, 1) };
    let mut entry = |index: u16, value: u64| {
        bytes.extend(index.to_le_bytes());
        bytes.extend(value.to_le_bytes());
    };
    for level in 0..levels {
        let index = if level == 0 { top } else { 1 };
        entry(level * 512 + index, (u64::from(level + 1) * 0x1000) | 0x23);
    }
    // A large page, in the level-2 table.
    entry((levels - 2) * 512 + 2, 0x83 | 1 << 63);
    entry(u16::MAX, 0);
    bytes.truncate(bytes.len() - 8);
    bytes
}

fn walk(five: bool) -> Vec<u8> {
    let mut bytes = entries(five);
    let accesses: [(u64, u16); 4] = [
        (ONES + 8, 8),
        (ONES + 0xffc, 8),
        (ONES + 0x20_0000, 64),
        (u64::MAX - 7, 8),
    ];
    for (at, len) in accesses {
        bytes.extend(at.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(16_u64.to_le_bytes());
    }
    bytes
}

fn hidden(five: bool) -> Vec<u8> {
    let mut bytes = entries(five);
    bytes.extend(ONES.to_le_bytes());
    bytes.push(8);
    bytes.extend(200_u16.to_le_bytes());
    bytes
}

/// Physical addresses of the text and the data of [`relocated_kernel`].
const PLACES: [u64; 2] = [0x100_0000, 0x120_0000];

/// Returns a kernel whose text and data hold 16 bytes each.
fn relocated_kernel() -> Vec<u8> {
    let [text, data] = PLACES;
    kernel_file::elf(
        text,
        &[(text, &[0x90; 16], 4096), (data, &[0x55; 16], 4096)],
    )
}

/// Returns relocations of [`relocated_kernel`], with a name for each form.
fn relocations() -> [(&'static str, Vec<u8>); 3] {
    let low = |at: u64| u32::try_from(at + 0x8000_0000).expect("the low half");
    let [text, data] = PLACES.map(low);
    let all = |wide| [wide, [data], [text]];
    let lists = |lists: [[u32; 1]; 3], without_inverse| {
        let lists = lists.each_ref().map(|list| &list[..]);
        kernel_file::relocations(lists, without_inverse)
    };
    [
        ("relocations", lists(all([text + 8]), false)),
        ("relocations_without_inverse", lists(all([text + 8]), true)),
        ("relocation_outside", lists(all([text + 12]), true)),
    ]
}
