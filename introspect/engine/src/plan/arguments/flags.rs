//! System-call arguments that consist of flags, and the names of the flags.
//!
//! In the kernel's headers the flags are macros, so its types do not contain them. Invariant: a table has the
//! values that programs see on x86-64 (include/uapi/ in the kernel's source), and its names are shown only for the
//! arguments that are listed with it.

use hvprobe_spec::shape::{Enumerator, ShapeKind};

/// A name, the mask of its bits, and their value. Rows with several bits come before rows with one of those
/// bits.
type Row = (&'static str, u64, u64);

/// `O_*`: asm-generic/fcntl.h.
const OPEN: &[Row] = &[
    ("O_RDONLY", 3, 0),
    ("O_WRONLY", 3, 1),
    ("O_RDWR", 3, 2),
    set("O_CREAT", 0o100),
    set("O_EXCL", 0o200),
    set("O_NOCTTY", 0o400),
    set("O_TRUNC", 0o1000),
    set("O_APPEND", 0o2000),
    set("O_NONBLOCK", 0o4000),
    set("O_SYNC", 0o4_010_000),
    set("O_DSYNC", 0o10_000),
    set("O_ASYNC", 0o20_000),
    set("O_DIRECT", 0o40_000),
    set("O_LARGEFILE", 0o100_000),
    set("O_TMPFILE", 0o20_200_000),
    set("O_DIRECTORY", 0o200_000),
    set("O_NOFOLLOW", 0o400_000),
    set("O_NOATIME", 0o1_000_000),
    set("O_CLOEXEC", 0o2_000_000),
    set("O_PATH", 0o10_000_000),
];

/// The flags of `O_*` that `pipe2` and `dup3` take.
const DESCRIPTOR: &[Row] = &[
    set("O_NONBLOCK", 0o4000),
    set("O_DIRECT", 0o40_000),
    set("O_CLOEXEC", 0o2_000_000),
];

/// `PROT_*`: asm-generic/mman-common.h.
const PROTECTION: &[Row] = &[
    ("PROT_NONE", u64::MAX, 0),
    set("PROT_READ", 1),
    set("PROT_WRITE", 2),
    set("PROT_EXEC", 4),
];

/// `MAP_*`: linux/mman.h, asm-generic/mman.h and mman-common.h, and asm/mman.h of x86.
const MAPPING: &[Row] = &[
    ("MAP_SHARED", 0xf, 1),
    ("MAP_PRIVATE", 0xf, 2),
    ("MAP_SHARED_VALIDATE", 0xf, 3),
    set("MAP_FIXED", 0x10),
    set("MAP_ANONYMOUS", 0x20),
    set("MAP_32BIT", 0x40),
    set("MAP_GROWSDOWN", 0x100),
    set("MAP_DENYWRITE", 0x800),
    set("MAP_EXECUTABLE", 0x1000),
    set("MAP_LOCKED", 0x2000),
    set("MAP_NORESERVE", 0x4000),
    set("MAP_POPULATE", 0x8000),
    set("MAP_NONBLOCK", 0x1_0000),
    set("MAP_STACK", 0x2_0000),
    set("MAP_HUGETLB", 0x4_0000),
    set("MAP_SYNC", 0x8_0000),
    set("MAP_FIXED_NOREPLACE", 0x10_0000),
];

/// `CLONE_*`: linux/sched.h. The lowest eight bits are the number of a signal.
const CLONE: &[Row] = &[
    set("CLONE_VM", 0x100),
    set("CLONE_FS", 0x200),
    set("CLONE_FILES", 0x400),
    set("CLONE_SIGHAND", 0x800),
    set("CLONE_PIDFD", 0x1000),
    set("CLONE_PTRACE", 0x2000),
    set("CLONE_VFORK", 0x4000),
    set("CLONE_PARENT", 0x8000),
    set("CLONE_THREAD", 0x1_0000),
    set("CLONE_NEWNS", 0x2_0000),
    set("CLONE_SYSVSEM", 0x4_0000),
    set("CLONE_SETTLS", 0x8_0000),
    set("CLONE_PARENT_SETTID", 0x10_0000),
    set("CLONE_CHILD_CLEARTID", 0x20_0000),
    set("CLONE_DETACHED", 0x40_0000),
    set("CLONE_UNTRACED", 0x80_0000),
    set("CLONE_CHILD_SETTID", 0x100_0000),
    set("CLONE_NEWCGROUP", 0x200_0000),
    set("CLONE_NEWUTS", 0x400_0000),
    set("CLONE_NEWIPC", 0x800_0000),
    set("CLONE_NEWUSER", 0x1000_0000),
    set("CLONE_NEWPID", 0x2000_0000),
    set("CLONE_NEWNET", 0x4000_0000),
    set("CLONE_IO", 0x8000_0000),
];

/// `AT_*` of calls that take a path: linux/fcntl.h.
const PATH: &[Row] = &[
    set("AT_SYMLINK_NOFOLLOW", 0x100),
    set("AT_SYMLINK_FOLLOW", 0x400),
    set("AT_NO_AUTOMOUNT", 0x800),
    set("AT_EMPTY_PATH", 0x1000),
];

/// `AT_*` of calls that remove something: linux/fcntl.h. The bit has this meaning only in these calls.
const UNLINK: &[Row] = &[set("AT_REMOVEDIR", 0x200)];

/// The arguments that consist of flags: the calls, the name of the argument, and its flags.
const ARGUMENTS: &[(&[&str], &str, &[Row])] = &[
    (&["open", "openat"], "flags", OPEN),
    (&["pipe2", "dup3"], "flags", DESCRIPTOR),
    (&["mmap", "mprotect", "pkey_mprotect"], "prot", PROTECTION),
    (&["mmap"], "flags", MAPPING),
    (&["clone"], "clone_flags", CLONE),
    (&["unshare"], "unshare_flags", CLONE),
    (&["newfstatat", "fchownat"], "flag", PATH),
    (
        &["statx", "linkat", "execveat", "faccessat2"],
        "flags",
        PATH,
    ),
    (&["unlinkat"], "flag", UNLINK),
];

const fn set(name: &'static str, bits: u64) -> Row {
    (name, bits, bits)
}

/// Returns the shape of the argument `name` of the system call `call`, if it consists of flags.
pub(super) fn of(call: &str, name: &str) -> Option<ShapeKind> {
    let meant = |(calls, of, _): &&(&[&str], &str, _)| *of == name && calls.contains(&call);
    let (_, _, rows) = ARGUMENTS.iter().find(meant)?;
    let values = rows.iter().map(|(name, mask, value)| Enumerator {
        name: (*name).to_owned(),
        value: value.cast_signed(),
        mask: Some(*mask),
    });
    Some(ShapeKind::Enum {
        signed: false,
        values: values.collect(),
    })
}
