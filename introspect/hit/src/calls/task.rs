//! The calls of one task, opened by the vCPU that runs it.

use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::ProbeId;
use rustc_hash::FxHashMap;

use super::cell::{Cell, IDLE};
use super::frame::{Fate, Frame, LiveCall, Removed};
use super::pool::{Link, Pool, PoolCell, Pools};
use super::record::{DATA_MAX, Entry, Record};
use crate::atomics::Ordering;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The function returned.
    Returned,
    /// The frame was abandoned: the function will not return.
    Orphaned,
}

/// What a function found in place of its return address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnAddress {
    /// The address of its caller.
    Caller(Gva),
    /// The trampoline: the function was entered by a tail call, or has another probe.
    Trampoline,
    /// Code that follows a call without exits, and that leads to the trampoline later.
    OnTheWay,
}

/// A call that has just ended.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    record: Record<'a>,
    probe: ProbeId,
}

impl Call<'_> {
    /// Returns the probe that saw the entry.
    #[must_use]
    pub fn probe(&self) -> ProbeId {
        self.probe
    }

    /// Returns the [`Entry::id`] of the call.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.record.id()
    }

    /// Returns the address of the return address on the stack.
    #[must_use]
    pub fn slot(&self) -> Gva {
        self.record.slot()
    }

    /// Returns the real return address.
    #[must_use]
    pub fn ret(&self) -> Gva {
        self.record.ret()
    }

    /// Returns the host time of the entry, in nanoseconds of `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn host_ns(&self) -> u64 {
        self.record.host_ns()
    }

    /// Returns the guest's time-stamp counter at the entry.
    #[must_use]
    pub fn guest_tsc(&self) -> u64 {
        self.record.guest_tsc()
    }

    /// Returns the registers at the entry.
    #[must_use]
    pub fn regs(&self) -> Regs {
        self.record.regs()
    }

    /// Copies the private data of the call to `into`.
    pub fn data<'b>(&self, into: &'b mut [u8; DATA_MAX]) -> &'b [u8] {
        self.record.data(into)
    }
}

/// The calls of one task, newest first; see [`Calls::open`](super::Calls::open).
#[derive(Debug)]
pub struct TaskCalls<'a> {
    pools: &'a Pools,
    cell: &'a Cell,
    key: u64,
    newest: Link,
}

impl Drop for TaskCalls<'_> {
    fn drop(&mut self) {
        self.cell.newest.store(self.newest.0, Ordering::Relaxed);
        let state = match self.newest {
            Link::END => self.key | IDLE,
            _ => self.key,
        };
        self.cell.state.store(state, Ordering::Release);
    }
}

/// Returns whether `a` and `b` lie on one stack of the kernel. Task and interrupt stacks are 16 KiB and aligned
/// to that (`THREAD_SIZE`, `IRQ_STACK_SIZE` in arch/x86/include/asm/page_64_types.h), the exception stacks in
/// the CPU entry area at least 4 KiB and apart by as much (arch/x86/include/asm/cpu_entry_area.h; the area is at
/// 0xfffffe0000000000 to 0xfffffe7fffffffff, Documentation/arch/x86/x86_64/mm.rst).
fn same_stack(a: Gva, b: Gva) -> bool {
    let bits = if a.0 >> 39 == 0xffff_fe00_0000_0000 >> 39 {
        12
    } else {
        14
    };
    a.0 >> bits == b.0 >> bits
}

impl<'a> TaskCalls<'a> {
    pub(super) fn new(pools: &'a Pools, cell: &'a Cell, key: u64) -> Self {
        Self {
            pools,
            cell,
            key,
            newest: Link(cell.newest.load(Ordering::Relaxed)),
        }
    }

