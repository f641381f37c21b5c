//! Takes records out of the ring.
//!
//! Records may be finished in another order than they were begun: an interrupt may come in between, the guest may
//! put the recording task to sleep, or the host may preempt the vCPU. So the reader waits a moment for a record
//! that is not finished, because the records after it are younger. Then it steps over the record, and checks at
//! each later pass whether it is finished.
//!
//! Invariants: only the [`Reader`] moves `limit`, and clears the marks of records that it has taken or given up,
//! and marks that are nonsense; every position below `next` was taken, is held, or was never given to a writer; the
//! cells of a record that is not finished belong to its writer alone ([`HeldCells`]). The work of one pass is
//! bounded by the number of cells. The work of all passes on cells without a record is bounded by time, because the
//! reader rests after a pass with many such cells. So a guest that rings the doorbell again and again, with
//! nonsense in the ring, makes the host read no more than a few cells each time.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use hvprobe_arch::Gpa;
use hvprobe_arch::detour::{CELL, Header, MAX_RECORD_CELLS, Malformed};
use hvprobe_arch::mem::{OutOfRange, PhysMemory};

use super::held_cells::HeldCells;
use super::source::{APART, Around, Stamp, When};
use super::sources::{Map, RecordSources};
use crate::event::{Drained, Event, EventKind};
use crate::region::RingPlace;

/// How long the reader waits for a record before it steps over it.
const HOLD: Duration = Duration::from_millis(20);
/// Maximum number of cells without a record that a pass may read or clear without a rest after it. Detours at work
/// leave fewer.
const IDLE: u64 = 256;
/// Rest per cell without a record, after a pass over more than [`IDLE`] of them: many times as long as reading a
/// cell takes.
const REST: Duration = Duration::from_nanos(400);
/// Number of tries to move the head, which detours move too.
const TRIES: usize = 8;
/// CPU numbers in records must be less than this: no guest has more CPUs.
const CPUS_MAX: usize = 1 << 12;
const RECORD_MAX: usize = MAX_RECORD_CELLS as usize * CELL;

/// Parameters of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Maximum number of records to take.
    most: usize,
    /// The current time; `None` if the pass does not wait for unfinished records.
    now: Option<Instant>,
}

impl Look {
    /// Creates a pass that takes up to `most` records in their order, and waits a limited time for an unfinished
    /// one.
    pub(super) fn patient(most: usize, now: Instant) -> Self {
        let now = Some(now);
        Self { most, now }
    }

    /// Creates a pass that takes up to `most` finished records, and steps over unfinished ones without waiting.
    pub(super) fn at_all(most: usize) -> Self {
        Self { most, now: None }
    }
}

/// Context of one pass through the ring.
struct PassContext<'a> {
    mem: &'a dyn PhysMemory,
    sources: &'a Map,
    around: Around<'a>,
}

/// Waiting for a record that was not finished when its turn came.
#[derive(Clone, Copy, Debug)]
struct Wait {
    since: Instant,
    /// The head at that time. Records before it have been waited for since then.
    head: u64,
}

/// Empties the ring of one machine.
#[derive(Debug)]
pub struct Reader {
    place: RingPlace,
    pub(super) sources: RecordSources,
    /// The position whose turn is next.
    pub(super) next: u64,
    /// Positions that were stepped over.
    held: HeldCells,
    wait: Option<Wait>,
    /// Whether the last pass ended in waiting for a record.
    is_waiting: bool,
    /// Whether the last pass left cells unread, from `next` on.
    is_behind: bool,
    /// Limit and bell that were published last.
    published: (u64, u64),
    /// Whether the guest has written something that no detour writes.
    is_broken: bool,
    /// Number of records that were nonsense, or belonged to no source.
    malformed: u64,
    /// Number of cells in this pass that had no record, or a record that was lost.
    idle: u64,
    /// Time until which the reader rests after a pass with many such cells.
    rests: Option<Instant>,
    /// Guest and host time of the newest event of each CPU.
    newest: Vec<(u64, u64)>,
    /// Buffer for a copy of a record.
    buffer: Box<[u8; RECORD_MAX]>,
}

