//! Which time it is, for the host and for each guest.

pub(crate) mod host;
pub(crate) mod relation;
pub(crate) mod times;
