//! Events: what probes saw, and the way from there to whoever listens.
//!
//! Invariant: an event is one value of a fixed size that owns nothing on the heap, so that making,
//! moving and dropping one never allocates.

mod collector;
mod event;
mod order;
mod source;

pub use collector::{Collector, EventProducer};
pub use event::{Call, Captured, Event, EventKind};
pub use source::{Drained, Sink, Source};
