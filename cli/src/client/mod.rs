//! The client end of the gRPC interface: connections, sessions, uploads, and the server inside this process. It
//! prints nothing and knows no command.

mod chosen;
pub(crate) mod clock;
mod connection;
mod debug_info;
pub(crate) mod in_process;
pub(crate) mod session;
pub(crate) mod upload;

pub(crate) use chosen::choose;
pub(crate) use connection::{Client, socket_path};
