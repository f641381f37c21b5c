//! A guest in miniature: tasks with stacks, on which functions are called, tail-called, returned
//! from and abandoned. It knows the truth about every frame, and the table has to agree: every
//! return goes to the right place, every call is reported once and as what it was, and at the end
//! every instance is free again.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::{Gva, Regs};
use proptest::prelude::*;

use super::*;

const TRAMPOLINE: Gva = Gva(0xffff_ffff_8040_0000);

/// A return probe and what was counted of it.
#[derive(Debug)]
struct Probe {
    id: ProbeId,
    pool: Pool,
    calls: AtomicU64,
    hits: AtomicU64,
    missed: AtomicU64,
    returned: AtomicU64,
    orphaned: AtomicU64,
}

impl Probe {
    fn new(calls: &Calls, id: u32, maxactive: MaxActive, data: usize) -> Self {
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

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The probes of the guest, by id.
type Probes = HashMap<ProbeId, Probe>;

/// A frame of the guest: the function was called and has not returned.
#[derive(Debug)]
struct StackFrame {
    slot: u64,
    ret: u64,
    /// It executed its `ret`, and then was interrupted at the trampoline.
    returning: bool,
}

/// What the guest knows of a call that was pushed.
#[derive(Debug)]
struct Pushed {
    probe: ProbeId,
    slot: u64,
    ret: u64,
    abandoned: bool,
}

#[derive(Debug)]
struct GuestTask {
    task: Gva,
    /// Tasks that died and left their stack to this one.
    former: Vec<Gva>,
    number: u64,
    frames: Vec<StackFrame>,
    memory: HashMap<u64, u64>,
    /// Calls that are to be reported yet.
    pushed: HashMap<u64, Pushed>,
    made: u64,
}

impl GuestTask {
    fn new(number: u64) -> Self {
        Self {
            task: Gva(0xffff_8880_0000_0000 + number * 0x1c40),
            former: Vec::new(),
            number,
            frames: Vec::new(),
            memory: HashMap::new(),
            pushed: HashMap::new(),
            made: 0,
        }
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

    /// A function that `on` are placed on is entered with its return address at `slot`.
    fn enter(&mut self, calls: &Calls, probes: &Probes, on: &[ProbeId], slot: u64, ret: u64) {
        let on: Vec<_> = on.iter().filter_map(|id| probes.get(id)).collect();
        if on.is_empty() {
            return;
        }
        on.iter().for_each(|probe| add(&probe.calls));
        let Some(mut open) = calls.open(self.task) else {
            on.iter().for_each(|probe| add(&probe.missed));
            return;
        };
        let found = Gva(self.memory[&slot]);
        let pushed = &mut self.pushed;
        let real = open.enter(Gva(slot), found, TRAMPOLINE, |call| {
            Self::reported(pushed, probes, None, Ended::Orphaned, call);
        });
        assert_eq!(real, Some(Gva(ret)));
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

    fn call(&mut self, calls: &Calls, probes: &Probes, on: &[ProbeId], gap: u64, interrupt: bool) {
        let task_stack = 0xffff_c900_0000_0000 + self.number * 0x8000;
        let interrupt_stack = 0xffff_c980_0000_0000 + self.number * 0x8000;
        let top = |stack: u64| stack + 0x4000 - 0x10;
        let below = match self.frames.last() {
            None => top(task_stack),
            Some(f) if interrupt && f.slot >> 14 == task_stack >> 14 => top(interrupt_stack),
            // The processor pushes five words where the function has returned from.
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
            returning: false,
        });
        self.enter(calls, probes, on, slot, ret);
    }

    /// The running function jumps to another one.
    fn tail_call(&mut self, calls: &Calls, probes: &Probes, on: &[ProbeId]) {
        if let Some(&StackFrame {
            slot,
            ret,
            returning: false,
        }) = self.frames.last()
        {
            self.enter(calls, probes, on, slot, ret);
        }
    }

    /// The running function executes its `ret` and is interrupted before the trampoline is.
    fn interrupted_return(&mut self, overwritten: bool) {
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

    fn ret(&mut self, calls: &Calls, probes: &Probes) {
        let Some(frame) = self.frames.pop() else {
            return;
        };
        let mut to = self.memory[&frame.slot];
        if to == TRAMPOLINE.0 || frame.returning {
            let mut open = calls.open(self.task).unwrap();
            let pushed = &mut self.pushed;
            let went = open.returned(Gva(frame.slot), |how, call| {
                Self::reported(pushed, probes, Some(frame.slot), how, call);
            });
            // Without an instance the engine goes by what is in the slot.
            to = went.map_or(to, |to| to.0);
        }
        assert_eq!(to, frame.ret, "the guest went astray");
    }

    fn abandon(&mut self, frames: usize) {
        let left = self.frames.len().saturating_sub(frames);
        for frame in self.frames.drain(left..) {
            for known in self.pushed.values_mut() {
                // A frame that is there no more may have been at the same place.
                if known.slot == frame.slot && known.ret == frame.ret {
                    known.abandoned = true;
                }
            }
        }
    }

    /// The task dies inside a call it makes after its calls were discarded, and another takes its
    /// stack.
    fn die(&mut self, calls: &Calls, probes: &Probes, last: &[ProbeId]) {
        self.discard(calls, probes, self.task);
        self.call(calls, probes, last, 1, false);
        self.abandon(usize::MAX);
        self.former.push(self.task);
        self.task.0 += 0x80_0000;
    }

    fn discard(&mut self, calls: &Calls, probes: &Probes, task: Gva) {
        self.abandon(usize::MAX);
        if let Some(mut open) = calls.open(task) {
            let pushed = &mut self.pushed;
            open.discard_all(|call| {
                Self::reported(pushed, probes, None, Ended::Orphaned, call);
            });
        }
    }

    fn end(&mut self, calls: &Calls, probes: &Probes) {
        self.former.push(self.task);
        for task in std::mem::take(&mut self.former) {
            self.discard(calls, probes, task);
        }
        assert!(self.pushed.is_empty(), "not reported: {:?}", self.pushed);
    }
}

/// Every instance of the pools is free, and can be had again.
fn all_free(calls: &Calls, probes: &Probes) {
    calls.live(|call| panic!("left over: {call:?}"));
    for probe in probes.values() {
        assert_eq!(probe.pool.active(), 0);
        let hits = count(&probe.hits);
        assert_eq!(hits + count(&probe.missed), count(&probe.calls));
        assert_eq!(count(&probe.returned) + count(&probe.orphaned), hits);
        let mut open = calls.open(Gva(0x40)).unwrap();
        let entry = entry_at(0x1000);
        let mut free = 0;
        while free < 100 && open.push(&probe.pool, &entry) {
            free += 1;
        }
        assert_eq!(free, probe.pool.limit().min(100));
        open.take_back(free);
        assert_eq!(probe.pool.active(), 0);
    }
}

fn entry_at(slot: u64) -> Entry<'static> {
    const REGS: &Regs = &Regs {
        rax: 1,
        rbx: 2,
        rcx: 3,
        rdx: 4,
        rsi: 5,
        rdi: 6,
        rsp: 7,
        rbp: 8,
        r8: 9,
        r9: 10,
        r10: 11,
        r11: 12,
        r12: 13,
        r13: 14,
        r14: 15,
        r15: 16,
        rip: 17,
        rflags: 18,
    };
    Entry {
        id: slot,
        slot: Gva(slot),
        ret: Gva(slot + 1),
        host_ns: 19,
        guest_tsc: 20,
        regs: REGS,
        data: &[],
    }
}

#[derive(Clone, Debug)]
enum Step {
    Call {
        on: Vec<usize>,
        gap: u64,
        interrupt: bool,
    },
    TailCall(Vec<usize>),
    InterruptedReturn {
        overwritten: bool,
    },
    Return,
    Abandon(usize),
    Die(Vec<usize>),
    Replace {
        probes: Vec<usize>,
        maxactive: MaxActive,
        data: usize,
    },
}

const PROBES: usize = 4;

fn maxactive() -> impl Strategy<Value = MaxActive> {
    prop_oneof![
        3 => (1..5_u32).prop_map(MaxActive::Fixed),
        1 => Just(MaxActive::Default),
        1 => Just(MaxActive::Auto),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let on = || prop::collection::vec(0..PROBES, 0..3);
    prop_oneof![
        12 => (on(), 0..4_u64, prop::bool::weighted(0.2))
            .prop_map(|(on, gap, interrupt)| Step::Call { on, gap, interrupt }),
        4 => on().prop_map(Step::TailCall),
        3 => any::<bool>().prop_map(|overwritten| Step::InterruptedReturn { overwritten }),
        10 => Just(Step::Return),
        3 => (1..4_usize).prop_map(Step::Abandon),
        2 => on().prop_map(Step::Die),
        1 => (on(), maxactive(), 0..9_usize)
            .prop_map(|(probes, maxactive, data)| Step::Replace { probes, maxactive, data }),
    ]
}

/// What the engine does when return probes leave, the virtual CPUs standing still.
fn unregister(calls: &Calls, probes: &mut Probes, leave: &[ProbeId], tasks: &mut [GuestTask]) {
    for task in &mut *tasks {
        task.pushed.retain(|_, known| !leave.contains(&known.probe));
    }
    let before = total_active(probes);
    let removed = calls.remove(
        |probe| leave.contains(&probe),
        |frame| {
            let task = tasks
                .iter_mut()
                .find(|t| t.task == frame.task || t.former.contains(&frame.task))
                .unwrap();
            let word = task.memory.get_mut(&frame.slot.0).unwrap();
            if *word == TRAMPOLINE.0 {
                *word = frame.ret.0;
                Fate::Forget
            } else {
                Fate::Keep
            }
        },
    );
    assert!(before >= total_active(probes));
    assert!(removed.forgotten + removed.kept >= before - total_active(probes));
    let mut live = 0;
    let mut silent = 0;
    calls.live(|call| match call.probe {
        Some(probe) => {
            assert!(!leave.contains(&probe));
            live += 1;
        }
        None => silent += 1,
    });
    assert_eq!(silent, removed.kept);
    assert_eq!(live, tasks.iter().map(|t| t.pushed.len()).sum::<usize>());
    probes.retain(|id, _| !leave.contains(id));
}

fn total_active(probes: &Probes) -> u32 {
    probes.values().map(|probe| probe.pool.active()).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_sequence_of_calls_returns_where_it_should(
        first in prop::collection::vec((maxactive(), 0..9_usize), PROBES),
        steps in prop::collection::vec((prop_oneof![4 => 0..3_usize, 1 => 0..40_usize], step()), 0..300),
        return_at_end in any::<bool>(),
    ) {
        // Fewer cells than tasks, so that some calls are missed for want of a cell.
        let calls = Calls::new(1, 0);
        let mut tasks: Vec<_> = (0..40).map(GuestTask::new).collect();
        let mut ids: Vec<_> = (0..4).map(ProbeId).collect();
        let mut next_id = 4;
        let mut probes: Probes = first
            .into_iter()
            .zip(0..)
            .map(|((maxactive, data), id)| (ProbeId(id), Probe::new(&calls, id, maxactive, data)))
            .collect();
        for (at, step) in steps {
            let task = &mut tasks[at];
            let pick = |on: &[usize]| -> Vec<_> { on.iter().map(|&i| ids[i]).collect() };
            match step {
                Step::Call { on, gap, interrupt } => {
                    task.call(&calls, &probes, &pick(&on), gap, interrupt);
                }
                Step::TailCall(on) => task.tail_call(&calls, &probes, &pick(&on)),
                Step::InterruptedReturn { overwritten } => task.interrupted_return(overwritten),
                Step::Return => task.ret(&calls, &probes),
                Step::Abandon(frames) => task.abandon(frames),
                Step::Die(on) => task.die(&calls, &probes, &pick(&on)),
                Step::Replace { probes: which, maxactive, data } => {
                    unregister(&calls, &mut probes, &pick(&which), &mut tasks);
                    for i in which {
                        ids[i] = ProbeId(next_id);
                        probes.insert(ids[i], Probe::new(&calls, next_id, maxactive, data));
                        next_id += 1;
                    }
                    // The same one may have been named twice.
                    probes.retain(|id, _| ids.contains(id));
                }
            }
        }
        for task in &mut tasks {
            while return_at_end && !task.frames.is_empty() {
                task.ret(&calls, &probes);
            }
            task.end(&calls, &probes);
        }
        all_free(&calls, &probes);
    }
}

/// A generator of numbers that look random (Marsaglia's xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[test]
fn threads_that_pass_tasks_around_lose_no_call() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 4000;
    let calls = Calls::new(4, 64);
    let probes: Probes = [
        MaxActive::Fixed(3),
        MaxActive::Fixed(20),
        MaxActive::Default,
        MaxActive::Auto,
    ]
    .into_iter()
    .zip(0..)
    .map(|(maxactive, id)| (ProbeId(id), Probe::new(&calls, id, maxactive, 8)))
    .collect();
    // The guest's run queue.
    let queue = Mutex::new((0..24).map(GuestTask::new).collect::<Vec<_>>());
    std::thread::scope(|threads| {
        for seed in 1..=THREADS {
            let (calls, probes, queue) = (&calls, &probes, &queue);
            threads.spawn(move || {
                let mut random = Random(seed * 0x9e37_79b9);
                for _ in 0..ROUNDS {
                    let mut task = {
                        let mut queue = queue.lock().unwrap();
                        let at = random.below(queue.len() as u64);
                        queue.swap_remove(usize::try_from(at).unwrap())
                    };
                    for _ in 0..8 {
                        let on: Vec<_> = (0..random.below(3))
                            .map(|_| ProbeId(u32::try_from(random.below(4)).unwrap()))
                            .collect();
                        match random.below(40) {
                            0..18 => task.call(calls, probes, &on, random.below(4), false),
                            18..22 => task.tail_call(calls, probes, &on),
                            22..37 => task.ret(calls, probes),
                            37..39 => task.abandon(2),
                            _ => task.die(calls, probes, &[]),
                        }
                    }
                    queue.lock().unwrap().push(task);
                }
            });
        }
    });
    for mut task in queue.into_inner().unwrap() {
        task.end(&calls, &probes);
    }
    all_free(&calls, &probes);
    assert!(count(&probes[&ProbeId(0)].missed) > 0);
    assert_eq!(count(&probes[&ProbeId(3)].missed), 0);
}

const TASK: Gva = Gva(0xffff_8880_0010_0000);

fn push_all(calls: &Calls, task: Gva, pool: &Pool, slots: &[u64]) {
    let mut open = calls.open(task).unwrap();
    for &slot in slots {
        assert!(open.push(pool, &entry_at(slot)));
    }
}

#[test]
fn an_entry_comes_back_as_it_was_written() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(7), MaxActive::Default, 256).unwrap();
    let data: Vec<u8> = (0..=255).collect();
    let mut open = calls.open(TASK).unwrap();
    for len in [0, 1, 8, 13, 256] {
        let entry = Entry {
            data: &data[..len],
            ..entry_at(0x1000)
        };
        assert!(open.push(&pool, &entry));
        let mut seen = 0;
        let to = open.returned(entry.slot, |how, call| {
            seen += 1;
            assert_eq!(how, Ended::Returned);
            assert_eq!(call.probe(), ProbeId(7));
            assert_eq!(
                (call.id(), call.slot(), call.ret()),
                (entry.id, entry.slot, entry.ret)
            );
            assert_eq!((call.host_ns(), call.guest_tsc()), (19, 20));
            assert_eq!(call.regs(), *entry.regs);
            assert_eq!(call.data(&mut [0; DATA_MAX]), entry.data);
        });
        assert_eq!((to, seen), (Some(entry.ret), 1));
    }
}

#[test]
fn data_beyond_the_pools_size_is_not_kept() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    let mut open = calls.open(TASK).unwrap();
    let entry = Entry {
        data: &[1; 300],
        ..entry_at(0x1000)
    };
    assert!(open.push(&pool, &entry));
    open.discard_all(|call| assert_eq!(call.data(&mut [0; DATA_MAX]), []));
}

