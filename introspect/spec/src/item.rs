//! Items that are read from the guest at a hit.
//!
//! Invariant: the maximum number of bytes of an item, and of steps to read it, is known before any hit.

pub use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read, TextHeader};
use hvprobe_arch::regs::Gpr;

/// Item that is read at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// `len` bytes at `base + offset`.
    Memory {
        /// Register with the address.
        base: Gpr,
        /// Offset that is added to the address.
        offset: i64,
        /// Number of bytes.
        len: u16,
    },
    /// The 64-bit word this many words above the stack pointer (`$stackN`).
    Stack(u16),
    /// Value of a fetch argument. Boxed, because most items are of the other kinds.
    Fetched(Box<Fetched>),
    /// Kernel stack: up to this number of addresses, the innermost first. The data begin with a [`TextHeader`]
    /// that says how many bytes follow, and whether the stack has more addresses. All addresses are in the
    /// highest 2 GiB of the address space, so only the lower four bytes of each are stored.
    StackTrace(u8),
}

/// Bytes that one address of a stack trace takes.
pub const FRAME: usize = 4;

impl Item {
    /// Returns the maximum number of bytes.
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

    /// Returns whether the item never has any bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the maximum length of the text, if the item is a text.
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

    /// Returns whether the item's data begin with a [`TextHeader`].
    #[must_use]
    pub fn has_header(&self) -> bool {
        self.text().is_some() || self.is_stack_trace()
    }

    /// Returns whether the item is the kernel's stack.
    #[must_use]
    pub fn is_stack_trace(&self) -> bool {
        matches!(self, Self::StackTrace(_))
    }

    /// Returns the same item as a [`Fetched`], or `None` for an item on the stack, which cannot be expressed that
    /// way.
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

    /// Returns whether the item reads memory other than the stack.
    #[must_use]
    pub fn reaches_memory(&self) -> bool {
        !matches!(self, Self::Stack(_) | Self::StackTrace(_))
    }

    /// Returns whether the item may read the process's memory.
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
