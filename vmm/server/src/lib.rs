//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Only this crate and the clients know the wire format. [`Kernel`] is re-exported for `hvprobe unpack` and
//! `hvprobe explain`, which read an image in the same way as a server that boots it, and need no machine.

mod arrivals;
mod change_counter;
mod events;
mod explain;
mod fleet;
mod handle;
mod identity;
mod indexes;
mod interface;
mod large;
mod limits;
mod listen;
mod panics;
mod perf_probes;
mod permits;
mod place;
mod reading;
mod requests;
mod server;
mod server_limits;
mod services;
mod sessions;
mod slots;
mod source_lines;
mod sources;
mod status;
mod threads;
mod totals;
mod uploads;
pub mod wire;

pub use explain::{ExplainError, Explanation, explain};
pub use hvprobe_engine::{Explained, Shown};
pub use hvprobe_linux::debug_info::SourceLine;
pub use hvprobe_machine::{Bounds, Kernel};
pub use indexes::Indexes;
pub use listen::socket::{ListenError, Listener};
pub use listen::tcp::{Loopback, LoopbackError};
pub use listen::token::{Token, TokenError};
pub use perf_probes::Definitions;
pub use server::{ServeError, Server};
pub use server_limits::Limits;
pub use source_lines::SourceLines;
pub use sources::{Sources, SourcesError};
