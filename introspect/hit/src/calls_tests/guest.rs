//! A task of the guest, which knows the truth about each of its frames.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::ProbeId;

use super::TRAMPOLINE;
use crate::calls::*;

/// A return probe and its counts.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) id: ProbeId,
    pub(super) pool: Pool,
    pub(super) calls: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) missed: AtomicU64,
    pub(super) returned: AtomicU64,
    pub(super) orphaned: AtomicU64,
}

impl Probe {
    pub(super) fn new(calls: &Calls, id: u32, maxactive: MaxActive, data: usize) -> Self {
        Self {
            id: ProbeId(id),
            pool: calls.pool(ProbeId(id), maxactive, data).unwrap(),
            calls: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            orphaned: AtomicU64::new(0),
        }
    }
}

pub(super) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The probes of the guest, by id.
pub(super) type Probes = HashMap<ProbeId, Probe>;

/// A frame of the guest: the function was called and has not returned.
#[derive(Debug)]
pub(super) struct StackFrame {
    slot: u64,
    ret: u64,
    /// Where the trampoline leads: to the caller, or to code that follows the call without exits.
    behind: u64,
    /// The function executed its `ret` and was then interrupted at the trampoline.
    returning: bool,
}

/// What the guest knows of a call that was pushed.
#[derive(Debug)]
pub(super) struct Pushed {
    pub(super) probe: ProbeId,
    slot: u64,
    ret: u64,
    abandoned: bool,
}

#[derive(Debug)]
pub(super) struct GuestTask {
    pub(super) task: Gva,
    /// Tasks that died and left their stack to this one, and are not freed yet.
    pub(super) former: Vec<Gva>,
    /// Addresses of dead tasks that are freed. The guest uses them for other tasks.
    freed: Vec<Gva>,
    died: u64,
    number: u64,
    pub(super) frames: Vec<StackFrame>,
    pub(super) memory: HashMap<u64, u64>,
    /// For each stub of a call that is followed without exits: the address that it leads to.
    stubs: HashMap<u64, u64>,
    /// Calls that are still to be reported.
    pub(super) pushed: HashMap<u64, Pushed>,
    made: u64,
}

impl GuestTask {
    pub(super) fn new(number: u64) -> Self {
        Self {
            task: Self::task(number),
            former: Vec::new(),
            freed: Vec::new(),
            died: 0,
            number,
            frames: Vec::new(),
            memory: HashMap::new(),
            stubs: HashMap::new(),
            pushed: HashMap::new(),
            made: 0,
        }
    }

    fn task(number: u64) -> Gva {
        Gva(0xffff_8880_0000_0000 + number * 0x1c40)
    }

    fn regs(id: u64) -> Regs {
        Regs {
            rax: id,
            rip: !id,
            rflags: id << 1,
            ..Regs::default()
        }
    }

    /// Checks a reported call against what is known of it.
    fn reported(
        pushed: &mut HashMap<u64, Pushed>,
        probes: &Probes,
        returning: Option<u64>,
        how: Ended,
        call: &Call<'_>,
    ) {
        let known = pushed
            .remove(&call.id())
            .expect("reported once, and not after the probe left");
        let probe = &probes[&known.probe];
        assert_eq!(call.probe(), known.probe);
        assert_eq!((call.slot().0, call.ret().0), (known.slot, known.ret));
        assert_eq!(call.regs(), Self::regs(call.id()));
        let mut data = [0; DATA_MAX];
        let data = call.data(&mut data);
        assert!(call.id().to_le_bytes().starts_with(data), "{data:?}");
        match how {
            Ended::Returned => {
                assert_eq!(returning, Some(known.slot));
                assert!(!known.abandoned, "an abandoned frame was said to return");
                add(&probe.returned);
            }
            Ended::Orphaned => {
                assert!(known.abandoned, "a live frame was called an orphan");
                add(&probe.orphaned);
            }
        }
    }

    /// Classifies `at`, which was found in place of a return address.
    fn found(&self, at: u64) -> ReturnAddress {
        let mut end = at;
        while let Some(next) = self.stubs.get(&end) {
            end = *next;
        }
        match end {
            _ if at == TRAMPOLINE.0 => ReturnAddress::Trampoline,
            end if end == TRAMPOLINE.0 => ReturnAddress::OnTheWay,
            _ => ReturnAddress::Caller(Gva(at)),
        }
    }

    /// Enters a function with the probes `on` in the newest frame.
    fn enter(&mut self, calls: &Calls, probes: &Probes, on: &[ProbeId]) {
        let on: Vec<_> = on.iter().filter_map(|id| probes.get(id)).collect();
        if on.is_empty() {
            return;
        }
        on.iter().for_each(|probe| add(&probe.calls));
        let Some(mut open) = calls.open(self.task) else {
            on.iter().for_each(|probe| add(&probe.missed));
            return;
        };
        let Some(frame) = self.frames.last() else {
            return;
        };
        let slot = frame.slot;
        let found = self.found(self.memory[&slot]);
        let expected = match found {
            ReturnAddress::Caller(at) => Some(at),
            ReturnAddress::Trampoline => Some(Gva(frame.behind)),
            ReturnAddress::OnTheWay => None,
        };
        let pushed = &mut self.pushed;
        let real = open.enter(Gva(slot), found, |call| {
            Self::reported(pushed, probes, None, Ended::Orphaned, call);
        });
        assert_eq!(real, expected);
        let Some(Gva(ret)) = real else {
            on.iter().for_each(|probe| add(&probe.missed));
            return;
        };
        for probe in on {
            self.made += 1;
            let id = self.number << 32 | self.made;
            let entry = Entry {
                id,
                slot: Gva(slot),
                ret: Gva(ret),
                host_ns: self.made,
                guest_tsc: 2,
                regs: &Self::regs(id),
                data: &id.to_le_bytes(),
            };
            if open.push(&probe.pool, &entry) {
                add(&probe.hits);
                self.memory.insert(slot, TRAMPOLINE.0);
                if let Some(frame) = self.frames.last_mut() {
                    frame.behind = ret;
                }
                let known = Pushed {
                    probe: probe.id,
                    slot,
                    ret,
                    abandoned: false,
                };
                self.pushed.insert(id, known);
            } else {
                add(&probe.missed);
            }
        }
    }

