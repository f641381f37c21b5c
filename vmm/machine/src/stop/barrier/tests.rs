//! Tests the barrier under random orders of the calls that a machine may make, with a model of the vCPUs.

use hvprobe_arch::Regs;
use proptest::prelude::*;

use super::*;

/// An event in a test.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A vCPU reaches the next point at which it acts.
    Step(usize),
    /// The vCPU leaves its loop by itself.
    Leave(usize),
    Begin,
    Finish,
    Pause,
    Resume,
    Hold(usize),
    Release(usize),
    Nmi(usize),
    End,
}

fn events(vcpus: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        24 => (0..vcpus).prop_map(Event::Step),
        1 => (0..vcpus).prop_map(Event::Leave),
        4 => Just(Event::Begin),
        4 => Just(Event::Finish),
        3 => Just(Event::Pause),
        3 => Just(Event::Resume),
        3 => (0..vcpus).prop_map(Event::Hold),
        3 => (0..vcpus).prop_map(Event::Release),
        3 => (0..vcpus).prop_map(Event::Nmi),
        1 => Just(Event::End),
    ];
    proptest::collection::vec(event, 0..200)
}

/// State of a vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    New,
    Running,
    Waiting,
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Vcpu {
    thread: Thread,
    /// The vCPU's attention flag.
    flag: bool,
    /// Whether the vCPU has been kicked since it began to run.
    kicked: bool,
}

/// The requests in force, tracked independently of the barrier.
#[derive(Clone, Debug, Default)]
struct Wanted {
    transaction: bool,
    paused: bool,
    held: Vec<bool>,
    nmi: Vec<bool>,
    ended: bool,
}

#[derive(Debug)]
struct Machine {
    barrier: Barrier,
    vcpus: Vec<Vcpu>,
    wanted: Wanted,
    /// Whether the transaction has found all vCPUs stopped.
    applying: bool,
}

fn standing(index: usize) -> Standing {
    let rip = index as u64;
    Standing {
        regs: Regs {
            rip,
            ..Regs::default()
        },
        ..Standing::default()
    }
}

impl Machine {
    fn new(vcpus: usize) -> Self {
        let vcpu = Vcpu {
            thread: Thread::New,
            flag: false,
            kicked: false,
        };
        Self {
            barrier: Barrier::new(vcpus),
            vcpus: vec![vcpu; vcpus],
            wanted: Wanted {
                held: vec![false; vcpus],
                nmi: vec![false; vcpus],
                ..Wanted::default()
            },
            applying: false,
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Step(index) => self.step(index),
            Event::Leave(index) => {
                if self.vcpus[index].thread == Thread::Running {
                    self.barrier.leave(index);
                    self.vcpus[index].thread = Thread::Gone;
                }
            }
            Event::Begin if !self.wanted.transaction => {
                self.barrier.begin();
                self.wanted.transaction = true;
            }
            Event::Begin => {}
            Event::Finish => {
                self.barrier.finish();
                self.wanted.transaction = false;
                self.applying = false;
            }
            Event::Pause => {
                let began = self.barrier.pause();
                assert_eq!(began, !self.wanted.paused);
                self.wanted.paused = true;
            }
            Event::Resume => {
                self.barrier.resume();
                self.wanted.paused = false;
            }
            Event::Hold(index) => {
                self.barrier.hold(index);
                self.wanted.held[index] = true;
            }
            Event::Release(index) => {
                self.barrier.release(index);
                self.wanted.held[index] = false;
            }
            Event::Nmi(index) => {
                self.barrier.send_nmi(index);
                self.wanted.nmi[index] = true;
            }
            Event::End => {
                self.barrier.end();
                self.wanted.ended = true;
            }
        }
        let vcpus = &mut self.vcpus;
        self.barrier.asks(|index, wanted| {
            assert_ne!(vcpus[index].flag, wanted, "told twice");
            vcpus[index].flag = wanted;
            vcpus[index].kicked |= wanted && vcpus[index].thread == Thread::Running;
        });
        if self.wanted.transaction && self.barrier.stopped() == Stopped::Yes {
            self.applying = true;
        }
    }