impl Reader {
    /// Creates a reader of the ring at `place`, which nothing else may read.
    #[must_use]
    pub fn new(place: RingPlace, sources: RecordSources) -> Self {
        Self {
            place,
            sources,
            next: 0,
            held: HeldCells::new(place.capacity),
            wait: None,
            is_waiting: false,
            is_behind: false,
            published: place.initial(),
            is_broken: false,
            malformed: 0,
            idle: 0,
            rests: None,
            newest: Vec::new(),
            buffer: Box::new([0; RECORD_MAX]),
        }
    }

    /// Returns where the ring is.
    #[must_use]
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// Returns the number of cells, which is also the maximum number of records.
    pub(super) fn capacity(&self) -> usize {
        self.place.capacity as usize
    }

    /// Returns whether there is any source, so that detours may record.
    pub(super) fn records(&self) -> bool {
        !self.sources.now().by_number.is_empty()
    }

    /// Returns whether there may be records that are not finished or not read.
    pub(super) fn awaits(&self) -> bool {
        !self.held.is_clear() || self.is_behind
    }

    /// Returns the head; `None` if no detour can have moved it there.
    fn head(&self, mem: &dyn PhysMemory) -> Result<Option<u64>, OutOfRange> {
        let head = mem.read_u64(self.place.head)?;
        let may_be = self.published.0.wrapping_sub(self.next);
        Ok((head.wrapping_sub(self.next) <= may_be).then_some(head))
    }

    /// Appends the events of finished records to `into`. Records that were nonsense, or of no source, count as
    /// lost. Reports [`more`](Drained::more) if the limit of `look` ended the pass.
    pub(super) fn read(
        &mut self,
        mem: &dyn PhysMemory,
        when: impl Fn(Stamp) -> When,
        look: Look,
        into: &mut Vec<Event>,
    ) -> Drained {
        if let Some(now) = look.now
            && self.rests.is_some_and(|until| now < until)
        {
            return Drained {
                keeps_back: true,
                ..Drained::default()
            };
        }
        let before = self.malformed;
        self.is_waiting = false;
        self.idle = 0;
        let is_empty = || Some(self.next) == mem.read_u64(self.place.head).ok();
        if self.held.is_clear() && is_empty() {
            self.wait = None;
            self.is_behind = false;
            return Drained::default();
        }
        let sources = self.sources.now();
        let return_address = |call: &_| sources.return_address(call, mem);
        let context = PassContext {
            mem,
            sources: &sources,
            around: Around {
                when: &when,
                return_address: &return_address,
                mem,
                follower: sources.follower.as_deref(),
            },
        };
        let mut left = look.most;
        // Where there is no such memory, there are no records.
        let _ = self.pass(&context, look.now, into, &mut left);
        self.rests = look.now.filter(|_| self.idle > IDLE).map(|now| {
            // No ring has more cells than that.
            let cells = u32::try_from(self.idle).unwrap_or(u32::MAX);
            now + REST.saturating_mul(cells)
        });
        Drained {
            lost: self.malformed.saturating_sub(before),
            more: left == 0,
            keeps_back: self.is_waiting,
        }
    }

    fn pass(
        &mut self,
        context: &PassContext<'_>,
        now: Option<Instant>,
        into: &mut Vec<Event>,
        left: &mut usize,
    ) -> Result<(), OutOfRange> {
        let held = self.held.take();
        for (piece, rest) in held.iter().zip(1..) {
            if let Err(error) = self.late(piece.clone(), context, into, left) {
                held.get(rest..).into_iter().flatten().for_each(|piece| {
                    self.held.hold(piece.clone());
                });
                return Err(error);
            }
        }
        let head = self.head(context.mem)?;
        self.is_broken |= head.is_none();
        if let Some(head) = head {
            let is_all = self.in_turn(head, context, now, into, left)?;
            // Detours never have this many cells unfinished at once: the guest has moved the head itself.
            let unfinished = self.held.cells() + head.wrapping_sub(self.next);
            self.is_broken |= is_all && unfinished > u64::from(self.place.capacity / 4) * 3;
            self.is_behind = self.next != head;
        }
        if self.is_broken && *left > 0 {
            self.give_up(context.mem);
        }
        self.make_room(context.mem)
    }

