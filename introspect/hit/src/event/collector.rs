//! The thread that gathers events and delivers them in batches.
//!
//! ```text
//!   vCPU ─────────► ring ──┐
//!   vCPU ─────────► ring ──┼──► collector ──► batch ──► sink
//!   anything else ► Source ┘
//! ```
//! Each vCPU owns the producing end of a bounded ring; the collector owns all the consuming ends and the sources.
//! Invariants: the producing side never blocks, allocates or takes a lock; an event that does not fit is counted as
//! dropped and the count reaches the sink with the next batch; events of all rings and sources are delivered in
//! order of time ([`super::order`]); after [`Collector::finish`] nothing is left in a ring or a source.
//!
//! ```text
//!   collecting ──► some from a ring, or held ────► dozes: what is queued waits for [`DOZE`]
//!       ▲      └─► nothing, or from sources ─────► sleeps: what is queued wakes it
//!       └──────────────────────────────────────────┘
//! ```
//! So events that follow the first one after a pause cost the vCPUs no system call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use rtrb::{Producer, RingBuffer};

use super::flush::{self, Flush, Owed};
use super::headroom::Headroom;
use super::order::{Order, PassResult};
use super::source::{Sink, Source};
use super::value::Event;

/// Maximum number of events that one hit is assumed to make: more than there are probes at one place, or calls
/// that end together.
const HIT_MOST: u64 = 64;

/// Lets the collector sleep while there is nothing to collect.
#[derive(Debug)]
struct Waker {
    asleep: AtomicBool,
    collector: Thread,
}

impl Waker {
    /// Must be called by a vCPU after it has queued something. Takes one fence and one load, unless the collector
    /// sleeps.
    fn queued(&self) {
        // Pairs with the fence in the collector: either the collector sees what was queued, or we see that it is
        // asleep.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            self.collector.unpark();
        }
    }
}

/// What a vCPU reports to the collector, besides events.
#[derive(Debug, Default)]
#[repr(align(64))]
struct VcpuCounts {
    dropped: AtomicU64,
    /// Incremented at the beginning and at the end of each hit: odd during one.
    hits: AtomicU64,
}

/// The producing end of a vCPU's ring.
#[derive(Debug)]
pub struct EventProducer {
    ring: Producer<Event>,
    counts: Arc<VcpuCounts>,
    waker: Arc<Waker>,
}

impl EventProducer {
    /// Marks the beginning or the end of a hit. An event whose time is after the beginning must be queued before
    /// the end. Newer events are held until the end, even if the thread is preempted for long.
    #[inline]
    pub fn turn(&mut self) {
        let hits = self.counts.hits.load(Ordering::Relaxed);
        self.counts
            .hits
            .store(hits.wrapping_add(1), Ordering::Release);
    }

    /// Queues the event that `make` makes, or counts it as dropped when the ring is full. `finish` completes the
    /// event in its place in the ring; what it adds would be copied twice if `make` added it. Hot path: no lock, no
    /// allocation; a system call only when the collector sleeps.
    #[inline]
    pub fn push(&mut self, make: impl FnOnce() -> Event, finish: impl FnOnce(&mut Event)) {
        if let Ok(mut room) = self.ring.write_chunk_uninit(1)
            && let ([place], _) = room.as_mut_slices()
        {
            finish(place.write(make()));
            // SAFETY: the room is for one event, which was just written.
            unsafe { room.commit_all() };
        } else {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
        self.waker.queued();
    }

    /// Returns how much room there is for events.
    #[must_use]
    pub fn room(&self) -> Headroom {
        let capacity = self.ring.buffer().capacity();
        Headroom::of(self.ring.slots() as u64, capacity as u64, HIT_MOST)
    }

    /// Makes the collector read its sources now, even if their patience has not ended.
    pub fn wake(&self) {
        // If the thread is not asleep, the wake-up is kept for its next sleep. So it cannot get lost between
        // reading and sleeping.
        self.waker.collector.unpark();
    }
}

/// The thread that empties the rings.
#[derive(Debug)]
pub struct Collector {
    thread: Option<JoinHandle<()>>,
    finish: Arc<AtomicBool>,
    flush: Flush,
}

impl Collector {
    /// Starts collecting from `vcpus` rings of `capacity` events each; batches go to `sink`.
    /// Returns the producing ends, in the order of the vCPUs.
    ///
    /// # Errors
    /// When the host cannot start another thread.
    pub fn start(
        vcpus: usize,
        capacity: usize,
        sink: Sink,
    ) -> std::io::Result<(Self, Vec<EventProducer>)> {
        Self::start_with(Vec::new(), vcpus, capacity, sink)
    }

