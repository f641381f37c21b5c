//! The gRPC service: `hvprobe.v1` for the machines of this process.

mod events;
mod fleet;
mod limits;
mod listen;
mod server;
mod services;
mod status;
mod wire;

pub use listen::socket::{ListenError, Listener};
pub use server::{ServeError, Server};