    /// Takes the finished records of a piece that was stepped over, and holds the rest.
    fn late(
        &mut self,
        piece: Range<u64>,
        context: &PassContext<'_>,
        into: &mut Vec<Event>,
        left: &mut usize,
    ) -> Result<(), OutOfRange> {
        let (mut from, mut at) = (piece.start, piece.start);
        while at < piece.end && *left > 0 {
            match self.finished(context.mem, at, piece.end) {
                Ok(Some(header)) => {
                    self.held.hold(from..at);
                    self.take(at, header, context, into);
                    *left -= 1;
                    at += u64::from(header.cells);
                    from = at;
                }
                Ok(None) => at += 1,
                Err(error) => {
                    self.held.hold(from..piece.end);
                    return Err(error);
                }
            }
        }
        self.held.hold(from..piece.end);
        Ok(())
    }

    /// Takes the records in turn, up to `head`. Returns whether everything up to there was checked.
    fn in_turn(
        &mut self,
        head: u64,
        context: &PassContext<'_>,
        now: Option<Instant>,
        into: &mut Vec<Event>,
        left: &mut usize,
    ) -> Result<bool, OutOfRange> {
        while *left > 0 && self.next != head {
            if let Some(header) = self.finished(context.mem, self.next, head)? {
                let at = self.next;
                self.next += u64::from(header.cells);
                self.take(at, header, context, into);
                *left -= 1;
                continue;
            }
            if !self.is_waited_for(head, now) {
                self.is_waiting = true;
                return Ok(false);
            }
            let mut behind = self.next + 1;
            while behind < head && self.finished(context.mem, behind, head)?.is_none() {
                behind += 1;
            }
            if behind >= head {
                return Ok(true);
            }
            self.held.hold(self.next..behind);
            self.next = behind;
        }
        if self.next == head {
            self.wait = None;
        }
        Ok(*left > 0)
    }

    /// Returns whether the record whose turn it is need not be waited for any longer. The record is not finished.
    fn is_waited_for(&mut self, head: u64, now: Option<Instant>) -> bool {
        let unread = head.wrapping_sub(self.next);
        let Some(now) = now else { return true };
        if self.is_broken || unread > self.place.watermark.into() {
            return true;
        }
        match self.wait {
            Some(wait) if self.next < wait.head => {
                now.saturating_duration_since(wait.since) >= HOLD
            }
            _ => {
                self.wait = Some(Wait { since: now, head });
                false
            }
        }
    }

    fn cell(&self, position: u64) -> Gpa {
        let cell = position & u64::from(self.place.capacity - 1);
        self.place.cells.wrapping_add(cell * CELL as u64)
    }

    /// Returns the header of the record at `position`, if it is finished and ends at `end` at the latest.
    fn finished(
        &mut self,
        mem: &dyn PhysMemory,
        position: u64,
        end: u64,
    ) -> Result<Option<Header>, OutOfRange> {
        let at = self.cell(position);
        match Header::of_mark(mem.read_u64(at)?) {
            Err(Malformed::Unfinished) => {
                self.idle += 1;
                Ok(None)
            }
            Ok(header) if header.is_at(position) && u64::from(header.cells) <= end - position => {
                fence(Ordering::Acquire);
                Ok(Some(header))
            }
            Ok(_) | Err(_) => {
                mem.write_u64(at, 0)?;
                self.malformed = self.malformed.saturating_add(1);
                self.idle += 1;
                self.is_broken = true;
                Ok(None)
            }
        }
    }

    /// Takes the record at `position`, which is finished.
    fn take(
        &mut self,
        position: u64,
        header: Header,
        context: &PassContext<'_>,
        into: &mut Vec<Event>,
    ) {
        let at = self.cell(position);
        // `finished` has checked the number of cells.
        let record = &mut self.buffer[..usize::from(header.cells) * CELL];
        let read = context.mem.read(at, record);
        let cleared = context.mem.write_u64(at, 0);
        let source = context.sources.by_number.get(&header.source);
        match source.map(|source| source.event(record, position, &context.around)) {
            Some(Ok(event)) if read.is_ok() && cleared.is_ok() => {
                into.extend(event.map(|event| self.in_order(event)));
            }
            _ => {
                self.malformed = self.malformed.saturating_add(1);
                self.idle += u64::from(header.cells);
            }
        }
    }

