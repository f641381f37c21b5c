//! An entry of the unwind tables: how to get from a function to its caller.
//!
//! Invariant: an entry of the kernel is decoded once, when the image is read; that of a module, when it is used.
//! Unknown values become a rule that cannot be followed, never a guess.
//!
//! An entry is {s16 sp_offset, s16 bp_offset, u16} (`struct orc_entry` in arch/x86/include/asm/orc_types.h). In the
//! last word, the lowest four bits are the register from which the caller's stack pointer is computed, and the next
//! four are the register for the caller's RBP. The bits above them, and the numbers of the registers, have changed:
//!
//! | kernels     | type                                            | bits above the type    |
//! |-------------|-------------------------------------------------|------------------------|
//! | 4.14 to 6.2 | 2 bits: call 0, registers 1, IRET frame 2        | end of the stack       |
//! | 6.3         | the same                                        | signal, end            |
//! | 6.4 on      | 3 bits: unknown 0, end 1, call 2, registers 3, IRET frame 4 | signal     |
//! | 7.2         | as 6.4                                          | signal; other registers |
//!
//! From 6.4 on, a hash in `.orc_header` distinguishes kernels and modules whose formats differ. It does not say
//! what the bits mean. The entries at the starts of functions do: see [`Format::of`].

/// How to get from a function to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    /// The caller cannot be determined.
    Unknown,
    /// The function has no caller: the stack ends here.
    End,
    /// The function has a caller.
    Caller(Caller),
}

/// How to compute the caller's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Caller {
    /// Base of the address of [`Caller::frame`].
    pub(super) base: Base,
    /// Offset added to the base.
    pub(super) offset: i16,
    /// Contents of the stack at base plus offset.
    pub(super) frame: Frame,
    /// Location of the caller's RBP.
    pub(super) rbp: Rbp,
    /// Whether the caller was interrupted. Then it did not call, and its address is that of its next instruction,
    /// which may be the first one of another function.
    pub(super) interrupted: bool,
}

/// An address computed from a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Base {
    Register(Register),
    /// The word in memory at address RBP + offset.
    AtRbp,
    /// The word in memory at address RSP; the offset is added to this word. Since 5.12: no earlier kernel has such
    /// entries.
    AtRsp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Register {
    Rsp,
    Rbp,
    Rdx,
    Rdi,
    R10,
    R13,
}

/// Contents of the stack at [`Caller::base`] plus [`Caller::offset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Frame {
    /// The end of a call frame: the return address is just below this address.
    Call,
    /// `struct pt_regs`.
    Registers,
    /// The last five words of `struct pt_regs`, as an exception pushes them.
    Iret,
}

/// Location of the caller's RBP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rbp {
    /// Still in RBP, or with the other registers if the frame has registers.
    Kept,
    /// On the stack, at this offset from the address of [`Caller::frame`], which for a call is the caller's RSP.
    Above(i16),
    /// On the stack, at the function's RBP plus this offset.
    Beside(i16),
}

/// Format of the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// 4.14 to 6.2.
    V414,
    /// 6.3.
    V63,
    /// 6.4 on.
    V64,
    /// As in 7.2.
    V72,
}

impl Format {
    /// Determines the format from the entries at the starts of functions. Right after a `call`, the return address
    /// is on top of the stack and RBP is the caller's, so most of these entries are equal. `begin` returns the
    /// number of functions whose first entry describes this state and has the given last word. `all` is the number
    /// of functions. `signals` says whether the bit above a type of two bits is set for a frame of registers.
    pub(super) fn of(begin: impl Fn(u16) -> usize, all: usize, signals: bool) -> Option<Self> {
        let two_bits = if signals { Self::V63 } else { Self::V414 };
        let formats = [two_bits, Self::V64, Self::V72];
        formats
            .into_iter()
            .find(|format| begin(format.entry()) > all / 2)
    }

    /// Returns the last word of the entry for a function's first instruction.
    fn entry(self) -> u16 {
        match self {
            Self::V414 | Self::V63 => 0x005,
            Self::V64 => 0x205,
            Self::V72 => 0x203,
        }
    }

    /// Decodes an entry.
    pub(super) fn rule(self, entry: [u8; 6]) -> Rule {
        let [a, b, c, d, e, f] = entry;
        let (offset, rbp_offset) = (i16::from_le_bytes([a, b]), i16::from_le_bytes([c, d]));
        let word = u16::from_le_bytes([e, f]);
        let (base, saved) = (word & 0xf, word >> 4 & 0xf);
        let (kind, above) = match self {
            Self::V414 | Self::V63 => (word >> 8 & 3, word >> 10),
            Self::V64 | Self::V72 => (word >> 8 & 7, word >> 11),
        };
        let (frame, interrupted) = match (self, kind) {
            (Self::V414, _) if above & 1 == 1 => return Rule::End,
            (Self::V63, _) if above & 2 == 2 => return Rule::End,
            (Self::V64 | Self::V72, 1) => return Rule::End,
            (Self::V414, 0) => (Frame::Call, false),
            (Self::V414, 1) => (Frame::Registers, true),
            (Self::V414, 2) => (Frame::Iret, true),
            (Self::V63, 0) | (Self::V64 | Self::V72, 2) => (Frame::Call, above & 1 == 1),
            (Self::V63, 1) | (Self::V64 | Self::V72, 3) => (Frame::Registers, above & 1 == 1),
            (Self::V63, 2) | (Self::V64 | Self::V72, 4) => (Frame::Iret, above & 1 == 1),
            _ => return Rule::Unknown,
        };
        match (self.base(base), self.rbp(saved, rbp_offset)) {
            (Some(base), Some(rbp)) => Rule::Caller(Caller {
                base,
                offset,
                frame,
                rbp,
                interrupted,
            }),
            _ => Rule::Unknown,
        }
    }

    fn base(self, number: u16) -> Option<Base> {
        let register = |register| Some(Base::Register(register));
        match (self, number) {
            (_, 2) => register(Register::Rdx),
            (_, 4) => register(Register::Rbp),
            (_, 6) => register(Register::R10),
            (_, 7) => register(Register::R13),
            (_, 9) => Some(Base::AtRsp),
            (Self::V72, 3) => register(Register::Rsp),
            (Self::V72, 10) => Some(Base::AtRbp),
            (Self::V414 | Self::V63 | Self::V64, 3) => register(Register::Rdi),
            (Self::V414 | Self::V63 | Self::V64, 5) => register(Register::Rsp),
            (Self::V414 | Self::V63 | Self::V64, 8) => Some(Base::AtRbp),
            _ => None,
        }
    }

    fn rbp(self, number: u16, offset: i16) -> Option<Rbp> {
        match (self, number) {
            (_, 0) => Some(Rbp::Kept),
            (_, 4) => Some(Rbp::Beside(offset)),
            (Self::V72, 8) | (Self::V414 | Self::V63 | Self::V64, 1) => Some(Rbp::Above(offset)),
            _ => None,
        }
    }
}
