//! Events: what probes report of hits, and the way of events to the sink.
//!
//! Invariant: an event is one value of a fixed size that owns nothing on the heap, so that making,
//! moving and dropping one never allocates.

mod collector;
mod flush;
mod headroom;
mod order;
mod source;
mod value;

pub use collector::{Collector, EventProducer};
pub use flush::Flush;
pub use headroom::Headroom;
pub(crate) use order::in_order;
pub use source::{Drained, Sink, Source};
pub use value::{Call, Captured, Event, EventKind};
