//! Connections of clients: listening sockets, their limits, and which calls a connection admits.

pub(crate) mod acceptor;
mod authority;
pub(crate) mod caller;
pub(crate) mod connection;
mod silent;
pub(crate) mod socket;
pub(crate) mod tcp;
