//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Only this crate and the clients know the wire format.

mod bounds;
mod calls;
mod events;
mod listen;
mod machines;
mod server;
mod services;
mod sessions;
mod status;
mod uuid;
mod wire;

pub use bounds::server_limits::Limits;
pub use hvprobe_machine::Bounds;
pub use listen::socket::{ListenError, Listener};
pub use listen::tcp::{Loopback, LoopbackError};
pub use server::{ServeError, Server};