    /// Like [`Collector::start`], but also collects from `sources`.
    ///
    /// # Errors
    /// When the host cannot start another thread.
    pub fn start_with(
        sources: Vec<Box<dyn Source>>,
        vcpus: usize,
        capacity: usize,
        mut sink: Sink,
    ) -> std::io::Result<(Self, Vec<EventProducer>)> {
        let (producers, consumers): (Vec<_>, Vec<_>) =
            (0..vcpus).map(|_| RingBuffer::new(capacity)).unzip();
        let counts: Vec<_> = (0..vcpus).map(|_| Arc::<VcpuCounts>::default()).collect();
        let finish = Arc::new(AtomicBool::new(false));
        let (waker_to, waker_from) = std::sync::mpsc::channel::<Arc<Waker>>();
        let asked = Arc::<flush::Shared>::default();
        let owed = Owed::new(Arc::clone(&asked));
        let thread = thread::Builder::new().name("collector".into()).spawn({
            let finish = Arc::clone(&finish);
            let counts = counts.clone();
            move || {
                let Ok(waker) = waker_from.recv() else { return };
                Drain {
                    order: Order::new(consumers),
                    counts,
                    sources,
                    owed,
                }
                .run(&waker, &finish, &mut sink);
            }
        })?;
        let waker = Arc::new(Waker {
            asleep: AtomicBool::new(false),
            collector: thread.thread().clone(),
        });
        let collector = Self {
            flush: Flush::new(asked, thread.thread().clone()),
            thread: Some(thread),
            finish,
        };
        // The thread waits for this before anything else, so the channel is still open.
        let _ = waker_to.send(Arc::clone(&waker));
        let producers = producers
            .into_iter()
            .zip(counts)
            .map(|(ring, counts)| EventProducer {
                ring,
                counts,
                waker: Arc::clone(&waker),
            })
            .collect();
        Ok((collector, producers))
    }

    /// Returns the collector's thread. Unparking it makes it read its sources now, even if their patience has not
    /// ended.
    #[must_use]
    pub fn thread(&self) -> Option<&Thread> {
        Some(self.thread.as_ref()?.thread())
    }

    /// Returns a handle for waiting until all events so far are delivered.
    #[must_use]
    pub fn flush(&self) -> Flush {
        self.flush.clone()
    }

    /// Returns whether the thread has ended before [`Self::finish`] was called, which means that a sink has
    /// panicked.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Empties the rings and sources a last time and ends the thread. Nothing may fill them meanwhile or
    /// afterwards.
    pub fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.finish.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A sink that panicked has already said so on standard error.
            let _ = thread.join();
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.end();
    }
}

/// Time for which events of vCPUs accumulate: a fraction of the time in which they fill a ring.
const DOZE: Duration = Duration::from_millis(2);

struct Drain {
    order: Order,
    counts: Vec<Arc<VcpuCounts>>,
    sources: Vec<Box<dyn Source>>,
    owed: Owed,
}

impl Drain {
    fn run(mut self, waker: &Waker, finish: &AtomicBool, sink: &mut Sink) {
        loop {
            // Read before the rings, so that everything that was queued before the request to finish is seen.
            let last = finish.load(Ordering::SeqCst);
            self.owed.note();
            let records = self.patience().is_some();
            let found = self.once(records, last, sink);
            let is_awaited = self.owed.passed(found, || self.order.held());
            match found {
                PassResult::Part => continue,
                PassResult::Nothing if last => return,
                PassResult::Nothing | PassResult::Held | PassResult::All { .. } => {}
            }
            let patience = self.patience();
            if matches!(found, PassResult::All { of_rings: true } | PassResult::Held) && !last {
                thread::park_timeout(patience.map_or(DOZE, |patience| patience.min(DOZE)));
                continue;
            }
            if is_awaited {
                continue;
            }
            waker.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.order.rings_are_empty() && !finish.load(Ordering::SeqCst) {
                match patience {
                    Some(patience) => thread::park_timeout(patience),
                    None => thread::park(),
                }
            }
            waker.asleep.store(false, Ordering::Relaxed);
        }
    }

    /// Returns how long all sources can wait for the next pass; `None` if none of them needs one.
    fn patience(&self) -> Option<Duration> {
        let patience = self.sources.iter().filter_map(|source| source.patience());
        patience.min()
    }

    /// Makes a pass: takes the available events, and delivers those that need not be held, or all of them in the
    /// `last` pass. `records` says whether a source can have events.
    fn once(&mut self, records: bool, last: bool, sink: &mut Sink) -> PassResult {
        let mut pass = self.order.pass(self.sources.len(), records, last);
        for (vcpu, counts) in self.counts.iter().enumerate() {
            pass.look_at(vcpu, counts.hits.load(Ordering::Acquire));
        }
        // The guest can write any number into a counter that it increments itself.
        let mut dropped = 0_u64;
        for source in &mut self.sources {
            let lost = pass.take(|batch, most| source.drain(batch, most));
            dropped = dropped.saturating_add(lost);
        }
        for counts in &self.counts {
            dropped = dropped.saturating_add(counts.dropped.swap(0, Ordering::Relaxed));
        }
        pass.hand_on(dropped, sink)
    }
}

#[cfg(test)]
pub(super) mod tests;
