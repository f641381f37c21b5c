//! A bounded queue between a writer that must not wait and a reader that may be slow.
//!
//! ```text
//!              weight + waiting > limit
//!   taking ──────────────────────────────► losing
//!          ◄──────────────────────────────
//!              half of the limit is free
//! ```
//! Invariants: the items that wait in a queue never weigh more than the queue's limit, and those in all queues of a
//! pool never weigh more than the pool's limit. The writer never waits. Losses are counted. The reader gets the
//! count of a loss after all items from before the loss, and at the latest together with the first item after it.
//! Notices of throttled hits are never lost; those that wait are added up for each probe. A queue that was full
//! takes nothing until half of it is free, so that a slow reader has a few long gaps instead of many short ones.

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_spec::ProbeId;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::notice::ThrottleNotice;

/// A count of lost items.
pub trait Loss: Default {
    /// Returns whether nothing was lost.
    fn is_nothing(&self) -> bool;

    /// Adds the count of a later loss.
    fn add(&mut self, later: Self);
}

/// Number of lost items.
impl Loss for u64 {
    fn is_nothing(&self) -> bool {
        *self == 0
    }

    fn add(&mut self, later: Self) {
        *self = self.saturating_add(later);
    }
}

/// Limit of the memory that many queues share. Clones refer to the same pool.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Room>);

#[derive(Debug)]
struct Room {
    limit: usize,
    taken: AtomicUsize,
}

impl Pool {
    /// Creates a pool for items that weigh at most `limit` together.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Room {
            limit,
            taken: AtomicUsize::new(0),
        }))
    }

    /// Returns the weight that is taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.0.taken.load(Ordering::Relaxed)
    }

    /// Returns the maximum weight.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Takes room of `weight` for an item, or for other memory of the queues. Returns `None` if there is too little
    /// room.
    #[must_use]
    pub fn take(&self, weight: usize) -> Option<Share> {
        let Room { limit, taken } = &*self.0;
        let more = |taken: usize| taken.checked_add(weight).filter(|sum| sum <= limit);
        let took = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        took.ok().map(|_| Share {
            pool: self.clone(),
            weight,
        })
    }
}

/// Room in a [`Pool`]; dropping it returns the room.
#[derive(Debug)]
pub struct Share {
    pool: Pool,
    weight: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.0.taken.fetch_sub(self.weight, Ordering::Relaxed);
    }
}

/// Creates a queue for items that weigh at most `limit` together.
#[must_use]
pub fn queue<T, L: Loss>(limit: usize) -> (Entrance<T, L>, Exit<T, L>) {
    queue_in(&Pool::new(usize::MAX), limit)
}

/// Like [`queue`], but takes the room for items from `pool`.
#[must_use]
pub fn queue_in<T, L: Loss>(pool: &Pool, limit: usize) -> (Entrance<T, L>, Exit<T, L>) {
    let (to, from) = unbounded_channel();
    let shared = Arc::new(Shared::default());
    let entrance = Entrance {
        to,
        shared: Arc::clone(&shared),
        pool: pool.clone(),
        limit,
        losing: false,
    };
    (entrance, Exit { from, shared })
}

#[derive(Debug, Default)]
struct Shared<L> {
    /// Weight of the items that wait.
    waiting: AtomicUsize,
    /// Losses that come after all items that wait.
    lost: Mutex<L>,
    /// Notices that wait.
    notices: Mutex<BTreeMap<ProbeId, ThrottleNotice>>,
}

impl<L: Loss> Shared<L> {
    fn lost(&self) -> MutexGuard<'_, L> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notices(&self) -> MutexGuard<'_, BTreeMap<ProbeId, ThrottleNotice>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the notices that wait.
    fn take_notices(&self) -> Vec<ThrottleNotice> {
        mem::take(&mut *self.notices()).into_values().collect()
    }
}

#[derive(Debug)]
struct Entry<T, L> {
    item: Option<T>,
    weight: usize,
    /// Losses before the item.
    lost: L,
    /// Room in the pool, held until the item is taken.
    _share: Option<Share>,
}

/// Writing end of a queue.
#[derive(Debug)]
pub struct Entrance<T, L = u64> {
    to: UnboundedSender<Entry<T, L>>,
    shared: Arc<Shared<L>>,
    pool: Pool,
    limit: usize,
    losing: bool,
}

