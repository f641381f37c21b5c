//! Why an instruction takes no probe.

/// Why no probe can be placed on an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Refusal {
    /// The bytes are no instruction.
    #[error("the bytes there are no instruction")]
    Undecodable,
    /// The code ends inside the instruction.
    #[error("the code ends inside the instruction, after {have} bytes")]
    Truncated {
        /// Number of bytes there are.
        have: usize,
    },
    /// A prefix that processors treat differently, or that has no known use.
    #[error("its prefixes have no meaning that holds on every processor")]
    OddPrefix,
    /// An operand relative to EIP.
    #[error("its operand is relative to a 32-bit instruction pointer, which a copy cannot keep")]
    EipRelative,
    /// `int3`, `int1`.
    #[error("it is a breakpoint of the kernel's own, which must trap at its own address")]
    Breakpoint,
    /// `int n`.
    #[error("a software interrupt pushes its own address")]
    SoftwareInterrupt,
    /// `ud0`, `ud1`, `ud2`.
    #[error("it marks a BUG or WARN, which the kernel looks up by the address of the trap")]
    Bug,
    /// `hlt`.
    #[error("hlt after sti relies on no interrupt in between, and a hit lets one in")]
    Halt,
    /// 16-bit `pushf` and `popf`.
    #[error("the 16-bit forms of pushf and popf are not emulated, and a copy shows other flags")]
    NarrowFlags,
    /// `iret` and the like.
    #[error("a return from interrupt replaces stack, flags and privilege at once")]
    InterruptReturn,
    /// `syscall`, `sysret`, `sysenter`, `sysexit`.
    #[error("a system call or its return stores or replaces its own address and flags")]
    SystemCall,
    /// Far `jmp`, `call` and `ret`.
    #[error("a far transfer changes the code segment")]
    FarTransfer,
    /// `call` and `jmp` through memory based on FS or GS.
    #[error("it goes where memory based on FS or GS says, which the host does not read")]
    SegmentBranch,
    /// Loading SS.
    #[error("loading SS holds off exceptions for one more instruction, which a hit would undo")]
    LoadStackSegment,
    /// `lgdt`, `lidt` and `ltr`, which replace a table through which exceptions are delivered, and `sidt`, which
    /// shows one.
    #[error("it replaces or shows a table that exceptions are delivered through")]
    DescriptorTable,
    /// `swapgs`, `wrgsbase`, `wrfsbase`, `lkgs`.
    #[error("it changes the base of FS or GS, through which per-CPU data is found")]
    SegmentBase,
    /// `xbegin`, `xend`, `xabort`, `xsusldtrk`, `xresldtrk`.
    #[error("a breakpoint aborts the transaction it belongs to, and that each time it is tried")]
    Transaction,
    /// VMX, SVM, TDX, SEV-SNP, SGX and SMX instructions.
    #[error("it enters, calls or manages virtual machines, enclaves or measured code")]
    Virtualization,
    /// `mwait` and the like.
    #[error("a monitored address is forgotten when a hit leaves the guest")]
    MonitorWait,
    /// Changes of the shadow stack.
    #[error("it changes the shadow stack")]
    ShadowStack,
    /// x87 instructions that record their own address.
    #[error("an x87 instruction records its own address in the floating-point state")]
    X87Pointer,
    /// A branch for which there is no rule.
    #[error("it is a branch that is neither emulated nor proven to do the same from elsewhere")]
    Unproven,
}
