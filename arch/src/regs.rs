//! The general registers of a vCPU.

use std::iter;

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
    /// I/O privilege level, which port accesses require: two bits.
    pub const IOPL: u64 = 3 << 12;
    /// Nested task.
    pub const NT: u64 = 1 << 14;
    /// Resume: the next instruction raises no instruction breakpoint.
    pub const RF: u64 = 1 << 16;
    /// Virtual-8086 mode.
    pub const VM: u64 = 1 << 17;
    /// Alignment check. With SMAP, lets the kernel access user memory.
    pub const AC: u64 = 1 << 18;
    /// Can be changed if the processor has `cpuid`.
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

    /// Returns registers with these values, in the order of [`Regs::words`].
    #[must_use]
    pub fn from_words(words: [u64; Self::COUNT]) -> Self {
        zerocopy::transmute!(words)
    }
}

/// A general 64-bit register. The variants are in the order of their numbers in encoded instructions (SDM vol. 2,
/// table 3-1).
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

    /// Returns the index of the register in [`Regs::words`]. There, the order of the first eight registers is not
    /// that of their numbers.
    const fn place(self) -> usize {
        const PLACES: [usize; 16] = [0, 2, 3, 1, 6, 7, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
        PLACES[self as usize]
    }
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

    /// Returns the number of registers in the set.
    #[must_use]
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Iterates over the registers of the set, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Gpr> {
        let mut left = self.0;
        iter::from_fn(move || {
            let number = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            Gpr::ALL.get(number as usize).copied()
        })
    }
}

impl Regs {
    /// Returns the value of `which`.
    #[must_use]
    pub fn get(&self, which: Gpr) -> u64 {
        self.words()[which.place()]
    }

    /// Sets `which` to `value`.
    pub fn set(&mut self, which: Gpr, value: u64) {
        let words: &mut [u64; Self::COUNT] = zerocopy::transmute_mut!(self);
        words[which.place()] = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_register_is_the_field_of_its_name() {
        let mut regs = Regs::default();
        for (number, register) in (1..).zip(Gpr::ALL) {
            regs.set(register, number);
            assert_eq!(regs.get(register), number);
        }
        let expected = Regs {
            rax: 1,
            rcx: 2,
            rdx: 3,
            rbx: 4,
            rsp: 5,
            rbp: 6,
            rsi: 7,
            rdi: 8,
            r8: 9,
            r9: 10,
            r10: 11,
            r11: 12,
            r12: 13,
            r13: 14,
            r14: 15,
            r15: 16,
            ..Regs::default()
        };
        assert_eq!(regs, expected);
    }

    #[test]
    fn a_set_has_its_registers_in_the_order_of_their_numbers() {
        let all: Vec<_> = RegisterSet::default().iter().collect();
        assert_eq!(all, Gpr::ALL);
        for (set, expected) in [
            (&[][..], &[][..]),
            (&[Gpr::R15], &[Gpr::R15]),
            (&[Gpr::Rsi, Gpr::Rax, Gpr::Rsi], &[Gpr::Rax, Gpr::Rsi]),
        ] {
            let set = RegisterSet::from_iter(set.iter().copied());
            assert_eq!(set.iter().collect::<Vec<_>>(), expected);
            assert_eq!(set.count(), expected.len());
        }
    }
}
