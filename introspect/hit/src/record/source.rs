//! Sources of records, and the events that are made of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hvprobe_arch::detour::{
    BY_HOST, BuildError, Call, Capture, EntryCapture, Layout, Malformed, Part,
};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_linux::task::Task;
use hvprobe_spec::{Actions, Item, ProbeId};

use super::stack::Follower;
use crate::counters::Counters;
use crate::event::{self, Captured, Event, EventKind};
use crate::filter::{Seen, no_more};
use crate::followed::Followed;
use crate::region::CounterPlace;

/// Maximum plausible growth of one of the guest's counters between two reads: more than processors can count in
/// minutes. A counter that has grown by more was not incremented but overwritten.
pub(super) const PLAUSIBLE: u64 = 1 << 40;

/// Maximum difference, in nanoseconds, between two times of one call if one is from a vCPU's counter and the other
/// from the host's clock. Where counters stall, the two clocks differ if the host made the vCPU's thread wait
/// between the times.
pub(super) const APART: u64 = 200_000;

/// Returns the times of a return and of its call's entry; 0 for one that is not known. The time of a return that
/// was [placed](When::Placed) may be wrong by [`APART`]. If the call was no longer than that, the time of its entry
/// is 0, because the duration would be made up.
pub(super) fn call_times(returned: When, entry: u64) -> (u64, u64) {
    let ns = returned.ns_or_zero();
    match entry.saturating_sub(ns) {
        0 if matches!(returned, When::Placed(_)) && ns - entry <= APART => (ns, 0),
        0 => (ns, entry),
        early if early <= APART && ns > 0 => (entry, 0),
        _ => (0, entry),
    }
}

/// The source of a probe's records, and their meaning.
#[derive(Debug)]
pub struct RecordSource {
    /// The probe.
    pub probe: ProbeId,
    what: What,
    pub(super) layout: Layout,
    /// What happens at the probe's hits.
    pub actions: Arc<Actions>,
    counters: Arc<Counters>,
    /// Addresses of the counters that its detour and its stubs increment.
    pub words: CounterPlace,
    lost: Tally,
    vetoed: Tally,
    missed: Tally,
    enabled: AtomicBool,
    /// Whether the probe is disabled and everything that it recorded before has been read.
    silent: AtomicBool,
    /// Number of hits whose records were finished while `silent` was set. They made no event, and are still to be
    /// reported as lost.
    late: AtomicU64,
}

/// What the records of a source are about.
#[derive(Debug)]
pub struct What {
    /// The probepoint.
    pub at: Gva,
    /// Number that identifies the source in its records.
    pub number: u32,
    /// Data of a hit that a record contains.
    pub capture: Capture,
    /// For a return probe: the data that is kept of a call's entry, and the calls.
    pub followed: Option<(EntryCapture, Arc<Followed>)>,
}

/// Addresses of the guest's counters of hits and calls that leave no record.
#[derive(Clone, Copy, Debug)]
pub struct Tallies {
    /// Counter of hits that found no room in the ring.
    pub lost: Gpa,
    /// Counter of hits that a condition rejected.
    pub vetoed: Gpa,
    /// Counter of calls for which there was no free instance.
    pub missed: Gpa,
}

/// A counter of the guest, and the part of its value that has been accounted for.
#[derive(Debug)]
struct Tally {
    at: Gpa,
    seen: AtomicU64,
}

impl Tally {
    /// Returns by how much the counter has grown since the last call; 0 if that is not plausible.
    fn take(&self, mem: &dyn PhysMemory) -> u64 {
        let Ok(now) = mem.read_u64(self.at) else {
            return 0;
        };
        let added = now.wrapping_sub(self.seen.swap(now, Ordering::Relaxed));
        if added <= PLAUSIBLE { added } else { 0 }
    }
}

impl RecordSource {
    /// Creates a source of the records that `what` describes.
    ///
    /// # Errors
    /// When records cannot hold what was asked for.
    pub fn new(
        probe: ProbeId,
        what: What,
        actions: Arc<Actions>,
        counters: Arc<Counters>,
        words: CounterPlace,
        tallies: Tallies,
    ) -> Result<Self, BuildError> {
        let tally = |at| Tally {
            at,
            seen: AtomicU64::new(0),
        };
        let layout = match &what.followed {
            None => Layout::new(&what.capture)?,
            Some((entry, _)) => Layout::of_return(&what.capture, entry)?,
        };
        Ok(Self {
            probe,
            what,
            layout,
            actions,
            counters,
            words,
            lost: tally(tallies.lost),
            vetoed: tally(tallies.vetoed),
            missed: tally(tallies.missed),
            enabled: AtomicBool::new(true),
            silent: AtomicBool::new(false),
            late: AtomicU64::new(0),
        })
    }