impl<T, L: Loss> Entrance<T, L> {
    /// Returns whether the reading end is gone.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.to.is_closed()
    }

    /// Returns whether the queue takes items. If not, they can only be counted as lost.
    pub fn is_taking(&mut self) -> bool {
        if self.losing {
            self.losing = self.shared.waiting.load(Ordering::Relaxed) > self.limit / 2;
        }
        !self.losing
    }

    /// Appends `item`, or returns it if there is no room. `weight` is the memory that the item takes, including
    /// that of the queue itself.
    ///
    /// # Errors
    /// The item, when it does not fit or the queue takes nothing now.
    pub fn put(&mut self, item: T, weight: usize) -> Result<(), T> {
        let waiting = self.shared.waiting.load(Ordering::Relaxed);
        let fits = self.is_taking() && waiting.saturating_add(weight) <= self.limit;
        let Some(share) = fits.then(|| self.pool.take(weight)).flatten() else {
            self.losing = true;
            return Err(item);
        };
        self.append(Some(item), weight, Some(share));
        Ok(())
    }

    /// Counts the loss `lost`. Does not wake a waiting reader.
    pub fn lose(&mut self, lost: L) {
        self.shared.lost().add(lost);
    }

    /// Keeps `notices` until the reader takes something.
    pub fn note<'n>(&mut self, notices: impl Iterator<Item = &'n ThrottleNotice>) {
        let mut kept = self.shared.notices();
        for notice in notices {
            kept.entry(notice.throttled.probe)
                .and_modify(|earlier| {
                    let count = &mut earlier.throttled.count;
                    *count = count.saturating_add(notice.throttled.count);
                    earlier.throttled.disabled = notice.throttled.disabled;
                    earlier.window += notice.window;
                })
                .or_insert_with(|| notice.clone());
        }
    }

    /// Wakes a waiting reader if there are losses or notices.
    pub fn wake_reader(&mut self) {
        // If an item waits, the reader is awake, and finds the losses and notices with or after the item.
        let waiting = self.shared.waiting.load(Ordering::Relaxed) > 0;
        let news = !self.shared.lost().is_nothing() || !self.shared.notices().is_empty();
        if !waiting && news {
            // The entry without an item has a weight, so that at most one such entry waits.
            self.append(None, 1, None);
        }
    }

    fn append(&mut self, item: Option<T>, weight: usize, share: Option<Share>) {
        self.shared.waiting.fetch_add(weight, Ordering::Relaxed);
        let lost = mem::take(&mut *self.shared.lost());
        // An abandoned queue needs no entries.
        let _ = self.to.send(Entry {
            item,
            weight,
            lost,
            _share: share,
        });
    }

    /// Returns the weight of the items that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::Relaxed)
    }
}

/// Reading end of a queue.
#[derive(Debug)]
pub struct Exit<T, L = u64> {
    from: UnboundedReceiver<Entry<T, L>>,
    shared: Arc<Shared<L>>,
}

/// Entry taken from a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken<T, L = u64> {
    /// Losses before the item.
    pub lost: L,
    /// The item; `None` for an entry with only losses or notices.
    pub item: Option<T>,
    /// Notices of throttled hits.
    pub notices: Vec<ThrottleNotice>,
}

impl<T, L: Loss> Exit<T, L> {
    /// Returns the next item, loss or notices, if there are any now.
    pub fn try_next(&mut self) -> Option<Taken<T, L>> {
        self.now().ok()
    }

    /// Waits for the next item, loss or notices, and returns it. Returns `None` when the writing end is gone and
    /// everything was returned.
    pub async fn next(&mut self) -> Option<Taken<T, L>> {
        loop {
            match self.now() {
                Err(TryRecvError::Empty) => {}
                taken => return taken.ok(),
            }
            // If the writing end is gone, the next round still reports losses after the last item.
            if let Some(entry) = self.from.recv().await
                && let Some(taken) = self.take(entry)
            {
                return Some(taken);
            }
        }
    }

    /// Like [`Exit::next`], but blocks the calling thread.
    pub fn blocking_next(&mut self) -> Option<Taken<T, L>> {
        loop {
            match self.now() {
                Err(TryRecvError::Empty) => {}
                taken => return taken.ok(),
            }
            if let Some(entry) = self.from.blocking_recv()
                && let Some(taken) = self.take(entry)
            {
                return Some(taken);
            }
        }
    }

    fn now(&mut self) -> Result<Taken<T, L>, TryRecvError> {
        loop {
            match self.from.try_recv() {
                Ok(entry) => {
                    if let Some(taken) = self.take(entry) {
                        return Ok(taken);
                    }
                }
                Err(nothing) => {
                    let lost = mem::take(&mut *self.shared.lost());
                    return self.taken(lost, None).ok_or(nothing);
                }
            }
        }
    }

    /// Takes an entry. Returns `None` for an entry without an item whose loss or notices were reported before.
    fn take(&self, entry: Entry<T, L>) -> Option<Taken<T, L>> {
        self.shared
            .waiting
            .fetch_sub(entry.weight, Ordering::Relaxed);
        let Entry { item, lost, .. } = entry;
        self.taken(lost, item)
    }

