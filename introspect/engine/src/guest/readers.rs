//! The kernel's own load functions, with which detours read memory.
//!
//! Invariant: the functions are taken from the running text, which the kernel has already patched for SMAP and
//! speculation, and only if every instruction is as expected and each load has its entry in the exception
//! table.

use std::ops::Range;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Readers;
use hvprobe_arch::insn::Loader;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::Levels;
use hvprobe_hit::KernelView;
use hvprobe_linux::image::KernelImage;

use crate::guest::per_cpu::per_cpu;

/// Functions that load 1, 2, 4 and 8 bytes (arch/x86/lib/getuser.S, since Linux 5.10).
const LOADERS: [(&str, usize); 4] = [
    ("__get_user_nocheck_1", 1),
    ("__get_user_nocheck_2", 2),
    ("__get_user_nocheck_4", 4),
    ("__get_user_nocheck_8", 8),
];
/// Number of bytes to read of each function.
const CODE: usize = 64;
/// Suffix of the names of the thunks with which functions return (`__x86_return_thunk`,
/// `srso_alias_return_thunk`, …).
const THUNK: &str = "return_thunk";

/// The kernel's load functions.
#[derive(Clone, Debug)]
pub(crate) struct KernelReaders {
    pub(crate) readers: Readers,
    /// Address ranges of the functions. A probe there would be hit by the detours themselves.
    pub(crate) code: [Range<Gva>; 4],
}

impl KernelReaders {
    /// Returns whether [`Self::find`] may succeed in a running guest with `image`.
    pub(crate) fn may_be_in(image: &KernelImage) -> bool {
        let mut names = LOADERS.iter().map(|(name, _)| name);
        names.all(|name| image.symbols().address_of(name).is_some())
            && image.task_layout().is_ok()
            && disabled(image).is_some()
    }

    /// Finds the load functions of the running kernel.
    ///
    /// # Errors
    /// Why they cannot be used.
    pub(crate) fn find(
        image: &KernelImage,
        view: &KernelView,
        mem: &dyn PhysMemory,
    ) -> Result<Self, &'static str> {
        let Ok(task) = view.task else {
            return Err("the current task cannot be identified");
        };
        let (Some(current), Some(disabled)) = (per_cpu(task.current_task), disabled(image)) else {
            return Err("it is not known where a task says that it takes no page faults");
        };
        let found = LOADERS.map(|(name, size)| loader(image, view, mem, name, size));
        let [Some(one), Some(two), Some(four), Some(eight)] = found else {
            return Err("the kernel has no loads of its own that a fault does not hurt");
        };
        let found = [one, two, four, eight];
        let loaders = found.map(|(_, loader)| loader);
        let (kernel_half, process_end) = match view.tables.levels {
            Levels::Four => (0xffff_8000_0000_0000, (1 << 47) - 4096),
            Levels::Five => (0xff00_0000_0000_0000, (1 << 56) - 4096),
        };
        Ok(Self {
            readers: Readers {
                kernel: loaders.map(|it| it.load),
                process: loaders.map(|it| it.entry),
                kernel_half: Gva(kernel_half),
                process_end: Gva(process_end),
                current,
                disabled,
            },
            code: found.map(|(at, it)| at..at.wrapping_add(it.len as u64)),
        })
    }
}

/// Returns the offset, in a task, of the counter that is nonzero while the task takes no page faults.
fn disabled(image: &KernelImage) -> Option<i32> {
    let offset = image.member_offset("task_struct", "pagefault_disabled");
    i32::try_from(offset.ok()?).ok()
}

/// Finds the kernel's function `name`, which loads `size` bytes. Returns its address and its analysed code; `None`
/// if the code is not as expected.
fn loader(
    image: &KernelImage,
    view: &KernelView,
    mem: &dyn PhysMemory,
    name: &str,
    size: usize,
) -> Option<(Gva, Loader)> {
    let at = image.symbols().address_of(name)?;
    let mut code = [0; CODE];
    view.tables.read(mem, at, &mut code).ok()?;
    let loader = Loader::analyse(&code, at, size)?;
    let is_thunk = |at: Gva| {
        let named = image.symbols().containing(at);
        named.is_some_and(|(symbol, offset)| offset == 0 && symbol.name.ends_with(THUNK))
    };
    (image.has_fixup(loader.load) && loader.thunk.is_none_or(is_thunk)).then_some((at, loader))
}