    /// Returns what a detour has to do for the probe.
    pub fn part(&self) -> Part<'_> {
        match &self.what.followed {
            None => Part::Record {
                source: self.what.number,
                capture: &self.what.capture,
                lost: self.words.lost(),
                waits: self.actions.wait_for_room,
            },
            Some((entry, calls)) => Part::Return {
                instances: &calls.instances,
                capture: entry,
                stubs: calls.stubs,
                missed: self.words.missed(),
            },
        }
    }

    /// Returns the number that identifies the source in its records.
    pub fn number(&self) -> u32 {
        self.what.number
    }

    /// Returns the calls of a return probe.
    pub fn followed(&self) -> Option<&Followed> {
        Some(&*self.what.followed.as_ref()?.1)
    }

    /// Enables or disables the probe. A disabled return probe only counts returning calls, as missed.
    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Relaxed);
        if enabled {
            self.silent.store(false, Ordering::Relaxed);
        }
    }

    /// Notes that all records have been read that the probe made before it was disabled; does nothing if it is
    /// enabled. A task that was preempted in the detour may still finish a record: that hit is counted, without an
    /// event.
    pub fn silence(&self) {
        let enabled = self.enabled.load(Ordering::Relaxed);
        self.silent.store(!enabled, Ordering::Relaxed);
    }

    /// Returns whether [`RecordSource::silence`] has something to do.
    pub fn is_to_be_silenced(&self) -> bool {
        !self.enabled.load(Ordering::Relaxed) && !self.silent.load(Ordering::Relaxed)
    }

    /// Releases the instance of `call`, given by its slot and its stub, if the call is in flight and `task` made
    /// it. Then also counts it as an orphan, because the task will not return from it. Returns whether the instance
    /// was released.
    pub(crate) fn call_dead(
        &self,
        call: (Gva, Gva),
        task: Gva,
        mem: &(impl PhysMemory + ?Sized),
    ) -> bool {
        let calls = self.followed();
        let is_dead = calls.is_some_and(|calls| calls.release_call(call, task, mem));
        if is_dead {
            self.counters.add_orphans(1);
        }
        is_dead
    }

    /// Releases the instances of all calls that `task` has made, and counts the calls as orphans. The task will not
    /// run again.
    pub fn task_dead(&self, task: Gva, mem: &(impl PhysMemory + ?Sized)) {
        if let Some(calls) = self.followed() {
            let orphans = calls.release_calls_of(task, mem);
            if orphans > 0 {
                self.counters.add_orphans(orphans);
            }
        }
    }

    /// Adds to the probe's counters the hits that detours counted without making a record. Returns the number of
    /// hits to report as lost. Without a record it is not known whether a filter would have accepted a hit, so
    /// these hits count as missed if there is a filter. So do those of a disabled return probe.
    pub(super) fn settle(&self, mem: &dyn PhysMemory) -> u64 {
        let mut lost = self.lost.take(mem);
        let is_disabled = self.followed().is_some() && !self.enabled.load(Ordering::Relaxed);
        if is_disabled || self.actions.filter.is_some() {
            self.counters.add_missed(lost);
        } else {
            self.counters.add_hits(lost);
        }
        if is_disabled {
            lost = 0;
        }
        self.counters.add_vetoed(self.vetoed.take(mem));
        self.counters.add_missed(self.missed.take(mem));
        lost.saturating_add(self.late.swap(0, Ordering::Relaxed))
    }

    /// Returns the event of the record at `position`; `None` if the record is only counted, or its filter
    /// rejects it.
    pub(super) fn event(
        &self,
        record: &[u8],
        position: u64,
        around: &Around<'_>,
    ) -> Result<Option<Event>, Malformed> {
        let bytes = record;
        let record = self.layout.decode(bytes)?;
        let vcpu = record.cpu.unwrap_or(0);
        let mut regs = record.regs;
        regs.rip = self.what.at.0;
        let (mut kind, mut stack) = (EventKind::Hit, &record.stack);
        if let Some(call) = &record.call {
            if !self.enabled.load(Ordering::Relaxed) {
                self.counters.miss(vcpu);
                return Ok(None);
            }
            regs.rip = (around.return_address)(call).0;
            let (entry_ns, entry_tsc) = match call.cpu {
                Some(BY_HOST) => (call.tsc, 0),
                cpu => {
                    let entered = Stamp {
                        cpu,
                        tsc: call.tsc,
                        position: None,
                    };
                    ((around.when)(entered).ns_or_zero(), call.tsc)
                }
            };
            kind = EventKind::Return(event::Call {
                id: call.id,
                entry_ns,
                entry_tsc,
                entry: Regs {
                    rip: self.what.at.0,
                    ..call.regs
                },
            });
            stack = &call.stack;
        }
        let task = record.task.map(|task| Task {
            pid: task.pid.cast_signed(),
            tgid: task.tgid.cast_signed(),
            comm: task.comm,
        });
        let captured = self.captured(bytes, &regs, stack.as_slice(), around)?;
        if let Some(filter) = &self.actions.filter {
            let seen = Seen {
                actions: &self.actions,
                regs: &regs,
                entry: match &kind {
                    EventKind::Return(call) => Some(&call.entry),
                    _ => None,
                },
                captured: &captured,
                task: task.as_ref(),
                vcpu,
            };
            let passes = seen.passes(filter, &no_more);
            if !self.counters.lets_pass(vcpu, passes) {
                return Ok(None);
            }
        }
        self.counters.hit(vcpu);
        if self.silent.load(Ordering::Relaxed) {
            self.late.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        let recorded = Stamp {
            cpu: record.cpu,
            tsc: record.tsc,
            position: Some(position),
        };
        let when = (around.when)(recorded);
        let (mut host_ns, mut after) = (when.ns_or_zero(), when.earliest());
        if let EventKind::Return(call) = &mut kind {
            after = after.max(call.entry_ns);
            (host_ns, call.entry_ns) = call_times(when, call.entry_ns);
        }
        Ok(Some(Event {
            kind,
            seq: after,
            probe: self.probe,
            vcpu,
            host_ns,
            guest_tsc: record.tsc,
            regs,
            shown: self.actions.registers,
            captured,
            task,
            cost_ns: 0,
        }))
    }
}

