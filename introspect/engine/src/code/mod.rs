//! Code of ours in the guest: its addresses, its contents, and which tasks may still reach it.

pub(crate) mod detours;
pub(crate) mod error;
pub(crate) mod extent;
pub(crate) mod ghosts;
pub(crate) mod jump;
pub(crate) mod keep;
pub(crate) mod ours;
pub(crate) mod paths;
pub(crate) mod region;
pub(crate) mod scan;
pub(crate) mod space;

pub use error::HiddenError;
pub use region::{HiddenRegion, outermost_slots};