#[test]
fn maxactive_is_as_with_kprobes() {
    let limit = |vcpus, maxactive| {
        let calls = Calls::new(vcpus, 0);
        calls
            .pool(ProbeId(0), maxactive, 0)
            .map(|pool| pool.limit())
    };
    assert_eq!(limit(1, MaxActive::Default), Ok(10));
    assert_eq!(limit(8, MaxActive::Default), Ok(16));
    assert_eq!(limit(u32::MAX, MaxActive::Default), Ok(FIXED_MAX));
    assert_eq!(limit(8, MaxActive::Fixed(0)), Ok(16));
    assert_eq!(limit(8, MaxActive::Fixed(1)), Ok(1));
    assert_eq!(limit(8, MaxActive::Fixed(4096)), Ok(4096));
    assert_eq!(
        limit(8, MaxActive::Fixed(4097)),
        Err(PoolError::TooManyInstances(4097))
    );
    assert_eq!(limit(8, MaxActive::Auto), Ok(AUTO_MAX));
    assert_eq!(
        Calls::new(1, 0)
            .pool(ProbeId(0), MaxActive::Auto, 257)
            .err(),
        Some(PoolError::TooMuchData(257))
    );
}

#[test]
fn an_auto_pool_grows_to_its_end_and_no_further() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Auto, 0).unwrap();
    let mut open = calls.open(TASK).unwrap();
    for i in 0..AUTO_MAX {
        assert!(open.push(&pool, &entry_at(u64::from(i))), "{i}");
    }
    assert!(!open.push(&pool, &entry_at(0)));
    assert_eq!(pool.active(), AUTO_MAX);
    let mut expected = u64::from(AUTO_MAX);
    open.discard_all(|call| {
        expected -= 1;
        assert_eq!(call.id(), expected);
    });
    assert_eq!((expected, pool.active()), (0, 0));
}

