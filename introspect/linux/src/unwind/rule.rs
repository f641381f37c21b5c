//! One entry of the unwind tables: how to come from a function to its caller.
//!
//! What is kept true: an entry is taken apart once, when the image is read, and what it says that is not
//! known is a rule that cannot be followed, not a guess.
//!
//! An entry is {s16 sp_offset, s16 bp_offset, u16} (`struct orc_entry` in
//! arch/x86/include/asm/orc_types.h). Of the last word the lowest four bits are the register that the
//! stack pointer of the caller is told from, the next four that of its RBP. The bits above them, and the
//! numbers of the registers, have changed:
//!
//! | kernels     | type                                            | then                   |
//! |-------------|-------------------------------------------------|------------------------|
//! | 4.14 to 6.2 | 2 bits: call 0, registers 1, IRET frame 2        | end of the stack       |
//! | 6.3         | the same                                        | signal, end            |
//! | 6.4 on      | 3 bits: unknown 0, end 1, call 2, registers 3, IRET frame 4 | signal     |
//! | 7.2         | as 6.4                                          | signal; other registers |
//!
//! From 6.4 on a hash in `.orc_header` tells kernel and modules apart that differ in this, but it does
//! not say what is meant. The beginnings of functions do: see [`Format::of`].

/// How to come from a function to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    /// Nobody knows how.
    Unknown,
    /// Nobody called it.
    End,
    /// There is one.
    Caller(Caller),
}

/// Where the caller's registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Caller {
    /// What [`Caller::frame`] lies at.
    pub(super) base: Base,
    /// Added to it.
    pub(super) offset: i16,
    /// What lies there.
    pub(super) frame: Frame,
    /// Where the caller's RBP is.
    pub(super) rbp: Rbp,
    /// Whether the caller was interrupted: it has not called, so that its address is that of its next
    /// instruction, which may be the first of another function than the one before it.
    pub(super) interrupted: bool,
}

/// A place on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Base {
    Register(Register),
    /// The word at RBP + offset.
    AtRbp,
    /// The word at RSP, + offset (since 5.12; before, no kernel has such entries).
    AtRsp,
}

/// A register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Register {
    Rsp,
    Rbp,
    Rdx,
    Rdi,
    R10,
    R13,
}

/// What lies at a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Frame {
    /// Above the return address.
    Call,
    /// `struct pt_regs`.
    Registers,
    /// Its last five words, as an exception pushes them.
    Iret,
}

/// Where a caller's RBP is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rbp {
    /// Still in the register, or with the others of the frame.
    Kept,
    /// On the stack, at the caller's RSP + this.
    Above(i16),
    /// On the stack, at the function's RBP + this.
    Beside(i16),
}

/// What the bits of an entry mean.
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
    /// Which format the entries are in, as the functions of the kernel tell, of which this is how many of
    /// them begin with which last word: behind a `call` the return address is on top of the stack, and RBP
    /// is the caller's. `signals` is whether the bit above a type of two bits is set for a frame of
    /// registers.
    pub(super) fn of(begin: impl Fn(u16) -> usize, all: usize, signals: bool) -> Option<Self> {
        let two_bits = if signals { Self::V63 } else { Self::V414 };
        let formats = [two_bits, Self::V64, Self::V72];
        formats
            .into_iter()
            .find(|format| begin(format.entry()) > all / 2)
    }

    /// The last word of the entry of a function's first instruction.
    fn entry(self) -> u16 {
        match self {
            Self::V414 | Self::V63 => 0x005,
            Self::V64 => 0x205,
            Self::V72 => 0x203,
        }
    }

    /// What an entry says.
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
