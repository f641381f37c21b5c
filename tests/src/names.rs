//! Names and entries of the functions that tests probe, in the guests' kernel: tests are written for Linux 6.1
//! and also run on other kernels (`cargo lab test --kernel`).

use std::sync::OnceLock;

use hvprobe_arch::Gva;
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::chain;
use hvprobe_vmlinux::Kernel;

use crate::rig;

/// Functions of Linux 6.1, with their names in other kernels. The first name that the guests' kernel has is used.
const RENAMED: [(&str, &[&str]); 8] = [
    // Since 6.10.
    ("scheduler_tick", &["sched_tick"]),
    ("kmem_cache_alloc", &["kmem_cache_alloc_noprof"]),
    // The first name until 5.12, the last since 6.10. Since 6.14, the last function is only a caller of the second.
    (
        "__alloc_pages",
        &[
            "__alloc_pages_nodemask",
            "__alloc_frozen_pages_noprof",
            "__alloc_pages_noprof",
        ],
    ),
    // Since 6.14, where FIFOs have functions of their own, which call these.
    ("pipe_read", &["anon_pipe_read"]),
    ("pipe_write", &["anon_pipe_write"]),
    // Since 6.8. Before, the other name belonged to another function.
    ("tick_sched_timer", &["tick_nohz_handler"]),
    // Since 7.0 or so.
    ("pick_next_task_fair", &["pick_task_fair"]),
    // The compiler chooses the suffix.
    ("finish_task_switch.isra.0", &["finish_task_switch"]),
];

/// Returns the image of the guests' kernel.
fn image() -> &'static KernelImage {
    static IMAGE: OnceLock<KernelImage> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let path = rig::guest(1, &[]).kernel;
        let kernel = match Kernel::open(&path) {
            Ok(kernel) => kernel,
            Err(error) => panic!("{}: {}", path.display(), chain(&error)),
        };
        match KernelImage::parse(kernel.elf()) {
            Ok(image) => image,
            Err(error) => panic!("{}: {}", path.display(), chain(&error)),
        }
    })
}

/// Returns whether the guests' kernel has symbols of functions only, because it lacks `CONFIG_KALLSYMS_ALL`.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn has_symbols_of_functions_only() -> bool {
    !is_there("init_task")
}

/// Returns whether the guests' kernel keeps the types of its modules: since 5.11, and only if configured.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn keeps_types_of_modules() -> bool {
    is_there("btf_modules")
}

/// Returns the name that the guests' kernel has for Linux 6.1's `function`.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn own(function: &'static str) -> &'static str {
    chosen(function, is_there)
}

/// Returns those of `functions`, named as in Linux 6.1, that the guests' kernel has as well. Prints the others,
/// which its compiler has inlined into their callers.
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

/// Returns the offset of the first instruction of `function` after ftrace's nop, which may follow an ENDBR64.
///
/// # Panics
/// When the guests' kernel cannot be read, or has no such function.
#[must_use]
pub fn behind_entry(function: &str) -> u64 {
    const NOP: u64 = 5;
    entry(function) + NOP
}

/// Returns the offset of a probe at the entry of `function`: 4 after an ENDBR64, otherwise 0.
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

/// Returns the offset of `function` from the start of the kernel's text, `_stext`.
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
