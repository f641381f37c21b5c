//! What the guests' kernel calls the functions that tests probe, and how they begin: tests are written
//! for Linux 6.1 and run on others, too (`cargo lab test --kernel`).

use std::sync::OnceLock;

use hvprobe_arch::Gva;
use hvprobe_linux::image::KernelImage;
use hvprobe_vm::loader::Kernel;

use crate::rig;

/// Functions that have other names in other kernels; what comes first is taken where there are several.
const RENAMED: [(&str, &[&str]); 8] = [
    // Since 6.10.
    ("scheduler_tick", &["sched_tick"]),
    ("kmem_cache_alloc", &["kmem_cache_alloc_noprof"]),
    // Until 5.12; since 6.14, where the second is no more than a caller of it; since 6.10.
    (
        "__alloc_pages",
        &[
            "__alloc_pages_nodemask",
            "__alloc_frozen_pages_noprof",
            "__alloc_pages_noprof",
        ],
    ),
    // Since 6.14, of which a FIFO's calls that of other pipes.
    ("pipe_read", &["anon_pipe_read"]),
    ("pipe_write", &["anon_pipe_write"]),
    // Since 6.8; before, that was another.
    ("tick_sched_timer", &["tick_nohz_handler"]),
    // Since 7.0 or so.
    ("pick_next_task_fair", &["pick_task_fair"]),
    // As the compiler made it.
    ("finish_task_switch.isra.0", &["finish_task_switch"]),
];

/// The image of the guests' kernel.
fn image() -> &'static KernelImage {
    static IMAGE: OnceLock<KernelImage> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let path = rig::guest(1, &[]).kernel;
        let kernel = match Kernel::open(&path) {
            Ok(kernel) => kernel,
            Err(error) => panic!("{}: {}", path.display(), rig::chain(&error)),
        };
        match KernelImage::parse(kernel.elf()) {
            Ok(image) => image,
            Err(error) => panic!("{}: {}", path.display(), rig::chain(&error)),
        }
    })
}

/// Whether the guests' kernel names no data (`CONFIG_KALLSYMS_ALL`).
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn has_symbols_of_functions_only() -> bool {
    !is_there("init_task")
}

/// Whether the guests' kernel keeps the types of its modules: since 5.11, and if it was built so.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn keeps_types_of_modules() -> bool {
    is_there("btf_modules")
}

/// The name that the guests' kernel has for what Linux 6.1 calls `function`.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn own(function: &'static str) -> &'static str {
    chosen(function, is_there)
}

/// Those of `functions`, which are names of Linux 6.1, that are functions in the guests' kernel as well.
/// Others, which its compiler made part of their callers, are told.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn known(functions: &[&'static str]) -> Vec<&'static str> {
    let (known, others): (Vec<_>, Vec<_>) = functions
        .iter()
        .partition(|function| is_there(own(function)));
    if !others.is_empty() {
        eprintln!("not in this kernel: {}", others.join(", "));
    }
    known
}

fn is_there(name: &str) -> bool {
    image().symbols().lookup(name).is_ok()
}

fn chosen(function: &'static str, is_there: impl Fn(&str) -> bool) -> &'static str {
    let others = RENAMED.iter().find(|(old, _)| *old == function);
    let names = others.map_or(&[][..], |(_, names)| names);
    let mut all = std::iter::once(&function).chain(names);
    all.find(|name| is_there(name)).unwrap_or(&function)
}

/// How many bytes into `function` its own instructions begin, behind an ENDBR64 and the nop that is
/// ftrace's.
///
/// # Panics
/// When the guests' kernel cannot be read, or has no such function.
#[must_use]
pub fn behind_entry(function: &str) -> u64 {
    const NOP: u64 = 5;
    entry(function) + NOP
}

/// How many bytes into `function` a probe at its entry is: behind an ENDBR64, where there is one.
///
/// # Panics
/// When the guests' kernel cannot be read, or has no such function.
#[must_use]
pub fn entry(function: &str) -> u64 {
    const ENDBR64: u64 = 4;
    let at = address(function);
    let is_ftrace_site = |offset: &u64| image().is_ftrace_site(at.wrapping_add(*offset));
    match [0, ENDBR64].into_iter().find(is_ftrace_site) {
        Some(offset) => offset,
        None => panic!("{function} has no entry nop"),
    }
}

/// How many bytes behind the beginning of the kernel's text, `_stext`, `function` begins.
///
/// # Panics
/// When the guests' kernel cannot be read, or has no such function.
#[must_use]
pub fn behind_stext(function: &str) -> u64 {
    address(function).0.wrapping_sub(address("_stext").0)
}

fn address(symbol: &str) -> Gva {
    match image().symbols().lookup(symbol) {
        Ok(symbol) => symbol.addr,
        Err(error) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_that_of_linux_6_1_if_it_is_there_or_the_first_other() {
        let has = |there: &'static [&'static str]| move |name: &str| there.contains(&name);
        const FROZEN: &[&str] = &["__alloc_pages_noprof", "__alloc_frozen_pages_noprof"];
        for (function, there, expected) in [
            (
                "pipe_read",
                &["pipe_read", "anon_pipe_read"][..],
                "pipe_read",
            ),
            ("pipe_read", &["anon_pipe_read"], "anon_pipe_read"),
            ("__alloc_pages", FROZEN, FROZEN[1]),
            ("vfs_read", &[], "vfs_read"),
        ] {
            assert_eq!(chosen(function, has(there)), expected);
        }
    }
}
