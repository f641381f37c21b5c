//! Sources of events besides the rings of the vCPUs, and the sink that events go to.

use std::time::Duration;

use super::value::Event;

/// What [`Source::drain`] returns besides the events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Number of events lost since the last call.
    pub lost: u64,
    /// Whether more events can be taken now. This does not depend on how many events this call returned.
    pub more: bool,
    /// Whether the source keeps back events that may be older than events from elsewhere. A source must end this by
    /// itself, and soon.
    pub keeps_back: bool,
}

/// A source of events besides the rings of the vCPUs. Only the collector's thread calls it.
///
/// How often it is called depends on its answers, never on the number of events that it returned: at once if there
/// are [more](Drained::more), otherwise when its patience ends or the collector is woken.
pub trait Source: Send {
    /// Appends at most `most` of the available events to `batch`, as far as is known in the order in which they
    /// happened. Leaves the rest for the next call. The events get their numbers later.
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained;

    /// Returns how long the collector may sleep from now on before it has to call [`Source::drain`] again; `None`
    /// if no call is needed until [`EventProducer::wake`](super::EventProducer::wake). Called before each pass of
    /// the collector, and after each pass that left nothing to take. A source that needs another call for any
    /// reason must return a time.
    fn patience(&self) -> Option<Duration>;
}

/// Receives events in order of time, and the number of events that were dropped before them.
pub type Sink = Box<dyn FnMut(&[Event], u64) + Send>;
