//! The kernel's own loads, by which detours read memory.
//!
//! What is kept true: they are found in the text that runs, where the kernel has made up its mind about
//! SMAP and speculation, and taken only if they are all that they should be, each load with its entry in
//! the exception table.

use std::ops::Range;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Readers;
use hvprobe_arch::insn::Loader;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::Levels;
use hvprobe_hit::KernelView;
use hvprobe_linux::image::KernelImage;

use crate::guest::per_cpu::per_cpu;

/// What loads 1, 2, 4 and 8 bytes (arch/x86/lib/getuser.S, since Linux 5.10).
const LOADERS: [(&str, usize); 4] = [
    ("__get_user_nocheck_1", 1),
    ("__get_user_nocheck_2", 2),
    ("__get_user_nocheck_4", 4),
    ("__get_user_nocheck_8", 8),
];
/// As many bytes as are read of each.
const CODE: usize = 64;
/// How thunks are called by which functions return (`__x86_return_thunk`, `srso_alias_return_thunk`, …).
const THUNK: &str = "return_thunk";

/// The kernel's loads.
#[derive(Clone, Debug)]
pub(crate) struct KernelReaders {
    pub(crate) readers: Readers,
    /// Where their code is. A probe there would be hit by detours.
    pub(crate) code: [Range<Gva>; 4],
}

impl KernelReaders {
    /// Whether `image` may have what [`Self::find`] looks for when it runs.
    pub(crate) fn may_be_in(image: &KernelImage) -> bool {
        let mut names = LOADERS.iter().map(|(name, _)| name);
        names.all(|name| image.symbols().address_of(name).is_some())
            && image.task_layout().is_ok()
            && disabled(image).is_some()
    }

    /// Those of the kernel that runs.
    ///
    /// # Errors
    /// Why there are none to be used.
    pub(crate) fn find(
        image: &KernelImage,
        view: &KernelView,
        mem: &dyn PhysMemory,
    ) -> Result<Self, &'static str> {
        let Ok(task) = view.task else {
            return Err("the current task cannot be told");
        };
        let (Some(current), Some(disabled)) = (per_cpu(task.current_task), disabled(image)) else {
            return Err("nothing tells where a task says that it takes no page faults");
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

/// Where a task counts by how many it was said to take no page faults.
fn disabled(image: &KernelImage) -> Option<i32> {
    let offset = image.member_offset("task_struct", "pagefault_disabled");
    i32::try_from(offset.ok()?).ok()
}

/// The function `name`, and where it begins.
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
