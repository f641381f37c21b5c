//! Calls in flight: functions that a return probe has seen the entry of, and that are to return
//! through the trampoline.
//!
//! Every call is remembered in an *instance* of its probe ([`Pool`]), and the instances of one task
//! of the guest form a list, newest first, at the task's *cell*. This keeps true:
//!
//! - Every entry carries the real return address of its frame. Several entries of one frame
//!   (several probes on a function, or a function that left by a tail call to another probed one)
//!   are neighbours in the list and carry the same address, so any of them may leave.
//! - Of the entries on one stack, a newer one has a lower slot, or the same one if it is of the same
//!   frame.
//! - A cell is changed only by whoever has it open. [`Calls::open`] acquires what the last holder
//!   released, so a task may go from one virtual CPU to another between two operations.
//! - A task with entries has exactly one cell, in the window of cells its address hashes to. A
//!   cell without entries keeps the name of its task, but may be taken over by another.
//!
//! ```text
//!              open(T): exchange            drop, no entries
//!   empty ───────────────────────▶ T busy ──────────────────▶ T idle
//!                                  ▲    │ ▲                     │
//!              open(T): exchange   │    │ └─────────────────────┘ open(any): exchange
//!                                  └──  T live ◀── drop, entries
//! ```
//!
//! A task of a sound guest runs on one virtual CPU at a time, so its operations never overlap, and
//! the guest's own scheduler orders them; a guest that breaks this finds its cell busy and loses
//! the call, nothing else. No operation waits for another virtual CPU, and none allocates, except
//! that an [`MaxActive::Auto`] pool may grow.
//!
//! # Model checking
//!
//! The orderings are checked by loom, which tries all interleavings:
//!
//! ```text
//! cargo test -p hvprobe-introspect --features loom --test loom_calls
//! ```

mod pool;
mod record;
mod sync;
mod task;
#[cfg(test)]
mod tests;

use hvprobe_arch::Gva;
use rustc_hash::FxHashMap;

pub use pool::{AUTO_MAX, FIXED_MAX, Pool, PoolError};
use pool::{Link, PoolCell, Pools};
use record::Record;
pub use record::{DATA_MAX, Entry};
use sync::{AtomicU64, Ordering};
pub use task::{Call, Ended, Found, TaskCalls};

use hvprobe_spec::ProbeId;

/// A number of cells that holds the tasks of any ordinary guest (0.5 MiB).
pub const CELLS: usize = 1 << 15;
/// In how many cells from the one it hashes to a task may be.
#[cfg(not(feature = "loom"))]
const WINDOW: usize = 32;
#[cfg(feature = "loom")]
const WINDOW: usize = 2;

/// How many calls of one function can be in flight before one is missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaxActive {
    /// This many, at most [`FIXED_MAX`]; 0 stands for the default.
    Fixed(u32),
    /// What kprobes take: the larger of 10 and twice the number of virtual CPUs.
    #[default]
    Default,
    /// As many as there are, up to [`AUTO_MAX`].
    Auto,
}

/// Someone has the cell open.
const BUSY: u64 = 1;
/// The cell has no entries.
const IDLE: u64 = 2;

#[derive(Debug)]
struct Cell {
    /// The task's address with its low bits replaced by [`BUSY`] or [`IDLE`]; 0 when never used.
    state: AtomicU64,
    /// [`Link`] to the newest entry.
    newest: AtomicU64,
}

/// The calls in flight of a machine.
#[derive(Debug)]
pub struct Calls {
    cells: Box<[Cell]>,
    pools: Pools,
    vcpus: u32,
}

/// A frame that none of its probes is interested in any longer: what [`Calls::remove`] asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The task whose frame it is.
    pub task: Gva,
    /// Where on the stack its return address is, or was.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
}

/// What is to become of a [`Frame`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It will not return through the trampoline: forget it.
    Forget,
    /// It may still return through the trampoline: remember where it goes, in silence. The next
    /// [`Calls::remove`] asks again.
    Keep,
}

/// What [`Calls::remove`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Entries that are gone.
    pub forgotten: u32,
    /// Entries that stay without being reported, those of earlier removals included.
    pub kept: u32,
}

/// One entry, for whoever looks at all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveCall {
    /// The task that made the call.
    pub task: Gva,
    /// Where on the stack the return address is.
    pub slot: Gva,
    /// The real return address.
    pub ret: Gva,
    /// The probe; `None` if it has left.
    pub probe: Option<ProbeId>,
    /// What [`Entry::id`] was.
    pub id: u64,
    /// Host time of the entry, nanoseconds of `CLOCK_MONOTONIC`.
    pub host_ns: u64,
}

