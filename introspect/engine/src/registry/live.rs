//! Facts about the guest's kernel that are known once its text is final.

use hvprobe_arch::detour::StackFields;
use hvprobe_arch::insn::GateHead;
use hvprobe_hit::KernelView;

use crate::guest::banner::Banner;
use crate::guest::readers::KernelReaders;

/// State that exists once the kernel is live.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) view: KernelView,
    /// #BP entry to patch while probes are armed, in the `idt-gate` catch mode.
    pub(crate) gate: Option<GateHead>,
    pub(crate) gate_planted: bool,
    /// Constant text of the kernel, if it was found.
    pub(crate) banner: Option<Banner>,
    /// Functions of the kernel with which detours read memory, or why there are none.
    pub(crate) readers: Result<KernelReaders, &'static str>,
    /// Location of a task's stack, if it is known.
    pub(crate) stack: Option<StackFields>,
}
