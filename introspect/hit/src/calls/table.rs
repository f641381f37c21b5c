//! The table of all calls in flight.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;
use rustc_hash::FxHashMap;

use super::cell::{BUSY, Cell, IDLE};
use super::frame::{Fate, Frame, LiveCall, Removed};
use super::pool::{Link, MaxActive, Pool, PoolError, Pools};
use super::task::TaskCalls;
use crate::atomics::{AtomicU64, Ordering, WINDOW};

/// Number of cells that suffices for the tasks of any ordinary guest. They take 0.5 MiB.
pub const CELLS: usize = 1 << 15;

/// The calls in flight of a machine.
#[derive(Debug)]
pub struct Calls {
    cells: Box<[Cell]>,
    pools: Pools,
    vcpus: u32,
}

impl Calls {
    /// Creates a table for a machine of `vcpus` vCPUs, with at least `cells` cells ([`CELLS`] for a guest). All
    /// its memory is allocated here.
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

    /// Returns a pool of instances for `probe`, each with space for `data_size` bytes of private data.
    /// Allocates, and waits for other threads that do: not for the hit path.
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

    /// Opens the calls of `task`, the guest's current-task pointer, for the caller alone until the result is
    /// dropped. Returns `None` if all cells that `task` may be in are taken, or if the calls are open already,
    /// because the guest claims that the task also runs on another vCPU. The caller then counts a miss, or an
    /// unknown return.
    ///
    /// The result must not be held while the vCPU is parked: code that checks all calls would not see these calls.
    ///
    /// Hot path: one atomic exchange. Usually reads one cell for a task that has one, otherwise a window of cells.
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

    /// Returns the return address of the newest call of `task` whose slot is `slot`. Must be called on the vCPU
    /// that runs the task; the task's calls may be open there. Calls that have ended are not found.
    ///
    /// Hot path of stack traces: reads at most `MOST_NESTED` calls.
    #[must_use]
    pub fn return_address(&self, task: Gva, slot: Gva) -> Option<Gva> {
        /// More calls than a stack of the kernel has room for.
        const MOST_NESTED: usize = 1024;
        let key = task.0 & !(BUSY | IDLE);
        let of_task = |cell: &&Cell| cell.state.load(Ordering::Relaxed) & !BUSY == key;
        let cell = self.window(key).find(of_task)?;
        let mut link = Link(cell.newest.load(Ordering::Relaxed));
        for _ in 0..MOST_NESTED {
            let (_, record) = self.pools.record(link)?;
            if record.slot() == slot {
                return Some(record.ret());
            }
            link = Link(record.next());
        }
        None
    }

    /// Makes `cell` busy for `key`. Returns `None` if `state` is busy, or if the cell's state is no longer `state`.
    fn hold<'a>(&'a self, cell: &'a Cell, state: u64, key: u64) -> Option<TaskCalls<'a>> {
        if state & BUSY != 0 {
            return None;
        }
        cell.state
            .compare_exchange(state, key | BUSY, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some(TaskCalls::new(&self.pools, cell, key))
    }

    /// Iterates over the cells that `key` may be in, the likeliest first.
    fn window(&self, key: u64) -> impl Iterator<Item = &Cell> {
        // Fibonacci hashing (Knuth, vol. 3, 6.4): the high half of the product is well mixed.
        let hash = (key >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let home = usize::try_from(hash).unwrap_or(0);
        let mask = self.cells.len() - 1;
        (0..WINDOW).map(move |i| &self.cells[(home + i) & mask])
    }

    /// Iterates over the calls of every task, each opened in turn. Leaves out tasks whose calls are open elsewhere.
    fn tasks(&self) -> impl Iterator<Item = TaskCalls<'_>> {
        self.cells.iter().filter_map(|cell| {
            let state = cell.state.load(Ordering::Relaxed);
            if state == 0 || state & IDLE != 0 {
                return None;
            }
            self.hold(cell, state, state)
        })
    }

    /// Calls `each` for every entry, task by task, the newest of a task first. Call only while the vCPUs are
    /// stopped: entries that are open elsewhere are left out, and the calls of a task cannot be opened while its
    /// entries are passed to `each`.
    pub fn live(&self, mut each: impl FnMut(&LiveCall)) {
        for calls in self.tasks() {
            calls.live(&mut each);
        }
    }

    /// Removes the entries of the probes for which `leaves` is true, and the entries that earlier removals kept. If
    /// a frame has no other entry, `restore` decides whether its entries are removed: it writes the real return
    /// address back if the frame's slot still holds the trampoline's address. If another task has a newer frame at
    /// the same slot, `restore` is not called, and the entries of the older frame are removed. Call only while the
    /// vCPUs are stopped, like [`Calls::live`]; allocates.
    pub fn remove(
        &self,
        mut leaves: impl FnMut(ProbeId) -> bool,
        mut restore: impl FnMut(&Frame) -> Fate,
    ) -> Removed {
        // A task that died inside a call leaves its entry in the table and its stack to another task. The slot then
        // belongs to the other task.
        let mut newest_at = FxHashMap::default();
        self.live(|call| {
            let newest = newest_at.entry(call.slot).or_insert(call.host_ns);
            *newest = call.host_ns.max(*newest);
        });
        let mut removed = Removed::default();
        for mut calls in self.tasks() {
            calls.remove(&mut leaves, &mut restore, &newest_at, &mut removed);
        }
        removed
    }
}
