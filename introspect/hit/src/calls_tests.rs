//! A guest in miniature: tasks with stacks, on which functions are called, tail-called, returned
//! from and abandoned. It knows the truth about every frame, and the table has to agree: every
//! return goes to the right place, every call is reported once and as what it was, and at the end
//! every instance is free again.

mod cases;
mod guest;

use std::sync::Mutex;

use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::ProbeId;
use proptest::prelude::*;

use crate::calls::*;
use guest::{GuestTask, Probe, Probes, count};

const TRAMPOLINE: Gva = Gva(0xffff_ffff_8040_0000);

/// Checks that every instance of the pools is free and can be taken again.
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
        open.undo_pushes(free);
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
    FollowedTailCall,
    InterruptedReturn {
        overwritten: bool,
    },
    Return,
    Abandon(usize),
    Die(Vec<usize>),
    Free,
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
        3 => Just(Step::FollowedTailCall),
        3 => any::<bool>().prop_map(|overwritten| Step::InterruptedReturn { overwritten }),
        10 => Just(Step::Return),
        3 => (1..4_usize).prop_map(Step::Abandon),
        2 => on().prop_map(Step::Die),
        2 => Just(Step::Free),
        1 => (on(), maxactive(), 0..9_usize)
            .prop_map(|(probes, maxactive, data)| Step::Replace { probes, maxactive, data }),
    ]
}

/// Does what the engine does when return probes leave, while the vCPUs are stopped.
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
    #[test]
    fn any_sequence_of_calls_returns_where_it_should(
        first in prop::collection::vec((maxactive(), 0..9_usize), PROBES),
        steps in prop::collection::vec((prop_oneof![4 => 0..3_usize, 1 => 0..40_usize], step()), 0..300),
        return_at_end in any::<bool>(),
    ) {
        // Fewer cells than tasks, so that some calls are missed for lack of a cell.
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
                Step::FollowedTailCall => task.followed_tail_call(),
                Step::InterruptedReturn { overwritten } => task.interrupted_return(overwritten),
                Step::Return => task.ret(&calls, &probes),
                Step::Abandon(frames) => task.abandon(frames),
                Step::Die(on) => task.die(&calls, &probes, &pick(&on)),
                Step::Free => task.free(&calls, &probes),
                Step::Replace { probes: which, maxactive, data } => {
                    unregister(&calls, &mut probes, &pick(&which), &mut tasks);
                    for i in which {
                        ids[i] = ProbeId(next_id);
                        probes.insert(ids[i], Probe::new(&calls, next_id, maxactive, data));
                        next_id += 1;
                    }
                    // The same probe may have been named twice.
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