#[test]
fn the_instances_of_a_probe_that_left_serve_another() {
    let calls = Calls::new(1, 0);
    let first = calls.pool(ProbeId(0), MaxActive::Fixed(40), 0).unwrap();
    let index = first.index;
    push_all(&calls, TASK, &first, &[0x1000]);
    drop(first);
    // One call is still in flight.
    let second = calls.pool(ProbeId(1), MaxActive::Fixed(2), 0).unwrap();
    assert_ne!(second.index, index);
    let to = calls.open(TASK).unwrap().returned(Gva(0x1000), |_, call| {
        panic!("reported to nobody: {call:?}");
    });
    assert_eq!(to, Some(Gva(0x1001)));
    let other_size = calls.pool(ProbeId(2), MaxActive::Fixed(2), 8).unwrap();
    assert_ne!(other_size.index, index);
    let third = calls.pool(ProbeId(3), MaxActive::Fixed(3), 0).unwrap();
    assert_eq!(third.index, index);
    push_all(&calls, TASK, &third, &[0x1000, 0xff8, 0xff0]);
    let mut open = calls.open(TASK).unwrap();
    assert!(
        !open.push(&third, &entry_at(0xfe8)),
        "the limit is the new probe's"
    );
    open.discard_all(|call| assert_eq!(call.probe(), ProbeId(3)));
}

