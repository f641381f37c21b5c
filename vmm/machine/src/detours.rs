//! The detours' records on their way to the machine's collector.
//!
//! The collector reads the ring at least every few milliseconds while anything records into it, and when a detour
//! rings the doorbell because a quarter of the ring is full. [`Detours::catch_up`] reads the ring at once, for
//! callers that need every record made so far. A vCPU whose hit must not be lost waits here until the collector has
//! made room.

use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use hvprobe_hit::event::{Drained, Event, Headroom, Source};
use hvprobe_hit::record::Collection;
use hvprobe_vm::memory::GuestRam;

use crate::clock::relation::Timeline;
use crate::waiting::Waiting;

/// The host's side of the ring.
#[derive(Clone, Debug)]
pub(crate) struct Detours(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ram: Arc<GuestRam>,
    timeline: Timeline,
    collector: OnceLock<Thread>,
    waiting: Waiting,
    /// `None` if detours cannot be made.
    collection: Option<Collection>,
}

impl Detours {
    pub(crate) fn new(
        ram: Arc<GuestRam>,
        timeline: Timeline,
        collection: Option<Collection>,
    ) -> Self {
        Self(Arc::new(Inner {
            ram,
            timeline,
            collector: OnceLock::new(),
            waiting: Waiting::default(),
            collection,
        }))
    }

    /// Sets the collector's thread, which [`Detours::wake`] wakes.
    pub(crate) fn set_collector(&self, thread: Thread) {
        // The thread is set once, because there is one collector.
        let _ = self.0.collector.set(thread);
    }

    /// Makes the collector read the ring now, and then determine anew how long it may sleep.
    pub(crate) fn wake(&self) {
        if let Some(collector) = self.0.collector.get() {
            collector.unpark();
        }
    }

    /// Makes the vCPU of the calling thread wait until `room` returns that there is room, until `is_called` returns
    /// true, or for a limited time. Returns whether another attempt makes sense.
    pub(crate) fn wait_for_room(
        &self,
        room: impl Fn() -> Headroom,
        is_called: impl Fn() -> bool,
    ) -> bool {
        self.0.waiting.wait(room, is_called, || self.wake())
    }

    /// Returns how much room the ring has for detours.
    pub(crate) fn room(&self) -> Headroom {
        let collection = self.0.collection.as_ref();
        collection.map_or(Headroom::None, |collection| collection.room(&*self.0.ram))
    }

    /// Reads all records made so far, and adds them to the counts.
    pub(crate) fn catch_up(&self) {
        if let Some(collection) = &self.0.collection {
            collection.catch_up(&*self.0.ram, self.0.timeline.now());
            self.wake();
        }
    }

    /// Like [`Detours::catch_up`], for a guest that will not run again.
    pub(crate) fn end(&self) {
        if let Some(collection) = &self.0.collection {
            collection.end(&*self.0.ram, self.0.timeline.now());
        }
    }
}

impl Source for Detours {
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained {
        let Inner { ram, timeline, .. } = &*self.0;
        let drained = match &self.0.collection {
            Some(collection) => collection.drain(&**ram, timeline.now(), batch, most),
            None => Drained::default(),
        };
        self.0.waiting.look_again();
        drained
    }

    fn patience(&self) -> Option<Duration> {
        self.0.collection.as_ref()?.patience()
    }
}
