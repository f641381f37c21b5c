//! What the guests' kernel calls the functions that tests probe, and how they begin: tests are written
//! for Linux 6.1 and run on others, too (`cargo lab test --kernel`).

use std::sync::OnceLock;

use hvprobe_introspect::image::KernelImage;
use hvprobe_vmm::loader::Kernel;

use crate::rig;

/// Functions that have another name in other kernels.
const RENAMED: [(&str, &str); 4] = [
    // Since 6.10.
    ("scheduler_tick", "sched_tick"),
    ("kmem_cache_alloc", "kmem_cache_alloc_noprof"),
    ("__alloc_pages", "__alloc_pages_noprof"),
    // Since 6.14, of which a FIFO's calls that of other pipes.
    ("pipe_read", "anon_pipe_read"),
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

/// The name that the guests' kernel has for what Linux 6.1 calls `function`.
///
/// # Panics
/// When the guests' kernel cannot be read.
#[must_use]
pub fn own(function: &'static str) -> &'static str {
    let is_there = |name: &str| image().symbols().lookup(name).is_ok();
    match RENAMED.iter().find(|(old, _)| *old == function) {
        Some((_, new)) if !is_there(function) => new,
        _ => function,
    }
}

/// How many bytes into `function` its own instructions begin, behind an ENDBR64 and the nop that is
/// ftrace's.
///
/// # Panics
/// When the guests' kernel cannot be read, or has no such function.
#[must_use]
pub fn behind_entry(function: &str) -> u64 {
    const ENDBR64: u64 = 4;
    const NOP: u64 = 5;
    let at = match image().symbols().lookup(function) {
        Ok(symbol) => symbol.addr,
        Err(error) => panic!("{error}"),
    };
    let is_ftrace_site = |offset: &u64| image().is_ftrace_site(at.wrapping_add(*offset));
    match [0, ENDBR64].into_iter().find(is_ftrace_site) {
        Some(offset) => offset + NOP,
        None => panic!("{function} has no entry nop"),
    }
}
