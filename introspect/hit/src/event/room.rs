//! How much room there is for what hits leave.

/// How much room there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Room {
    /// Less than one hit may need.
    None,
    /// Enough for a hit.
    Scant,
    /// Enough to go on for a while: half of all there is.
    Plenty,
}

impl Room {
    /// That of `free` places among `all`, of which a hit takes `most`.
    #[must_use]
    pub fn of(free: u64, all: u64, most: u64) -> Self {
        match free {
            free if free < most => Self::None,
            free if free < all / 2 => Self::Scant,
            _ => Self::Plenty,
        }
    }
}
