//! Connections of clients: listening sockets, access, limits and deadlines.

pub(crate) mod acceptor;
pub(crate) mod authority;
pub(crate) mod connection;
pub(crate) mod deadline;
pub(crate) mod silent;
pub(crate) mod socket;
pub(crate) mod streams;
pub(crate) mod tcp;
pub(crate) mod token;
