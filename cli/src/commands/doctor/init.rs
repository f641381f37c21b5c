//! The only program of the guest that is booted for a report. It runs batches of [`CALLS`] calls of getpgid and
//! prints the duration of each batch.
//!
//! The guest has no libraries, so the program is a static executable, generated here and packed into an initial
//! ramdisk (newc cpio). It prints `=NANOSECONDS` and a line feed for each batch. The first batch runs at once, and
//! a further one after each line that the program reads.

use std::arch::global_asm;
use std::io::{self, Write as _};

use cpio::newc::{Builder, ModeFileType, trailer};

/// Number of calls in a batch.
pub(super) const CALLS: u32 = 2000;

/// Load address of the program. The kernel maps whole pages, so the file begins at this address.
const BASE: u64 = 0x40_0000;
const HEADERS: u16 = EHDR + PHDR;
const EHDR: u16 = 64;
const PHDR: u16 = 56;

global_asm!(
    ".pushsection .rodata.hvprobe_report_init, \"a\", @progbits",
    ".globl hvprobe_report_init",
    ".globl hvprobe_report_init_end",
    "hvprobe_report_init:",
    "sub rsp, 128",
    "2:",
    // clock_gettime(CLOCK_MONOTONIC, rsp)
    "mov eax, 228",
    "mov edi, 1",
    "mov rsi, rsp",
    "syscall",
    "mov ebx, {calls}",
    "3:",
    // getpgid(0)
    "mov eax, 121",
    "xor edi, edi",
    "syscall",
    "dec ebx",
    "jnz 3b",
    "mov eax, 228",
    "mov edi, 1",
    "lea rsi, [rsp + 16]",
    "syscall",
    // rax = difference of the two times in nanoseconds.
    "mov rax, [rsp + 16]",
    "sub rax, [rsp]",
    "imul rax, rax, 1000000000",
    "add rax, [rsp + 24]",
    "sub rax, [rsp + 8]",
    // Digits of rax from the last to the first, between `=` and a line feed.
    "lea rsi, [rsp + 64]",
    "mov byte ptr [rsi], 10",
    "mov ecx, 10",
    "4:",
    "xor edx, edx",
    "div rcx",
    "add dl, 48",
    "dec rsi",
    "mov [rsi], dl",
    "test rax, rax",
    "jnz 4b",
    "dec rsi",
    "mov byte ptr [rsi], 61",
    // write(1, rsi, up to and with the line feed)
    "lea rdx, [rsp + 65]",
    "sub rdx, rsi",
    "mov eax, 1",
    "mov edi, 1",
    "syscall",
    // read(0, rsp, 64)
    "xor eax, eax",
    "xor edi, edi",
    "mov rsi, rsp",
    "mov edx, 64",
    "syscall",
    "test rax, rax",
    "jg 2b",
    // exit(0) at the end of the input
    "mov eax, 60",
    "xor edi, edi",
    "syscall",
    "hvprobe_report_init_end:",
    ".popsection",
    calls = const CALLS,
);

unsafe extern "C" {
    #[link_name = "hvprobe_report_init"]
    static CODE: u8;
    #[link_name = "hvprobe_report_init_end"]
    static CODE_END: u8;
}

fn code() -> &'static [u8] {
    let (begin, end) = (&raw const CODE, &raw const CODE_END);
    let length = end.addr() - begin.addr();
    // SAFETY: the two symbols are the start and the end of the same block of bytes in our own read-only data.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

/// Returns the program as an ELF executable with one segment (System V ABI, chapters 4 and 5).
fn executable() -> Vec<u8> {
    let code = code();
    let size = u64::from(HEADERS) + code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // ET_EXEC, EM_X86_64.
    file.extend([2_u16, 62].map(u16::to_le_bytes).as_flattened());
    file.extend(1_u32.to_le_bytes());
    let (entry, headers_at) = (BASE + u64::from(HEADERS), u64::from(EHDR));
    file.extend([entry, headers_at, 0].map(u64::to_le_bytes).as_flattened());
    file.extend(0_u32.to_le_bytes());
    // One program header, and no sections.
    file.extend(
        [EHDR, PHDR, 1, 0, 0, 0]
            .map(u16::to_le_bytes)
            .as_flattened(),
    );
    // PT_LOAD, PF_R | PF_X.
    file.extend([1_u32, 5].map(u32::to_le_bytes).as_flattened());
    file.extend(
        [0, BASE, BASE, size, size, 0x1000]
            .map(u64::to_le_bytes)
            .as_flattened(),
    );
    file.extend(code);
    file
}

/// Returns the initial ramdisk.
pub(super) fn archive() -> io::Result<Vec<u8>> {
    let folder = Builder::new("dev")
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Directory);
    let archive = folder.write(Vec::new(), 0).finish()?;
    // The kernel opens it as standard input, output and error of the first process.
    let console = Builder::new("dev/console")
        .mode(0o600)
        .rdev_major(5)
        .rdev_minor(1)
        .set_mode_file_type(ModeFileType::Char);
    let archive = console.write(archive, 0).finish()?;
    let executable = executable();
    let size = u32::try_from(executable.len()).map_err(io::Error::other)?;
    let mut init = Builder::new("init")
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Regular)
        .write(archive, size);
    init.write_all(&executable)?;
    trailer(init.finish()?)
}

/// Returns the durations in nanoseconds of the batches that the output `printed` completely reports.
pub(super) fn batches(printed: &[u8]) -> Vec<u64> {
    printed
        .split_inclusive(|&byte| byte == b'\n')
        .filter_map(|line| {
            let line = line.strip_suffix(b"\n")?.trim_ascii_end();
            let at = line.iter().rposition(|&byte| byte == b'=')?;
            str::from_utf8(line.get(at + 1..)?).ok()?.parse().ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn program_makes_a_batch_at_once_and_another_for_each_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("init");
        fs::write(&path, executable()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut printed = Vec::new();
        for batch in 1..=3 {
            assert!(stdout.read_until(b'\n', &mut printed).unwrap() > 2);
            let durations = batches(&printed);
            assert_eq!(durations.len(), batch, "{printed:?}");
            assert!(
                durations.iter().all(|ns| *ns >= u64::from(CALLS)),
                "{durations:?}"
            );
            if batch < 3 {
                stdin.write_all(b"\n").unwrap();
            }
        }
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn batches_are_read_from_whole_lines_whatever_is_before_them() {
        let printed = b"[    0.1] x=y\r\n=12\r\n[  1.0] late=34\r\n\r\nroot=/dev/x\n=5";
        assert_eq!(batches(printed), [12, 34]);
        assert_eq!(batches(b""), [0; 0]);
    }

    #[test]
    fn archive_has_a_console_and_an_init() {
        let archive = archive().unwrap();
        let mut names = Vec::new();
        let mut rest = archive.as_slice();
        loop {
            let entry = cpio::newc::Reader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            names.push((entry.entry().name().to_owned(), entry.entry().mode()));
            rest = entry.finish().unwrap();
        }
        let expected = [
            ("dev", 0o40755),
            ("dev/console", 0o20600),
            ("init", 0o100_755),
        ];
        assert_eq!(names, expected.map(|(name, mode)| (name.to_owned(), mode)));
    }
}