impl RecordSource {
    /// Returns the captured items in their order: words of the stack, and data that was read from memory.
    fn captured(
        &self,
        record: &[u8],
        regs: &Regs,
        stack: &[u64],
        around: &Around<'_>,
    ) -> Result<Captured, Malformed> {
        let mut captured = Captured::nothing();
        let mut words = stack.iter();
        let mut fetched = 0;
        let mut malformed = None;
        for item in &self.actions.capture {
            match item {
                Item::Stack(_) => {
                    captured.item(8, |bytes| {
                        let word = words.next();
                        bytes.copy_from_slice(&word.copied().unwrap_or_default().to_le_bytes());
                        word.is_some()
                    });
                    continue;
                }
                Item::StackTrace(most) => {
                    let copy = self.layout.stack_copy(record)?;
                    match copy.zip(around.follower) {
                        Some((copy, follower)) => {
                            follower.follow(&copy, regs, around.mem, *most, &mut captured);
                        }
                        None => captured.text(0, |_| None),
                    }
                    continue;
                }
                Item::Memory { .. } | Item::Fetched(_) => {}
            }
            let (index, layout) = (fetched, &self.layout);
            fetched += 1;
            match item.text() {
                Some(most) => captured.text(most.into(), |bytes| {
                    let text = layout.text(record, index, bytes);
                    text.map_err(|error| malformed = Some(error)).ok().flatten()
                }),
                None => captured.item(item.len(), |bytes| {
                    let found = layout.fetched(record, index, bytes);
                    found.map_err(|error| malformed = Some(error)) == Ok(true)
                }),
            }
        }
        match malformed {
            Some(error) => Err(error),
            None => Ok(captured),
        }
    }
}

/// When a detour ran, according to its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The CPU that it ran on, if that is known.
    pub cpu: Option<u32>,
    /// Value of that CPU's time-stamp counter.
    pub tsc: u64,
    /// Position of its record, in cells from the first that was ever reserved. If the ring's head was beyond this
    /// position when the record's CPU left the guest, the record was begun before. `None` for something that has no
    /// record of its own, such as the entry of a call.
    pub position: Option<u64>,
}

/// The host's time of a [`Stamp`], nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// It is known.
    At(u64),
    /// The measured time is not possible: something older has a later time, or something younger an earlier one.
    /// This is the nearest possible time.
    Placed(u64),
    /// The time is not known. This is the earliest possible time; 0 if that is not known either.
    After(u64),
}

impl When {
    /// Returns the time; 0 if it is not known.
    fn ns_or_zero(self) -> u64 {
        match self {
            Self::At(ns) | Self::Placed(ns) => ns,
            Self::After(_) => 0,
        }
    }

    /// Returns the earliest possible time.
    fn earliest(self) -> u64 {
        match self {
            Self::At(ns) | Self::Placed(ns) | Self::After(ns) => ns,
        }
    }
}

/// Context for reading records.
pub(super) struct Around<'a> {
    pub(super) when: &'a dyn Fn(Stamp) -> When,
    /// Returns the real return address of a call.
    pub(super) return_address: &'a dyn Fn(&Call) -> Gva,
    pub(super) mem: &'a dyn PhysMemory,
    pub(super) follower: Option<&'a dyn Follower>,
}
