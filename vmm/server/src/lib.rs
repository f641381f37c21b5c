//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Only this crate and the clients know the wire format.

mod bounds;
mod calls;
mod events;
mod kernels;
mod listen;
mod machines;
mod server;
mod services;
mod sessions;
mod status;
mod uuid;
mod wire;

pub use bounds::server_limits::Limits;
pub use hvprobe_engine::{Explained, Shown};
pub use hvprobe_linux::debug_info::SourceLine;
pub use hvprobe_machine::Bounds;
pub use kernels::explain::{ExplainError, Explanation, explain};
pub use kernels::indexes::Indexes;
pub use kernels::perf_probes::Definitions;
pub use kernels::source_lines::SourceLines;
pub use kernels::sources::{Sources, SourcesError};
pub use listen::socket::{ListenError, Listener};
pub use listen::tcp::{Loopback, LoopbackError};
pub use server::{ServeError, Server};
