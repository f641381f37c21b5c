//! The operands of emulated instructions: parts of registers, constants and addresses.
//!
//! Every value is held in the low bits of a `u64`, with zeros above its width.

use crate::Gva;
use crate::regs::{Gpr, Regs};

/// Number of bytes that an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Width {
    Byte,
    Word,
    Double,
    Quad,
}

impl Width {
    /// Returns a mask of all bits of the width.
    pub(super) fn mask(self) -> u64 {
        match self {
            Self::Byte => 0xff,
            Self::Word => 0xffff,
            Self::Double => 0xffff_ffff,
            Self::Quad => u64::MAX,
        }
    }

    /// Returns the highest bit of the width.
    pub(super) fn sign(self) -> u64 {
        self.mask() & !(self.mask() >> 1)
    }
}

/// A general register, or the part of it that an instruction names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Register {
    pub(in super::super) gpr: Gpr,
    pub(in super::super) width: Width,
    /// Whether this is the second byte of the register: `ah`, `ch`, `dh` or `bh`. Only with [`Width::Byte`].
    pub(in super::super) is_high: bool,
}

impl Register {
    fn shift(self) -> u32 {
        if self.is_high { 8 } else { 0 }
    }

    pub(super) fn read(self, regs: &Regs) -> u64 {
        regs.get(self.gpr) >> self.shift() & self.width.mask()
    }

    /// Stores the low bits of `value`. A 32-bit result clears the upper half; narrower ones leave the rest of
    /// the register unchanged (SDM vol. 1, 3.4.1.1).
    pub(super) fn write(self, regs: &mut Regs, value: u64) {
        let value = value & self.width.mask();
        let whole = match self.width {
            Width::Byte | Width::Word => {
                let part = self.width.mask() << self.shift();
                regs.get(self.gpr) & !part | value << self.shift()
            }
            Width::Double | Width::Quad => value,
        };
        regs.set(self.gpr, whole);
    }
}

/// What an operation reads: a register or a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Source {
    Register(Register),
    /// A constant, already sign-extended as the instruction says.
    Constant(u64),
}

impl Source {
    pub(super) fn read(self, regs: &Regs) -> u64 {
        match self {
            Self::Register(register) => register.read(regs),
            Self::Constant(value) => value,
        }
    }
}

/// An effective address: `base + index * scale + displacement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Address {
    pub(in super::super) base: Option<Gpr>,
    /// Index register and its scale: 1, 2, 4 or 8.
    pub(in super::super) index: Option<(Gpr, u8)>,
    /// For a RIP-relative operand, the target itself.
    pub(in super::super) displacement: u64,
    /// Whether the address-size prefix cuts the sum to 32 bits.
    pub(in super::super) is_narrow: bool,
}

impl Address {
    /// Returns the address of the operand, modulo the address size (SDM vol. 1, 3.7.5).
    pub(super) fn of(self, regs: &Regs) -> Gva {
        let base = self.base.map_or(0, |base| regs.get(base));
        let index = self.index.map_or(0, |(index, scale)| {
            regs.get(index).wrapping_mul(u64::from(scale))
        });
        let sum = base.wrapping_add(index).wrapping_add(self.displacement);
        Gva(if self.is_narrow {
            sum & Width::Double.mask()
        } else {
            sum
        })
    }
}
