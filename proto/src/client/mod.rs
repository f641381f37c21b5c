//! The client end of the interface: a connection to a server, with a client of each service.

mod connection;
mod pages;
mod versions;

pub use connection::{Calls, Client, ConnectError, TokenInterceptor};
pub use versions::ExplainingChannel;