#[test]
fn a_task_without_a_free_cell_is_missed_until_one_falls_idle() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Auto, 0).unwrap();
    let task = |i: u64| Gva(0x1000 + i * 0x40);
    for i in 0..WINDOW as u64 {
        push_all(&calls, task(i), &pool, &[0x1000]);
    }
    let other = task(1000);
    assert!(calls.open(other).is_none());
    assert!(
        calls
            .open(task(3))
            .unwrap()
            .returned(Gva(0x1000), |_, _| ())
            .is_some()
    );
    push_all(&calls, other, &pool, &[0x2000]);
    assert!(calls.open(task(3)).is_none());
    assert_eq!(
        calls.open(other).unwrap().returned(Gva(0x2000), |_, _| ()),
        Some(Gva(0x2001))
    );
}

#[test]
fn a_task_that_is_open_cannot_be_opened_again() {
    let calls = Calls::new(1, CELLS);
    let open = calls.open(TASK).unwrap();
    assert!(calls.open(TASK).is_none());
    drop(open);
    assert!(calls.open(TASK).is_some());
    assert!(calls.open(Gva(0)).is_none());
    assert!(calls.open(Gva(u64::MAX)).is_some());
}

#[test]
fn an_entry_on_one_exception_stack_leaves_frames_on_its_neighbours_alone() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    let nmi = 0xffff_fe00_0000_2f00;
    for (slot, orphans) in [(nmi + 0x2000, 0), (nmi + 0x80, 1)] {
        push_all(&calls, TASK, &pool, &[nmi]);
        let mut seen = 0;
        let mut open = calls.open(TASK).unwrap();
        let ret = open.enter(Gva(slot), Gva(5), TRAMPOLINE, |_| seen += 1);
        assert_eq!((ret, seen), (Some(Gva(5)), orphans));
        open.discard_all(|_| ());
    }
}

