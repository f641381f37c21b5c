//! The general registers of a vCPU.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bits of RFLAGS (SDM vol. 1, 3.4.3).
pub mod rflags {
    /// Carry.
    pub const CF: u64 = 1 << 0;
    /// Always one.
    pub const FIXED: u64 = 1 << 1;
    /// Parity of the low byte.
    pub const PF: u64 = 1 << 2;
    /// Auxiliary carry.
    pub const AF: u64 = 1 << 4;
    /// Zero.
    pub const ZF: u64 = 1 << 6;
    /// Sign.
    pub const SF: u64 = 1 << 7;
    /// Trap: a debug exception after the next instruction.
    pub const TF: u64 = 1 << 8;
    /// Interrupts enabled.
    pub const IF: u64 = 1 << 9;
    /// Direction of string instructions.
    pub const DF: u64 = 1 << 10;
    /// Overflow.
    pub const OF: u64 = 1 << 11;
    /// Privilege level that port access takes: two bits.
    pub const IOPL: u64 = 3 << 12;
    /// Nested task.
    pub const NT: u64 = 1 << 14;
    /// Resume: the next instruction raises no instruction breakpoint.
    pub const RF: u64 = 1 << 16;
    /// Virtual-8086 mode.
    pub const VM: u64 = 1 << 17;
    /// Alignment check; with SMAP, user memory may be touched.
    pub const AC: u64 = 1 << 18;
    /// Can be changed where `cpuid` exists.
    pub const ID: u64 = 1 << 21;
    /// The flags that arithmetic instructions set.
    pub const ARITHMETIC: u64 = CF | PF | AF | ZF | SF | OF;
}

/// The sixteen general registers, RIP and RFLAGS, in the order of `struct kvm_regs` (KVM API, `KVM_GET_REGS`),
/// so that the registers of a vCPU can be read in place, without a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
#[allow(missing_docs, reason = "each field is the register it is named after")]
pub struct Regs {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rsp: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
}

impl Regs {
    /// Number of registers.
    pub const COUNT: usize = 18;

    /// Returns all registers, in the order of the fields.
    #[must_use]
    pub fn words(&self) -> &[u64; Self::COUNT] {
        zerocopy::transmute_ref!(self)
    }

    /// Builds the registers from their [`Regs::words`].
    #[must_use]
    pub fn from_words(words: [u64; Self::COUNT]) -> Self {
        zerocopy::transmute!(words)
    }
}

/// A general 64-bit register, by the number instructions encode it with (SDM vol. 2, table 3-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(
    missing_docs,
    reason = "each variant is the register it is named after"
)]
pub enum Gpr {
    Rax,
    Rcx,
    Rdx,
    Rbx,
    Rsp,
    Rbp,
    Rsi,
    Rdi,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
}

impl Gpr {
    /// All registers, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::Rax,
        Self::Rcx,
        Self::Rdx,
        Self::Rbx,
        Self::Rsp,
        Self::Rbp,
        Self::Rsi,
        Self::Rdi,
        Self::R8,
        Self::R9,
        Self::R10,
        Self::R11,
        Self::R12,
        Self::R13,
        Self::R14,
        Self::R15,
    ];
}

/// A set of general registers. RIP and RFLAGS are not part of it: they are always shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterSet(u16);

impl Default for RegisterSet {
    /// Returns the set of all sixteen registers.
    fn default() -> Self {
        Self(u16::MAX)
    }
}

impl FromIterator<Gpr> for RegisterSet {
    fn from_iter<I: IntoIterator<Item = Gpr>>(registers: I) -> Self {
        Self(
            registers
                .into_iter()
                .fold(0, |set, register| set | 1 << (register as u8)),
        )
    }
}

impl RegisterSet {
    /// Returns whether `register` is in the set.
    #[must_use]
    pub fn contains(self, register: Gpr) -> bool {
        self.0 >> (register as u8) & 1 == 1
    }

    /// Iterates over the registers of the set, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Gpr> {
        Gpr::ALL
            .into_iter()
            .filter(move |register| self.contains(*register))
    }
}

impl Regs {
    /// Returns the value of `which`.
    #[must_use]
    pub fn get(&self, which: Gpr) -> u64 {
        let mut copy = *self;
        *copy.slot(which)
    }

    /// Sets `which` to `value`.
    pub fn set(&mut self, which: Gpr, value: u64) {
        *self.slot(which) = value;
    }

    fn slot(&mut self, which: Gpr) -> &mut u64 {
        match which {
            Gpr::Rax => &mut self.rax,
            Gpr::Rcx => &mut self.rcx,
            Gpr::Rdx => &mut self.rdx,
            Gpr::Rbx => &mut self.rbx,
            Gpr::Rsp => &mut self.rsp,
            Gpr::Rbp => &mut self.rbp,
            Gpr::Rsi => &mut self.rsi,
            Gpr::Rdi => &mut self.rdi,
            Gpr::R8 => &mut self.r8,
            Gpr::R9 => &mut self.r9,
            Gpr::R10 => &mut self.r10,
            Gpr::R11 => &mut self.r11,
            Gpr::R12 => &mut self.r12,
            Gpr::R13 => &mut self.r13,
            Gpr::R14 => &mut self.r14,
            Gpr::R15 => &mut self.r15,
        }
    }
}
