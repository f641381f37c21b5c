//! Sources of events besides the rings of the vCPUs, and the sink that events go to.

use std::time::Duration;

use super::value::Event;

/// What [`Source::drain`] returns besides the events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Number of events lost since the last call.
    pub lost: u64,
    /// Whether there is more to take now, however few events this call returned.
    pub more: bool,
    /// Whether the source keeps back events that are older than others which may come from elsewhere. It must stop
    /// this by itself, and soon.
    pub keeps_back: bool,
}

/// A source of events besides the rings of the vCPUs. Only the collector's thread calls it.
///
/// How often it is called depends on its answers, never on how many events it returned: at once when there is
/// [more](Drained::more), otherwise when its patience ends or the collector is woken.
pub trait Source: Send {
    /// Appends at most `most` of the available events to `batch`, in the order in which they happened as far as
    /// that is known. Leaves the rest for the next call. The events get their numbers later.
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained;

    /// Returns how long the collector may sleep from now on before it has to call [`Source::drain`] again; `None`
    /// if that is not needed until [`EventProducer::wake`](super::EventProducer::wake). Called before each pass of
    /// the collector, and after each pass that left nothing to take. A source that wants to be called once more,
    /// for whatever reason, returns a time.
    fn patience(&self) -> Option<Duration>;
}

/// Receives events in order of time, and the number of events that were dropped before them.
pub type Sink = Box<dyn FnMut(&[Event], u64) + Send>;