#[test]
fn a_slot_that_holds_the_trampoline_without_a_call_has_no_return_address() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    push_all(&calls, TASK, &pool, &[0x1000]);
    let mut open = calls.open(TASK).unwrap();
    assert_eq!(open.enter(Gva(0xff8), TRAMPOLINE, TRAMPOLINE, |_| ()), None);
    assert_eq!(open.returned(Gva(0xff8), |_, _| ()), None);
    assert_eq!(open.returned(Gva(0x1000), |_, _| ()), Some(Gva(0x1001)));
}

#[test]
fn one_of_several_probes_of_a_frame_may_leave() {
    for leaver in 0..3 {
        let calls = Calls::new(1, 0);
        let pools: Vec<_> = (0..3)
            .map(|id| calls.pool(ProbeId(id), MaxActive::Default, 0).unwrap())
            .collect();
        push_all(&calls, TASK, &pools[0], &[0x2000]);
        for pool in &pools {
            push_all(&calls, TASK, pool, &[0x1000]);
        }
        let removed = calls.remove(
            |probe| probe == ProbeId(leaver),
            |frame| {
                assert_eq!(
                    (frame.task, frame.slot, frame.ret),
                    (TASK, Gva(0x2000), Gva(0x2001))
                );
                Fate::Keep
            },
        );
        let kept = u32::from(leaver == 0);
        assert_eq!(removed, Removed { forgotten: 1, kept });
        let mut seen = Vec::new();
        let mut open = calls.open(TASK).unwrap();
        assert_eq!(
            open.returned(Gva(0x1000), |_, call| seen.push(call.probe().0)),
            Some(Gva(0x1001))
        );
        let stay: Vec<_> = (0..3).rev().filter(|&id| id != leaver).collect();
        assert_eq!(seen, stay);
        // Kept in silence, or as before.
        seen.clear();
        assert_eq!(
            open.returned(Gva(0x2000), |_, call| seen.push(call.probe().0)),
            Some(Gva(0x2001))
        );
        assert_eq!(seen.is_empty(), leaver == 0);
    }
}
