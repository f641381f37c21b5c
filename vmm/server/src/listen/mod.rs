//! Where clients come in.

pub(crate) mod authority;
pub(crate) mod socket;