    /// Keeps the host times of events of one CPU in the order of the CPU's own counter. This is needed because host
    /// times are computed anew for each batch.
    fn in_order(&mut self, mut event: Event) -> Event {
        let cpu = usize::try_from(event.vcpu).unwrap_or(usize::MAX);
        if cpu >= CPUS_MAX {
            return event;
        }
        if self.newest.len() <= cpu {
            self.newest.resize(cpu + 1, (0, 0));
        }
        if let Some((tsc, ns)) = self.newest.get_mut(cpu)
            && event.guest_tsc >= *tsc
        {
            match &mut event.host_ns {
                0 => event.seq = event.seq.max(*ns),
                known => {
                    // A return whose time was moved does not show how long a short call took.
                    if *known < *ns
                        && let EventKind::Return(call) = &mut event.kind
                        && ns.saturating_sub(call.entry_ns) <= APART
                    {
                        call.entry_ns = 0;
                    }
                    *known = (*known).max(*ns);
                    (*tsc, *ns) = (event.guest_tsc, *known);
                }
            }
        }
        event
    }

    /// Sets the limit up to which detours may reserve. If it is near, first moves the head to where there is more
    /// room.
    fn make_room(&mut self, mem: &dyn PhysMemory) -> Result<(), OutOfRange> {
        for _ in 0..TRIES {
            let Some(head) = self.head(mem)? else {
                // The next pass handles that.
                return Ok(());
            };
            let unread = self.next..head;
            let [here, longest] = self.held.runs(&unread);
            let is_near = here.len < u64::from(self.place.capacity / 2);
            let is_better = longest.from != here.from && longest.len / 2 >= here.len;
            if !(is_near && is_better) {
                return self.set_limit(mem, head, here.limit());
            }
            // A detour that reserves in between finds the ring full, because the limit is written after the head.
            // In the other order, the detour could get held cells.
            fence(Ordering::Release);
            if mem.exchange_u64(self.place.head, head, longest.from)? {
                self.held.hold(unread);
                self.next = longest.from;
                self.wait = None;
                self.is_behind = false;
                return self.set_limit(mem, longest.from, longest.limit());
            }
        }
        Ok(())
    }

    /// Makes detours stop at `limit`. The head is at `head` or beyond.
    fn set_limit(&mut self, mem: &dyn PhysMemory, head: u64, limit: u64) -> Result<(), OutOfRange> {
        let usual = self.next.wrapping_add(self.place.watermark.into());
        let bell = match self.held.is_clear() {
            true => usual,
            false => usual.min(head.midpoint(limit)),
        };
        if (limit, bell) != self.published {
            // Marks are cleared before detours may reserve the cells again.
            fence(Ordering::Release);
            self.published = (limit, bell);
            self.place.publish(mem, limit, bell)?;
        }
        Ok(())
    }

    /// Restarts with an empty ring, beyond all cells that were ever given to a writer. Called if unfinished records
    /// will not be finished, or if what the guest wrote makes no sense. Returns the number of pieces of the ring
    /// that are given up; each piece counts as one record.
    pub(super) fn give_up(&mut self, mem: &dyn PhysMemory) -> u64 {
        let unread = mem.read_u64(self.place.head) != Ok(self.next);
        let lost = self.held.pieces() + u64::from(unread);
        self.is_broken = false;
        if lost == 0 {
            return 0;
        }
        self.malformed = self.malformed.saturating_add(lost);
        for cell in 0..u64::from(self.place.capacity) {
            // Where there is no such memory, there are no records.
            let _ = mem.write_u64(self.cell(cell), 0);
        }
        self.idle += u64::from(self.place.capacity);
        self.held = HeldCells::new(self.place.capacity);
        self.wait = None;
        self.is_behind = false;
        self.next = self.published.0;
        let _ = mem.write_u64(self.place.head, self.next);
        lost
    }

    /// Adds to the probes' counters the hits that detours counted without making a record. Returns the number of
    /// hits to report as lost.
    pub(super) fn settle(&self, mem: &dyn PhysMemory) -> u64 {
        let sources = self.sources.now();
        let lost = sources.by_number.values().map(|source| source.settle(mem));
        lost.fold(0, u64::saturating_add)
    }
}
