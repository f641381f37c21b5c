//! Where the collector takes events from, beside the rings of the virtual CPUs, and where they go.

use std::time::Duration;

use super::value::Event;

/// What [`Source::drain`] tells beside the events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// How many events were lost since the last call.
    pub lost: u64,
    /// Whether there is more to take now, however few events this call gave.
    pub more: bool,
    /// Whether events are kept back that are older than others which may come from elsewhere. That
    /// must end by itself, and soon.
    pub keeps_back: bool,
}

/// Where else events come from than the rings of the virtual CPUs. Only the collector's thread
/// calls it.
///
/// How often it is called hangs on what it says, never on how many events it gave: at once when there
/// is [more](Drained::more), else when its patience ends or somebody wakes the collector.
pub trait Source: Send {
    /// Appends what there is to `batch`, at most `most` events, as near to the order they happened in
    /// as is known; the rest stays for the next call. Their numbers are given to them later.
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained;

    /// How long the collector may sleep from now on before it has to call [`Source::drain`] again;
    /// `None` if that is not needed until [`EventProducer::wake`](super::EventProducer::wake). Asked after each call that left
    /// nothing. A source that wants to be called once more, for whatever reason, says a time.
    fn patience(&self) -> Option<Duration>;
}

/// What the collector hands on: events in order of time, and how many were dropped before them.
pub type Sink = Box<dyn FnMut(&[Event], u64) + Send>;
