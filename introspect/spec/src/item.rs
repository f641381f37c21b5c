//! What is read of the guest at a hit.
//!
//! Invariant: how many bytes an item makes at most is known before there is a hit, and an item takes no
//! more steps than it has pointers.

pub use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read, TextHeader};
use hvprobe_arch::regs::Gpr;

/// Something read at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// `len` bytes at `base + offset`.
    Memory {
        /// The register that holds the address.
        base: Gpr,
        /// Added to it.
        offset: i64,
        /// How many bytes.
        len: u16,
    },
    /// The 64-bit word this many words above the stack pointer (`$stackN`).
    Stack(u16),
    /// What a fetch argument reads. Boxed, as most items are one of the others.
    Fetched(Box<Fetched>),
    /// The kernel's stack: at most so many addresses, the innermost first. They follow a [`TextHeader`]
    /// with the number of their bytes, and whether the stack goes on behind them. All are in the highest
    /// 2 GiB of the addresses; of each there are the lower four bytes.
    StackTrace(u8),
}

/// Bytes of an address in a stack.
pub const FRAME: usize = 4;

impl Item {
    /// How many bytes it makes at most.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Memory { len, .. } => usize::from(*len),
            Self::Stack(_) => 8,
            Self::Fetched(fetched) => match fetched.read {
                Read::Bytes(len) => usize::from(len),
                Read::Text(most) => TextHeader::SIZE + usize::from(most),
            },
            Self::StackTrace(frames) => match frames {
                0 => 0,
                frames => TextHeader::SIZE + FRAME * usize::from(*frames),
            },
        }
    }

    /// Whether it makes none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How long it may be, if it is a text.
    #[must_use]
    pub fn text(&self) -> Option<u16> {
        match self {
            Self::Fetched(fetched) => match fetched.read {
                Read::Text(most) => Some(most),
                Read::Bytes(_) => None,
            },
            Self::Memory { .. } | Self::Stack(_) | Self::StackTrace(_) => None,
        }
    }

    /// Whether a [`TextHeader`] says how long it is.
    #[must_use]
    pub fn has_header(&self) -> bool {
        self.text().is_some() || self.is_stack_trace()
    }

    /// Whether it is the kernel's stack.
    #[must_use]
    pub fn is_stack_trace(&self) -> bool {
        matches!(self, Self::StackTrace(_))
    }

    /// What is fetched for it, if that can be said so: not of what is on the stack.
    #[must_use]
    pub fn fetched(&self) -> Option<Fetched> {
        match self {
            Self::Stack(_) | Self::StackTrace(_) => None,
            Self::Memory { base, offset, len } => Some(Fetched {
                base: Base::Register(*base),
                pointers: vec![Pointer {
                    offset: *offset,
                    memory: Memory::Either,
                }],
                read: Read::Bytes(*len),
            }),
            Self::Fetched(fetched) => Some((**fetched).clone()),
        }
    }

    /// Whether memory is read for it, other than the stack.
    #[must_use]
    pub fn reaches_memory(&self) -> bool {
        !matches!(self, Self::Stack(_) | Self::StackTrace(_))
    }

    /// Whether what is read for it may be the process's memory.
    #[must_use]
    pub fn reaches_process(&self) -> bool {
        match self {
            Self::Memory { .. } => true,
            Self::Fetched(fetched) => {
                let mut pointers = fetched.pointers.iter();
                pointers.any(|pointer| pointer.memory != Memory::Kernel)
            }
            Self::Stack(_) | Self::StackTrace(_) => false,
        }
    }
}