impl Calls {
    /// A table for a machine of `vcpus` virtual CPUs, with at least `cells` cells ([`CELLS`] for a
    /// guest). The memory for it is all allocated here.
    #[must_use]
    pub fn new(vcpus: u32, cells: usize) -> Self {
        let cells = cells.max(WINDOW).next_power_of_two();
        Self {
            cells: (0..cells)
                .map(|_| Cell {
                    state: AtomicU64::new(0),
                    newest: AtomicU64::new(Link::END.0),
                })
                .collect(),
            pools: Pools::new(),
            vcpus,
        }
    }

    /// Instances for `probe`, each with room for `data_size` bytes of private data. Allocates, and
    /// waits for others that do: not for the hit path.
    ///
    /// # Errors
    /// When more instances, data or pools are asked for than there can be.
    pub fn pool(
        &self,
        probe: ProbeId,
        maxactive: MaxActive,
        data_size: usize,
    ) -> Result<Pool, PoolError> {
        self.pools.open(probe, maxactive, self.vcpus, data_size)
    }

    /// The calls of `task`, the guest's current-task pointer, for the caller alone until dropped.
    /// `None` if the cells `task` may be in are all taken, or if the guest says that the task runs
    /// on another virtual CPU as well; then the caller counts a miss, or an unknown return.
    ///
    /// Not to be held while the virtual CPU is parked: whoever looks at all calls would not see
    /// these.
    ///
    /// Hot path: reads one cell of a task that was here before, at most a window of cells else;
    /// one atomic exchange.
    #[must_use]
    pub fn open(&self, task: Gva) -> Option<TaskCalls<'_>> {
        let key = task.0 & !(BUSY | IDLE);
        if key == 0 {
            return None;
        }
        for cell in self.window(key) {
            let state = cell.state.load(Ordering::Relaxed);
            if state & !(BUSY | IDLE) != key {
                continue;
            }
            if let Some(open) = self.hold(cell, state, key) {
                return Some(open);
            }
            if state & IDLE == 0 {
                return None;
            }
            // Another task has taken the cell over.
        }
        self.window(key).find_map(|cell| {
            let state = cell.state.load(Ordering::Relaxed);
            (state == 0 || state & IDLE != 0)
                .then(|| self.hold(cell, state, key))
                .flatten()
        })
    }

    /// Makes `cell` busy for `key` if it is in `state`, and not busy.
    fn hold<'a>(&'a self, cell: &'a Cell, state: u64, key: u64) -> Option<TaskCalls<'a>> {
        if state & BUSY != 0 {
            return None;
        }
        cell.state
            .compare_exchange(state, key | BUSY, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some(TaskCalls::new(self, cell, key))
    }

    /// The cells `key` may be in, the likeliest first.
    fn window(&self, key: u64) -> impl Iterator<Item = &Cell> {
        // Fibonacci hashing (Knuth, vol. 3, 6.4): the high half of the product is well mixed.
        let hash = (key >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let home = usize::try_from(hash).unwrap_or(0);
        let mask = self.cells.len() - 1;
        (0..WINDOW).map(move |i| &self.cells[(home + i) & mask])
    }

    fn record(&self, link: Link) -> Option<(&PoolCell, Record<'_>)> {
        let index = link.record()?;
        let pool = self.pools.get(link.pool())?;
        Some((pool, pool.record(index)?))
    }

    /// The calls of every task in turn, except of those open elsewhere.
    fn tasks(&self) -> impl Iterator<Item = TaskCalls<'_>> {
        self.cells.iter().filter_map(|cell| {
            let state = cell.state.load(Ordering::Relaxed);
            if state == 0 || state & IDLE != 0 {
                return None;
            }
            self.hold(cell, state, state)
        })
    }

    /// Shows `each` every entry, task by task, the newest of a task first. For when the virtual
    /// CPUs stand still: entries of a task that is open elsewhere are left out, and a task that is
    /// being shown cannot be opened.
    pub fn live(&self, mut each: impl FnMut(&LiveCall)) {
        for calls in self.tasks() {
            calls.live(&mut each);
        }
    }

    /// Takes out the entries of the probes that `leaves` names, and those that earlier removals
    /// kept. Where a frame has no other entry, `vacate` decides: it writes the real return address
    /// back if the frame's slot still holds the trampoline's. It is not asked about a frame in
    /// whose place another task has a newer one; that is forgotten. For when the virtual CPUs stand
    /// still, as [`Calls::live`]; allocates.
    pub fn remove(
        &self,
        mut leaves: impl FnMut(ProbeId) -> bool,
        mut vacate: impl FnMut(&Frame) -> Fate,
    ) -> Removed {
        // A task that died inside a call leaves its entry, and its stack to another task: what is
        // in the slot then is the other's.
        let mut newest_at = FxHashMap::default();
        self.live(|call| {
            let newest = newest_at.entry(call.slot).or_insert(call.host_ns);
            *newest = call.host_ns.max(*newest);
        });
        let mut removed = Removed::default();
        for mut calls in self.tasks() {
            calls.remove(&mut leaves, &mut vacate, &newest_at, &mut removed);
        }
        removed
    }
}
