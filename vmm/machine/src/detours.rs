//! What detours record, on its way to the machine's collector.
//!
//! The collector reads the ring at least every few milliseconds while anything records into it, and
//! when a detour rings because much has come together. Whoever needs everything there is now has it
//! read ahead ([`Detours::catch_up`]). Where a hit is to be lost no more than that, its virtual CPU waits here
//! for the collector.

use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use hvprobe_hit::event::{Drained, Event, Room, Source};
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
    /// `None` where no detours can be made.
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

    /// Names the thread that is to be woken.
    pub(crate) fn set_collector(&self, thread: Thread) {
        // There is one collector.
        let _ = self.0.collector.set(thread);
    }

    /// Has the collector read the ring now, and ask again how long it may sleep.
    pub(crate) fn wake(&self) {
        if let Some(collector) = self.0.collector.get() {
            collector.unpark();
        }
    }

    /// Has the virtual CPU of the calling thread wait until there is room, or `is_called`, but not for long;
    /// whether it is worth another try.
    pub(crate) fn wait_for_room(
        &self,
        room: impl Fn() -> Room,
        is_called: impl Fn() -> bool,
    ) -> bool {
        self.0.waiting.wait(room, is_called, || self.wake())
    }

    /// How much room detours find in the ring.
    pub(crate) fn room(&self) -> Room {
        let collection = self.0.collection.as_ref();
        collection.map_or(Room::None, |collection| collection.room(&*self.0.ram))
    }

    /// Reads and accounts for everything that was recorded up to now.
    pub(crate) fn catch_up(&self) {
        if let Some(collection) = &self.0.collection {
            collection.catch_up(&*self.0.ram, self.0.timeline.now());
            self.wake();
        }
    }

    /// The same when the guest will not run again.
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
