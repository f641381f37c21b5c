//! Limits of requests, of clients and of the host's resources, and the permits that enforce them.
//!
//! Nothing here knows a connection, a service or a machine of the server.

pub(crate) mod boot_files;
pub(crate) mod limits;
pub(crate) mod permits;
pub(crate) mod server_limits;
pub(crate) mod threads;
pub(crate) mod totals;
