//! What is measured: calls, functions, and the rows of the tables.

use crate::ours::{EMULATED, Fetch, Mechanism, OPTIMIZED};

/// The system call of the loops.
pub(crate) const CALL: &str = "getpgid";
/// Function that each such call enters once, and that nothing else calls.
pub(crate) const FUNCTION: &str = "__x64_sys_getpgid";
/// Instruction in a function that [`FUNCTION`] calls. The guest's ftrace does not patch this place.
const PAST_FTRACE: &str = "do_getpgid+5";
/// Fetch argument for the parameter of [`FUNCTION`]: the pointer to the registers of the system call.
pub(crate) const ITS_ARGUMENT: &str = "regs=%di";
/// Probes that record the default: the argument of the system call, which is four bytes of memory. Each has its
/// name, the kind of hit for which the engine's instructions are counted, and its mechanism.
pub(crate) const USUAL: [(&str, Option<&str>, Mechanism); 2] = [
    (
        "kprobe, emulated, the call's argument",
        Some("emulated-read"),
        EMULATED,
    ),
    ("kprobe, optimized, the call's argument", None, OPTIMIZED),
];
/// Call of the program whose slowdown is measured.
pub(crate) const BUSY_CALL: &str = "copy";
/// Function that is probed while that program runs.
pub(crate) const BUSY_FUNCTION: &str = "vfs_read";

/// Row of a bare exit, which is the minimum cost of a hit with an exit.
pub(crate) const EXIT: &str = "a bare exit (out)";
pub(crate) const UNPROBED: &str = "the call itself, unprobed";
/// Rows of the guest's own probes. [`OWN`] lists the kind and the place of each, as arguments for the workload.
pub(crate) const OWN_FTRACE: &str = "guest's kprobe, by ftrace";
pub(crate) const OWN_INT3: &str = "guest's kprobe, by int3";
pub(crate) const OWN_RETURN: &str = "guest's kretprobe, by ftrace";
pub(crate) const OWN_BOTH: &str = "guest's kprobe + kretprobe, by ftrace";
pub(crate) const OWN_STACK: &str = "guest's kprobe, with the stack";
pub(crate) const OWN: [(&str, &str, &str); 5] = [
    (OWN_FTRACE, "p", FUNCTION),
    (OWN_INT3, "p", PAST_FTRACE),
    (OWN_RETURN, "r", FUNCTION),
    (OWN_BOTH, "pr", FUNCTION),
    (OWN_STACK, "s", FUNCTION),
];
/// Instructions at which a stock kernel optimizes its own kprobe: the one after the nop at the function's entry, or
/// after ENDBR64 and nop in a kernel with ENDBR64. At [`PAST_FTRACE`] the kernel does not optimize, because a call
/// is among the five bytes.
pub(crate) const OPTIMIZABLE: [&str; 2] = ["__x64_sys_read+5", "__x64_sys_read+9"];
pub(crate) const OWN_OPTIMIZED: &str = "guest's kprobe, optimized (read)";
pub(crate) const SAME_PLACE: &str = "kprobe, optimized (read)";
/// Call of the loops for [`FETCHES`].
pub(crate) const READER: &str = "text";
/// Arguments and filters that need no exit: four bytes behind two pointers, a text of 64 characters, and a hit that
/// is filtered out. Each is compared to the guest's own event with the same definition.
pub(crate) const FETCHES: [Fetch; 3] = [
    Fetch {
        name: "kprobe, optimized, +0(+0(%sp)):u32",
        own: "guest's kprobe, +0(+0(%sp)):u32",
        words: "a=+0(+0(%sp)):u32",
    },
    Fetch {
        name: "kprobe, optimized, 64 characters",
        own: "guest's kprobe, 64 characters",
        words: "a=+0(+112(%di)):ustring",
    },
    Fetch {
        name: "kprobe, optimized, filtered out",
        own: "guest's kprobe, filtered out",
        words: "a=%di if a == 1",
    },
];
/// A system call whose function calls are deeply nested.
pub(crate) const DEEP_CALL: &str = "epoll_wait";
/// A function deep in that call: sixteen frames down in 6.1.
pub(crate) const DEEP_FUNCTION: &str = "datagram_poll";
pub(crate) const DEEP_ARGUMENT: &str = "file=%di";
pub(crate) const OWN_DEEP: &str = "guest's kprobe, with a deep stack";
pub(crate) const DEEP: &str = "kprobe, optimized, with a deep stack";
/// Number of calls whose records with stacks fit into the ring. With one processor nothing reads the ring during
/// the loop, and records that do not fit are lost. A lost record costs next to nothing, which would falsify the
/// result.
pub(crate) const DEEP_CALLS: u32 = 1000;
pub(crate) const GDB: &str = "gdb's breakpoint in QEMU";
