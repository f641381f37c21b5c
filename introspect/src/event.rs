//! Events: from the virtual CPU that was hit to whoever listens.
//!
//! Each virtual CPU owns the producing end of a bounded ring; one collector thread owns all the
//! consuming ends. Invariants: the producing side never blocks, allocates or takes a lock; an event
//! that does not fit is counted as dropped and the count reaches the listener with the next batch;
//! events of one virtual CPU stay in order; after [`Collector::finish`] nothing is left in a ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::{self, JoinHandle, Thread};

use hvprobe_arch::Regs;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::probe::ProbeId;
use crate::probe::spec::{CAPTURE_MAX, ITEMS_MAX, RegisterSet};
use crate::task::Task;

/// What an event tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The probepoint was reached: the pre-handler.
    Hit,
    /// The displaced instruction took effect: the post-handler. RIP is where the guest goes on.
    Post,
    /// The displaced instruction faulted, and the guest's own handler was given the fault.
    Fault {
        /// Number of the exception (SDM vol. 3, table 6-1).
        vector: u8,
        /// Its error code, if that exception has one.
        error_code: Option<u32>,
    },
    /// A function returned: the return handler. RIP is the caller.
    Return(Call),
}

/// The call that a return belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the call, never reused on this machine.
    pub id: u64,
    /// Host time at entry, nanoseconds of `CLOCK_MONOTONIC`.
    pub entry_ns: u64,
    /// The guest's time-stamp counter at entry.
    pub entry_tsc: u64,
    /// The registers at entry.
    pub entry: Regs,
}

/// What was read from the guest's memory at a hit: the items of the probe's capture one after
/// another, for a return probe first those of the entry. Unreadable ones are zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    bytes: [u8; CAPTURE_MAX],
    len: u16,
    unreadable: u32,
    items: u8,
}

impl Captured {
    /// Nothing.
    pub const EMPTY: Self = Self {
        bytes: [0; CAPTURE_MAX],
        len: 0,
        unreadable: 0,
        items: 0,
    };

    /// What was read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Whether the item at `index` could not be read, and is zeros here.
    #[must_use]
    pub fn is_unreadable(&self, index: usize) -> bool {
        index < ITEMS_MAX && self.unreadable >> index & 1 == 1
    }

    /// Which items could not be read, a bit for each.
    pub(crate) fn unreadable(&self) -> u32 {
        self.unreadable
    }

    /// Appends an item of `len` bytes, which `read` fills or says that it cannot. What does not fit
    /// is left out; a capture that was checked fits.
    pub(crate) fn item(&mut self, len: usize, read: impl FnOnce(&mut [u8]) -> bool) {
        let start = usize::from(self.len);
        let Some(into) = self.bytes.get_mut(start..start + len) else {
            return;
        };
        if !read(into) {
            into.fill(0);
            self.unreadable |= 1_u32.checked_shl(u32::from(self.items)).unwrap_or(0);
        }
        self.items = self.items.saturating_add(1);
        self.len = u16::try_from(start + len).unwrap_or(self.len);
    }
}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captured")
            .field("bytes", &self.bytes())
            .field("unreadable", &self.unreadable)
            .finish()
    }
}

/// One thing one probe saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it was.
    pub kind: EventKind,
    /// Position in the machine's stream of events, from 0; gaps do not occur (drops are counted
    /// apart, before a position is given).
    pub seq: u64,
    /// The probe that was hit.
    pub probe: ProbeId,
    /// The virtual CPU that hit it.
    pub vcpu: u32,
    /// Host time, nanoseconds of `CLOCK_MONOTONIC`, when the exit was taken up.
    pub host_ns: u64,
    /// The guest's time-stamp counter at the same moment.
    pub guest_tsc: u64,
    /// The registers: at the probepoint as the pre-handler found them (RIP is the probepoint), at
    /// the return as the function left them, or after the displaced instruction.
    pub regs: Regs,
    /// Which of them the user wants to see.
    pub shown: RegisterSet,
    /// What was captured.
    pub captured: Captured,
    /// The task that ran, if the kernel's layout is known and memory held one.
    pub task: Option<Task>,
    /// Host nanoseconds from taking up the exit until the guest could go on after the displaced
    /// instruction.
    pub cost_ns: u64,
}

/// Lets the collector sleep while there is nothing to collect.
#[derive(Debug)]
struct Waker {
    asleep: AtomicBool,
    collector: Thread,
}

impl Waker {
    /// Called by a virtual CPU after it queued something. One load, unless the collector sleeps.
    fn wake(&self) {
        // Pairs with the fence in the collector: either it sees what was queued, or we see it
        // asleep.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            self.collector.unpark();
        }
    }
}

/// The end of the ring that a virtual CPU holds.
#[derive(Debug)]
pub struct EventProducer {
    ring: Producer<Event>,
    dropped: Arc<AtomicU64>,
    waker: Arc<Waker>,
}