    /// Does what the thread of vCPU `index` does between two waits.
    fn step(&mut self, index: usize) {
        let thread = self.vcpus[index].thread;
        match thread {
            Thread::New => self.barrier.park(index, None),
            Thread::Running if self.vcpus[index].flag => {
                self.take_nmi(index);
                if !self.barrier.must_park(index) {
                    return;
                }
                self.barrier.park(index, Some(standing(index)));
            }
            Thread::Waiting => {}
            Thread::Running | Thread::Gone => return,
        }
        let vcpu = &mut self.vcpus[index];
        vcpu.thread = match self.barrier.proceed(index) {
            Proceed::Run => Thread::Running,
            Proceed::Stay => Thread::Waiting,
            Proceed::End => Thread::Gone,
        };
        vcpu.kicked = false;
        if vcpu.thread == Thread::Running {
            self.take_nmi(index);
        }
    }

    /// Takes the pending NMI as the vCPU's thread does, and checks that one is pending exactly if one was sent.
    fn take_nmi(&mut self, index: usize) {
        let waits = std::mem::take(&mut self.wanted.nmi[index]);
        assert_eq!(self.barrier.take_nmi(index), waits, "NMI of {index}");
    }

    fn check(&self) {
        let wanted = &self.wanted;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            let kept = wanted.transaction || wanted.paused || wanted.held[index];
            let running = vcpu.thread == Thread::Running;
            assert_eq!(
                vcpu.flag,
                kept || wanted.ended || wanted.nmi[index],
                "flag of {index}"
            );
            if running && vcpu.flag {
                assert!(vcpu.kicked, "{index} runs on and knows of nothing");
            }
            assert!(!(running && self.applying), "{index} runs in a change");
        }
        let running = self.vcpus.iter().position(|v| v.thread == Thread::Running);
        match self.barrier.stopped() {
            Stopped::Yes => assert_eq!(running, None),
            Stopped::Not(index) => assert_eq!(running, Some(index)),
            Stopped::Over => {
                assert!(wanted.ended || self.vcpus.iter().all(|v| v.thread == Thread::Gone));
            }
        }
        for standing in self.barrier.standings() {
            let index = usize::try_from(standing.regs.rip).expect("an index");
            assert_eq!(self.vcpus[index].thread, Thread::Waiting);
        }
    }

    fn everyone(&mut self, is: Thread) {
        for index in 0..self.vcpus.len() {
            // The first step takes the vCPU out of the guest, if it runs and was asked. The second lets a parked
            // vCPU act on the barrier's decision.
            self.happen(Event::Step(index));
            self.happen(Event::Step(index));
            self.check();
            let thread = self.vcpus[index].thread;
            assert!(thread == is || thread == Thread::Gone, "{index} {thread:?}");
        }
    }
}

fn run(events: &[Event]) -> Machine {
    let mut machine = Machine::new(3);
    machine.check();
    for event in events {
        machine.happen(*event);
        machine.check();
    }
    machine
}

/// Removes [`Event::End`], after which no vCPU runs any more.
fn without_end(events: Vec<Event>) -> Vec<Event> {
    let lasts = |event: &Event| !matches!(event, Event::End);
    events.into_iter().filter(lasts).collect()
}

proptest! {
    #[test]
    fn what_must_hold_holds_in_every_order(events in events(3)) {
        run(&events);
    }

    #[test]
    fn after_the_end_every_vcpu_ends(events in events(3)) {
        let mut machine = run(&events);
        machine.happen(Event::End);
        machine.everyone(Thread::Gone);
    }

    #[test]
    fn when_nothing_is_wanted_every_vcpu_runs(events in events(3)) {
        let mut machine = run(&without_end(events));
        machine.happen(Event::Finish);
        machine.happen(Event::Resume);
        for index in 0..3 {
            machine.happen(Event::Release(index));
        }
        machine.everyone(Thread::Running);
    }

    #[test]
    fn a_pause_survives_transactions(events in events(3)) {
        let mut machine = run(&without_end(events));
        machine.happen(Event::Pause);
        machine.everyone(Thread::Waiting);
        machine.happen(Event::Begin);
        machine.happen(Event::Finish);
        machine.everyone(Thread::Waiting);
    }
}

#[test]
fn only_vcpus_that_have_run_have_a_standing() {
    let mut barrier = Barrier::new(4);
    for index in 0..3 {
        barrier.park(index, None);
        assert_eq!(barrier.proceed(index), Proceed::Run);
    }
    barrier.begin();
    barrier.park(0, Some(standing(0)));
    barrier.park(1, Some(standing(1)));
    barrier.leave(2);
    // 2 has ended, 3 has not started.
    assert_eq!(barrier.stopped(), Stopped::Yes);
    assert_eq!(barrier.standings(), [standing(0), standing(1)]);
}