    fn taken(&self, lost: L, item: Option<T>) -> Option<Taken<T, L>> {
        let notices = self.shared.take_notices();
        (item.is_some() || !lost.is_nothing() || !notices.is_empty()).then_some(Taken {
            lost,
            item,
            notices,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn item<T>(item: T, lost: u64) -> Option<Taken<T>> {
        let item = Some(item);
        Some(Taken {
            lost,
            item,
            notices: Vec::new(),
        })
    }

    #[test]
    fn queues_of_a_pool_have_no_more_than_it_together() {
        let pool = Pool::new(100);
        let (mut one, mut first) = queue_in::<_, u64>(&pool, 80);
        let (mut other, second) = queue_in::<_, u64>(&pool, 80);
        assert!(one.put(1, 60).is_ok());
        assert_eq!(other.put(2, 60), Err(2));
        other.lose(1);
        assert!(other.put(3, 40).is_ok());
        assert_eq!((pool.taken(), one.put(4, 1)), (100, Err(4)));
        // An item that is taken, or dropped with its queue, makes room.
        assert_eq!(first.try_next().and_then(|taken| taken.item), Some(1));
        assert_eq!(pool.taken(), 40);
        drop(second);
        assert_eq!(pool.taken(), 0);
        assert!(one.put(5, 80).is_ok());
        drop((one, first));
        assert_eq!(pool.taken(), 0);
    }

    #[test]
    fn full_queue_takes_nothing_until_half_of_it_is_free() {
        let (mut into, mut from) = queue(4);
        for n in 0..4 {
            assert_eq!(into.put(n, 1), Ok(()));
        }
        assert_eq!(into.put(4, 1), Err(4));
        into.lose(1);
        assert_eq!(from.try_next(), item(0, 0));
        assert_eq!(into.put(5, 1), Err(5));
        into.lose(1);
        assert_eq!(from.try_next(), item(1, 0));
        assert_eq!(into.put(6, 1), Ok(()));
        drop(into);
        assert_eq!(from.blocking_next(), item(2, 0));
        assert_eq!(from.blocking_next(), item(3, 0));
        assert_eq!(from.blocking_next(), item(6, 2));
        assert_eq!(from.blocking_next(), None);
    }

    #[test]
    fn loss_at_the_end_is_reported_without_an_item() {
        let (mut into, mut from) = queue::<u8, u64>(1);
        into.lose(3);
        drop(into);
        let loss = Taken {
            lost: 3,
            item: None,
            notices: Vec::new(),
        };
        assert_eq!(from.blocking_next(), Some(loss));
        assert_eq!(from.blocking_next(), None);
    }

    #[test]
    fn losses_beyond_what_can_be_counted_are_as_many_as_can_be() {
        let (mut into, mut from) = queue::<u8, u64>(1);
        into.lose(u64::MAX);
        into.lose(3);
        drop(into);
        assert_eq!(from.blocking_next().map(|taken| taken.lost), Some(u64::MAX));
    }

    #[test]
    fn waiting_reader_is_woken_for_a_loss_at_once() {
        let (mut into, mut from) = queue::<u8, u64>(1);
        let reader = std::thread::spawn(move || from.blocking_next());
        into.lose(2);
        into.wake_reader();
        assert_eq!(reader.join().unwrap().map(|taken| taken.lost), Some(2));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(usize),
        Lose(u64),
        Wake,
        Take,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0_usize..6).prop_map(Step::Put),
            1 => (1_u64..5).prop_map(Step::Lose),
            1 => Just(Step::Wake),
            3 => Just(Step::Take),
        ]
    }

    proptest! {
        /// Numbers items and losses in one sequence, so that the reader can check the position of each loss.
        #[test]
        fn all_is_taken_or_counted_as_lost_in_its_place(steps in proptest::collection::vec(step(), 0..200)) {
            const LIMIT: usize = 10;
            let (mut into, mut from) = queue(LIMIT);
            let (mut made, mut seen) = (0_u64, 0_u64);
            let mut check = |taken: Taken<u64>| {
                seen += taken.lost;
                if let Some(number) = taken.item {
                    assert_eq!(number, seen, "a loss was told in the wrong place");
                    seen += 1;
                }
            };
            for step in steps {
                match step {
                    Step::Put(weight) => {
                        if into.put(made, weight).is_err() {
                            into.lose(1);
                        }
                        made += 1;
                    }
                    Step::Lose(count) => {
                        into.lose(count);
                        made += count;
                    }
                    Step::Wake => into.wake_reader(),
                    Step::Take => if let Some(taken) = from.try_next() {
                        check(taken);
                    },
                }
                prop_assert!(into.waiting() <= LIMIT);
            }
            drop(into);
            while let Some(taken) = from.blocking_next() {
                check(taken);
            }
            prop_assert_eq!(seen, made);
        }
    }
}