    pub(super) fn call(
        &mut self,
        calls: &Calls,
        probes: &Probes,
        on: &[ProbeId],
        gap: u64,
        interrupt: bool,
    ) {
        let task_stack = 0xffff_c900_0000_0000 + self.number * 0x8000;
        let interrupt_stack = 0xffff_c980_0000_0000 + self.number * 0x8000;
        let top = |stack: u64| stack + 0x4000 - 0x10;
        let below = match self.frames.last() {
            None => top(task_stack),
            Some(f) if interrupt && f.slot >> 14 == task_stack >> 14 => top(interrupt_stack),
            // The interrupt pushed five words over the slot of the function that has returned.
            Some(f) if f.returning => f.slot - 0x30,
            Some(f) => f.slot,
        };
        let slot = below - 8 - gap * 8;
        if slot & 0x3fff < 0x100 {
            return;
        }
        self.made += 1;
        let ret = 0xffff_ffff_8100_0000 + self.made;
        self.memory.insert(slot, ret);
        self.frames.push(StackFrame {
            slot,
            ret,
            behind: ret,
            returning: false,
        });
        self.enter(calls, probes, on);
    }

    /// The running function jumps to another one.
    pub(super) fn tail_call(&mut self, calls: &Calls, probes: &Probes, on: &[ProbeId]) {
        if self.frames.last().is_some_and(|frame| !frame.returning) {
            self.enter(calls, probes, on);
        }
    }

    /// The running function jumps to a function whose calls are followed without exits.
    pub(super) fn followed_tail_call(&mut self) {
        if let Some(frame) = self.frames.last().filter(|frame| !frame.returning) {
            self.made += 1;
            let stub = 0xffff_ffff_9000_0000 + self.made * 16;
            let found = self.memory.insert(frame.slot, stub);
            self.stubs.insert(stub, found.expect("its return address"));
        }
    }

    /// The running function executes its `ret` and is interrupted before the trampoline runs.
    pub(super) fn interrupted_return(&mut self, overwritten: bool) {
        if let Some(frame) = self.frames.last_mut()
            && !frame.returning
            && self.memory[&frame.slot] == TRAMPOLINE.0
        {
            frame.returning = true;
            if overwritten {
                self.memory.insert(frame.slot, 0x18);
            }
        }
    }

    pub(super) fn ret(&mut self, calls: &Calls, probes: &Probes) {
        let Some(frame) = self.frames.pop() else {
            return;
        };
        let mut to = self.memory[&frame.slot];
        let mut traps = frame.returning;
        while traps || to != frame.ret {
            if traps || to == TRAMPOLINE.0 {
                let mut open = calls.open(self.task).unwrap();
                let pushed = &mut self.pushed;
                let went = open.returned(Gva(frame.slot), |how, call| {
                    Self::reported(pushed, probes, Some(frame.slot), how, call);
                });
                // If no call is known, the engine continues at the address in the slot.
                assert!(
                    went.is_some() || to != TRAMPOLINE.0,
                    "the guest went astray"
                );
                to = went.map_or(to, |to| to.0);
                traps = false;
            } else {
                to = *self.stubs.get(&to).expect("the guest went astray");
            }
        }
    }

    pub(super) fn abandon(&mut self, frames: usize) {
        let left = self.frames.len().saturating_sub(frames);
        for frame in self.frames.drain(left..) {
            for known in self.pushed.values_mut() {
                // An earlier frame may have been at the same place.
                if known.slot == frame.slot && known.ret == frame.behind {
                    known.abandoned = true;
                }
            }
        }
    }

    /// The task dies inside a call that it makes after its calls were released, and another task takes its
    /// stack.
    pub(super) fn die(&mut self, calls: &Calls, probes: &Probes, last: &[ProbeId]) {
        self.release(calls, probes, self.task);
        self.call(calls, probes, last, 1, false);
        self.abandon(usize::MAX);
        self.former.push(self.task);
        self.task = self.freed.pop().unwrap_or_else(|| {
            self.died += 1;
            Gva(Self::task(self.number).0 + self.died * 0x80_0000)
        });
    }

    /// The guest frees its dead tasks. None of their calls is left.
    pub(super) fn free(&mut self, calls: &Calls, probes: &Probes) {
        for task in std::mem::take(&mut self.former) {
            self.release_calls(calls, probes, task);
            self.freed.push(task);
        }
        calls.live(|call| assert!(!self.freed.contains(&call.task), "{call:?}"));
    }

    fn release(&mut self, calls: &Calls, probes: &Probes, task: Gva) {
        self.abandon(usize::MAX);
        self.release_calls(calls, probes, task);
    }

    fn release_calls(&mut self, calls: &Calls, probes: &Probes, task: Gva) {
        if let Some(mut open) = calls.open(task) {
            let pushed = &mut self.pushed;
            open.remove_all(|call| {
                Self::reported(pushed, probes, None, Ended::Orphaned, call);
            });
        }
    }

    pub(super) fn end(&mut self, calls: &Calls, probes: &Probes) {
        self.former.push(self.task);
        for task in std::mem::take(&mut self.former) {
            self.release(calls, probes, task);
        }
        assert!(self.pushed.is_empty(), "not reported: {:?}", self.pushed);
    }
}
