//! Which time it is, for the host and for each guest.

pub(crate) mod host;
mod marks;
pub(crate) mod relation;
pub(crate) mod times;
mod told;