impl EventProducer {
    /// Queues `event`, or counts it as dropped when the ring is full. Hot path: no lock, no
    /// allocation; a system call only when the collector sleeps.
    pub fn push(&mut self, event: Event) {
        if self.ring.push(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        self.waker.wake();
    }
}

/// What the collector hands on: events in order of time, and how many were dropped before them.
pub type Sink = Box<dyn FnMut(&[Event], u64) + Send>;

/// The thread that empties the rings.
#[derive(Debug)]
pub struct Collector {
    thread: Option<JoinHandle<()>>,
    finish: Arc<AtomicBool>,
}

impl Collector {
    /// Starts collecting from `vcpus` rings of `capacity` events each; batches go to `sink`.
    /// Returns the producing ends, in the order of the virtual CPUs.
    ///
    /// # Errors
    /// When the host cannot start another thread.
    pub fn start(
        vcpus: usize,
        capacity: usize,
        mut sink: Sink,
    ) -> std::io::Result<(Self, Vec<EventProducer>)> {
        let (producers, consumers): (Vec<_>, Vec<_>) =
            (0..vcpus).map(|_| RingBuffer::new(capacity)).unzip();
        let counters: Vec<_> = (0..vcpus).map(|_| Arc::new(AtomicU64::new(0))).collect();
        let finish = Arc::new(AtomicBool::new(false));
        let (waker_to, waker_from) = std::sync::mpsc::channel::<Arc<Waker>>();
        let thread = thread::Builder::new().name("collector".into()).spawn({
            let finish = Arc::clone(&finish);
            let counters = counters.clone();
            move || {
                let Ok(waker) = waker_from.recv() else { return };
                Drain {
                    rings: consumers,
                    dropped: counters,
                    batch: Vec::with_capacity(BATCH),
                    next_seq: 0,
                }
                .run(&waker, &finish, &mut sink);
            }
        })?;
        let waker = Arc::new(Waker {
            asleep: AtomicBool::new(false),
            collector: thread.thread().clone(),
        });
        let collector = Self {
            thread: Some(thread),
            finish,
        };
        // The thread waits for this before anything else, so the channel is still open.
        let _ = waker_to.send(Arc::clone(&waker));
        let producers = producers
            .into_iter()
            .zip(counters)
            .map(|(ring, dropped)| EventProducer {
                ring,
                dropped,
                waker: Arc::clone(&waker),
            })
            .collect();
        Ok((collector, producers))
    }

    /// Empties the rings a last time and ends the thread. The virtual CPUs must have stopped.
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

/// At most this many events make one batch.
const BATCH: usize = 1024;

struct Drain {
    rings: Vec<Consumer<Event>>,
    dropped: Vec<Arc<AtomicU64>>,
    batch: Vec<Event>,
    next_seq: u64,
}

impl Drain {
    fn run(mut self, waker: &Waker, finish: &AtomicBool, sink: &mut Sink) {
        loop {
            // Read before the rings: what was queued before the order to finish is then seen.
            let last = finish.load(Ordering::SeqCst);
            if self.once(sink) {
                continue;
            }
            if last {
                return;
            }
            waker.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.rings.iter().all(Consumer::is_empty) && !finish.load(Ordering::SeqCst) {
                thread::park();
            }
            waker.asleep.store(false, Ordering::Relaxed);
        }
    }

    /// Hands on one batch; `false` when there was nothing.
    fn once(&mut self, sink: &mut Sink) -> bool {
        self.batch.clear();
        let share = (BATCH / self.rings.len().max(1)).max(1);
        for ring in &mut self.rings {
            for _ in 0..share {
                let Ok(event) = ring.pop() else { break };
                self.batch.push(event);
            }
        }
        let dropped = self
            .dropped
            .iter()
            .map(|d| d.swap(0, Ordering::Relaxed))
            .sum();
        if self.batch.is_empty() && dropped == 0 {
            return false;
        }
        // Stable: events of one instant on one virtual CPU keep their order.
        self.batch.sort_by_key(|e| e.host_ns);
        for event in &mut self.batch {
            event.seq = self.next_seq;
            self.next_seq += 1;
        }
        sink(&self.batch, dropped);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn event(vcpu: u32, host_ns: u64) -> Event {
        Event {
            kind: EventKind::Hit,
            seq: 0,
            probe: ProbeId(1),
            vcpu,
            host_ns,
            guest_tsc: 0,
            regs: Regs::default(),
            shown: RegisterSet::default(),
            captured: Captured::EMPTY,
            task: None,
            cost_ns: 0,
        }
    }

    type Seen = Arc<Mutex<(Vec<Event>, u64)>>;

    fn collector(vcpus: usize, capacity: usize) -> (Collector, Vec<EventProducer>, Seen) {
        let seen = Seen::default();
        let into = Arc::clone(&seen);
        let (collector, producers) = Collector::start(
            vcpus,
            capacity,
            Box::new(move |events, dropped| {
                let mut seen = into.lock().expect("the sink does not panic");
                seen.0.extend_from_slice(events);
                seen.1 += dropped;
            }),
        )
        .expect("a thread can be started");
        (collector, producers, seen)
    }

    #[test]
    fn every_event_of_parallel_producers_is_delivered_or_counted() {
        let (collector, producers, seen) = collector(4, 64);
        thread::scope(|scope| {
            for (vcpu, mut producer) in producers.into_iter().enumerate() {
                scope.spawn(move || {
                    for n in 0..10_000 {
                        producer.push(event(u32::try_from(vcpu).expect("small"), n));
                    }
                });
            }
        });
        collector.finish();
        let seen = seen.lock().expect("no panic");
        assert_eq!(seen.0.len() as u64 + seen.1, 40_000);
        for vcpu in 0..4 {
            let times: Vec<_> = seen
                .0
                .iter()
                .filter(|e| e.vcpu == vcpu)
                .map(|e| e.host_ns)
                .collect();
            assert!(
                times.is_sorted(),
                "events of vCPU {vcpu} changed their order"
            );
        }
        assert!(seen.0.iter().map(|e| e.seq).eq(0..seen.0.len() as u64));
    }

    #[test]
    fn a_sleeping_collector_is_woken_by_a_single_event() {
        let (to, from) = std::sync::mpsc::channel();
        let (collector, mut producers) = Collector::start(
            1,
            8,
            Box::new(move |events, _| {
                let _ = to.send(events.len());
            }),
        )
        .expect("a thread can be started");
        for _ in 0..100 {
            producers[0].push(event(0, 1));
            assert_eq!(from.recv(), Ok(1));
        }
        collector.finish();
    }
}
