//! The registers that a run starts with, and the properties of the bench that a start state depends on.

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Regs;

/// Extended state (x87, SSE, AVX, ...), in the uncompacted layout of `xsave`.
pub(super) type Extended = Box<[u32; 1024]>;

/// Registers at the start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// General registers, RIP and RFLAGS.
    pub regs: Regs,
    /// The base of FS.
    pub fs_base: u64,
    /// The base of GS.
    pub gs_base: u64,
    /// Whether operands at fixed addresses (RIP-relative or absolute) are mapped.
    pub is_full: bool,
}

/// Properties of the bench that the generator needs.
#[derive(Clone, Debug)]
pub struct Host {
    /// CR0.
    pub cr0: u64,
    /// CR3 of the full address space.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// The extended state of a new virtual CPU.
    pub extended: Extended,
    /// Start and end of the text.
    pub text: (Gva, Gva),
}
