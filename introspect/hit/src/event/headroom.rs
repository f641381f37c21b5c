//! Room for the events of hits.

/// Amount of free room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Headroom {
    /// Less than one hit may need.
    None,
    /// Enough for a hit.
    Scant,
    /// Enough for a while: at least half of all the room.
    Plenty,
}

impl Headroom {
    /// Classifies `free` free places out of `all` places. A hit takes at most `most` places.
    #[must_use]
    pub fn of(free: u64, all: u64, most: u64) -> Self {
        match free {
            free if free < most => Self::None,
            free if free < all / 2 => Self::Scant,
            _ => Self::Plenty,
        }
    }
}
