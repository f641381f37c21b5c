//! Addresses at which devices answer: ports and physical memory.

use std::fmt;

/// Address space in which a guest reaches devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Space {
    /// I/O ports, which `in` and `out` access.
    Port,
    /// Guest physical addresses without RAM, which instructions access like memory.
    Memory,
}

impl Space {
    /// Returns the last address of the space.
    const fn last(self) -> u64 {
        match self {
            Self::Port => 0xffff,
            Self::Memory => u64::MAX,
        }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "port",
            Self::Memory => "address",
        })
    }
}

/// Consecutive addresses of one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    pub(crate) space: Space,
    pub(crate) first: u64,
    /// Number of addresses.
    pub(crate) size: u64,
}

impl AddressRange {
    /// Returns the `size` ports from `first` on.
    pub(crate) const fn ports(first: u16, size: u64) -> Self {
        Self {
            space: Space::Port,
            first: first as u64,
            size,
        }
    }

    /// Returns the last address; `None` if the range is empty or leaves its space.
    pub(crate) fn last(self) -> Option<u64> {
        let last = self.first.checked_add(self.size.checked_sub(1)?)?;
        (last <= self.space.last()).then_some(last)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, first, size } = self;
        write!(f, "{size:#x} from {space} {first:#x} on")
    }
}