    /// Begins the entry of a function whose return address is at `slot`, where `found` was read. Returns the real
    /// return address, which [`TaskCalls::push`] needs; `None` if the call must not be pushed. There are two such
    /// cases. If `slot` holds the trampoline's address and no call accounts for it, the real return address is not
    /// known. If the return leads through other code to the trampoline, two returns through the trampoline at one
    /// slot could not be distinguished.
    ///
    /// Removes the calls of frames that this entry proves abandoned, and passes them to `orphan`, newest first.
    /// Such frames are on the same stack, below the entered function's frame or at the same slot. However, if the
    /// function took over the frame at its slot (the trampoline's address is still there, as after a tail call or
    /// the push for another probe), that frame is alive, and all calls newer than it are abandoned, on any stack.
    #[inline]
    pub fn enter(
        &mut self,
        slot: Gva,
        found: ReturnAddress,
        mut orphan: impl FnMut(&Call<'_>),
    ) -> Option<Gva> {
        if found == ReturnAddress::Trampoline
            && let Some(ret) = self.unwind_to(slot, &mut orphan)
        {
            return Some(ret);
        }
        // The entry proves nothing about frames on other stacks: those of an interrupt may be newer and abandoned,
        // those of a task older and alive.
        let mut newer = None;
        let mut link = self.newest;
        while let Some((pool, record)) = self.pools.record(link) {
            let next = Link(record.next());
            if !same_stack(record.slot(), slot) {
                newer = Some(record);
            } else if record.slot() == slot && found == ReturnAddress::OnTheWay {
                break;
            } else if record.slot() <= slot {
                report(pool, record, &mut orphan);
                self.take_out(link, pool, record, newer);
            } else {
                break;
            }
            link = next;
        }
        match found {
            ReturnAddress::Caller(ret) => Some(ret),
            ReturnAddress::Trampoline | ReturnAddress::OnTheWay => None,
        }
    }

    /// Stores a call in an instance of `pool`. Returns `false` if none is free, which is a miss. After one or
    /// more pushes for a frame, the caller writes the trampoline's address to its slot.
    ///
    /// Hot path: one atomic exchange, and no allocation unless the pool is
    /// [`MaxActive::Auto`](super::MaxActive::Auto) and grows.
    #[must_use]
    pub fn push(&mut self, pool: &Pool, entry: &Entry<'_>) -> bool {
        let Some((index, record)) = pool.cell.take() else {
            return false;
        };
        record.write(entry);
        record.set_next(self.newest.0);
        self.newest = Link::new(pool.index, index);
        true
    }

    /// Removes the newest `pushes` calls and reports none of them: for a caller that cannot write the slot.
    pub fn undo_pushes(&mut self, pushes: u32) {
        for _ in 0..pushes {
            self.pop(&mut |_| ());
        }
    }

    /// Handles the return through the trampoline of the function whose return address was at `slot`. Removes the
    /// calls of its frame and passes them to `each`, newest first. Before that, removes and passes the calls that
    /// are newer than this frame: they are orphans. Returns the address at which the guest continues. Returns
    /// `None` if there is no call at `slot`, and then changes nothing.
    pub fn returned(&mut self, slot: Gva, mut each: impl FnMut(Ended, &Call<'_>)) -> Option<Gva> {
        let at_slot = |first: &(&PoolCell, Record<'_>)| first.1.slot() == slot;
        let mut first = self.first();
        if !first.as_ref().is_some_and(at_slot) {
            self.unwind_to(slot, &mut |call| each(Ended::Orphaned, call))?;
            first = self.first();
        }
        let ret = first.map(|(_, record)| record.ret())?;
        while let Some((pool, record)) = first.filter(at_slot) {
            report(pool, record, &mut |call| each(Ended::Returned, call));
            self.take_out(self.newest, pool, record, None);
            first = self.first();
        }
        Some(ret)
    }

    /// Removes all calls of the task, which is dead, and passes them to `orphan`, newest first. Calls that a dying
    /// task makes after this stay in flight until this is called again, until
    /// [`Calls::remove`](super::Calls::remove), or until another task gets the task's address.
    pub fn remove_all(&mut self, mut orphan: impl FnMut(&Call<'_>)) {
        while self.pop(&mut orphan) {}
    }

    /// Removes the calls that are newer than the newest call at `slot`, and returns the real return address of that
    /// call. Returns `None` if there is no call at `slot`, and then changes nothing.
    fn unwind_to(&mut self, slot: Gva, orphan: &mut impl FnMut(&Call<'_>)) -> Option<Gva> {
        let (link, record) = self
            .entries()
            .find(|(_, _, record)| record.slot() == slot)
            .map(|(link, _, record)| (link, record))?;
        while self.newest != link && self.pop(orphan) {}
        Some(record.ret())
    }

    /// Iterates over the entries, newest first.
    fn entries(&self) -> impl Iterator<Item = (Link, &'a PoolCell, Record<'a>)> + use<'a> {
        let pools = self.pools;
        let mut link = self.newest;
        std::iter::from_fn(move || {
            let at = link;
            let (pool, record) = pools.record(at)?;
            link = Link(record.next());
            Some((at, pool, record))
        })
    }

    fn first(&self) -> Option<(&'a PoolCell, Record<'a>)> {
        self.pools.record(self.newest)
    }

    /// Removes the newest entry, and passes it to `each` unless its probe has left. Returns `false` if there is no
    /// entry.
    fn pop(&mut self, each: &mut impl FnMut(&Call<'_>)) -> bool {
        let Some((pool, record)) = self.first() else {
            return false;
        };
        report(pool, record, each);
        self.take_out(self.newest, pool, record, None);
        true
    }

    /// Removes the entry at `link`, which follows `newer` or is the newest, and releases its record to its
    /// pool.
    fn take_out(
        &mut self,
        link: Link,
        pool: &PoolCell,
        record: Record<'_>,
        newer: Option<Record<'_>>,
    ) {
        match newer {
            Some(newer) => newer.set_next(record.next()),
            None => {
                self.newest = Link(record.next());
                // `Calls::return_address` reads this while the calls are open.
                self.cell.newest.store(self.newest.0, Ordering::Relaxed);
            }
        }
        if let Some(index) = link.record() {
            pool.release(index, record);
        }
    }

    pub(super) fn live(&self, each: &mut impl FnMut(&LiveCall)) {
        for (_, pool, record) in self.entries() {
            each(&LiveCall {
                task: Gva(self.key),
                slot: record.slot(),
                ret: record.ret(),
                probe: interested(pool, record),
                id: record.id(),
                host_ns: record.host_ns(),
            });
        }
    }

    /// Does the work of [`Calls::remove`](super::Calls::remove) for this task.
    pub(super) fn remove(
        &mut self,
        leaves: &mut impl FnMut(ProbeId) -> bool,
        restore: &mut impl FnMut(&Frame) -> Fate,
        newest_at: &FxHashMap<Gva, u64>,
        removed: &mut Removed,
    ) {
        // The last entry that stays; `None` while there is none.
        let mut kept: Option<Record<'a>> = None;
        let mut link = self.newest;
        while let Some((_, first)) = self.pools.record(link) {
            let slot = first.slot();
            // Whether any of the frame's probes stays.
            let mut wanted = false;
            let mut after = link;
            while let Some((pool, record)) = self.pools.record(after)
                && record.slot() == slot
            {
                match interested(pool, record) {
                    Some(probe) if !leaves(probe) => wanted = true,
                    _ => record.mute(),
                }
                after = Link(record.next());
            }
            let superseded = newest_at.get(&slot) > Some(&first.host_ns());
            let keep_muted = !wanted
                && !superseded
                && restore(&Frame {
                    task: Gva(self.key),
                    slot,
                    ret: first.ret(),
                }) == Fate::Keep;
            while link != after
                && let Some((pool, record)) = self.pools.record(link)
            {
                let next = Link(record.next());
                if record.muted() && !keep_muted {
                    self.take_out(link, pool, record, kept);
                    removed.forgotten += 1;
                } else {
                    removed.kept += u32::from(record.muted());
                    kept = Some(record);
                }
                link = next;
            }
        }
    }
}

/// Passes the call to `each`, unless its probe has left.
fn report(pool: &PoolCell, record: Record<'_>, each: &mut impl FnMut(&Call<'_>)) {
    if let Some(probe) = interested(pool, record) {
        each(&Call { record, probe });
    }
}

/// Returns the probe to which the end of a call is reported, if there is one.
fn interested(pool: &PoolCell, record: Record<'_>) -> Option<ProbeId> {
    if record.muted() { None } else { pool.probe() }
}
