//! The client end of the gRPC interface: connections, sessions, uploads, and the server inside this process. It
//! prints nothing and knows no command.

mod chosen;
#[cfg(not(feature = "vmm"))]
mod client_alone;
pub(crate) mod clock;
mod connection;
mod debug_info;
#[cfg(feature = "vmm")]
mod in_process;
pub(crate) mod session;
pub(crate) mod upload;

pub(crate) use chosen::choose;
#[cfg(not(feature = "vmm"))]
pub(crate) use client_alone::InProcess;
pub(crate) use connection::Client;
#[cfg(feature = "vmm")]
pub(crate) use connection::socket_path;
#[cfg(feature = "vmm")]
pub(crate) use in_process::InProcess;
