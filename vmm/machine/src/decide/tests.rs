//! Tests [`Decisions`] between threads that ask and threads that answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, EventKind};
use hvprobe_spec::{CAPTURE_MAX, Change, RegisterSet, Then};

use super::*;

/// A time longer than any test takes. A wait of that length has failed.
const LONG: Duration = Duration::from_secs(120);

/// Waits for the next question, and returns it.
fn next(client: &mut Asker) -> Option<Question> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    let next = async { tokio::time::timeout(LONG, client.next()).await };
    runtime.block_on(next).expect("no question, and no end")
}

fn event(probe: u32) -> Event {
    Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(probe),
        vcpu: 0,
        host_ns: 1000,
        guest_tsc: 0,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 0,
    }
}

fn returning(value: u64) -> Decision {
    Decision {
        then: Then::Return(value),
        ..Decision::default()
    }
}

/// Asks as a vCPU whose attention is not requested. Returns the decision; `None` stands for the default.
fn ask(decisions: &Decisions, probe: u32, within: Duration) -> Option<Decision> {
    match decisions.ask(event(probe), within)?.wait(|| false) {
        Reply::Decided(decision) => Some(decision),
        Reply::Unanswered => None,
        Reply::Interrupted(_) => panic!("nothing wants attention"),
    }
}

fn too_late(token: Token) -> Result<(), AnswerError> {
    Err(AnswerError::TooLate(token))
}

#[test]
fn an_answer_reaches_the_vcpu_that_asked() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(vec![ProbeId(1), ProbeId(2)]);
    thread::scope(|scope| {
        let first = scope.spawn(|| ask(&decisions, 1, LONG));
        let second = scope.spawn(|| ask(&decisions, 2, LONG));
        let questions = [(); 2].map(|()| next(&mut client).expect("it asks"));
        for question in questions.iter().rev() {
            let probe = u64::from(question.event.probe.0);
            assert_eq!(question.deadline_ns, 120_000_001_000);
            assert_eq!(client.answer(question.token, returning(probe)), Ok(()));
            // A question can be answered only once.
            let again = client.answer(question.token, returning(7));
            assert_eq!(again, too_late(question.token));
        }
        assert_eq!(first.join().expect("no panic"), Some(returning(1)));
        assert_eq!(second.join().expect("no panic"), Some(returning(2)));
    });
    assert_eq!(decisions.counts().answered, 2);
    assert!(decisions.state().open.is_empty());
}

#[test]
fn a_question_nobody_wants_is_unanswered_at_once() {
    let decisions = Decisions::default();
    assert_eq!(ask(&decisions, 1, LONG), None);
    let _other = decisions.attach(vec![ProbeId(2)]);
    assert_eq!(ask(&decisions, 1, LONG), None);
    assert_eq!(decisions.counts().unattended, 2);
}

#[test]
fn a_deadline_that_passes_leaves_the_default_and_no_open_question() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    let within = Duration::from_millis(5);
    let since = Instant::now();
    assert_eq!(ask(&decisions, 1, within), None);
    assert!(since.elapsed() >= within);
    let question = next(&mut client).expect("it asked");
    let late = client.answer(question.token, returning(1));
    assert_eq!(late, too_late(question.token));
    assert_eq!(decisions.counts().expired, 1);
    assert_eq!(decisions.counts().answered, 0);
}

#[test]
fn a_client_that_misses_deadlines_one_after_another_is_dropped() {
    let soon = Duration::from_millis(1);
    let decisions = Decisions::default();
    let mut frozen = decisions.attach(vec![ProbeId(1)]);
    for _ in 0..MISSES {
        assert!(!frozen.was_dropped());
        assert_eq!(ask(&decisions, 1, soon), None);
    }
    assert!(frozen.was_dropped());
    // The client costs the guest no deadline any more, and others are asked.
    let since = Instant::now();
    assert_eq!(ask(&decisions, 1, LONG), None);
    assert!(since.elapsed() < LONG, "the dropped client was asked");
    let counts = decisions.counts();
    assert_eq!((counts.expired, counts.unattended), (u64::from(MISSES), 1));
    for _ in 0..MISSES {
        next(&mut frozen).expect("it was asked");
    }
    assert_eq!(next(&mut frozen), None, "its stream ends");
    decisions.close();
    assert!(
        !decisions.attach(Vec::new()).was_dropped(),
        "the machine has ended"
    );
}

#[test]
fn an_answer_makes_up_for_missed_deadlines_and_those_of_one_time_are_one() {
    let soon = Duration::from_millis(1);
    let decisions = Decisions::default();
    let mut slow = decisions.attach(Vec::new());
    for _ in 0..3 {
        for _ in 1..MISSES {
            assert_eq!(ask(&decisions, 1, soon), None);
            next(&mut slow).expect("it was asked");
        }
        let asked = decisions.ask(event(1), LONG).expect("it is not dropped");
        let question = next(&mut slow).expect("it is asked");
        assert_eq!(slow.answer(question.token, returning(1)), Ok(()));
        assert!(matches!(asked.wait(|| false), Reply::Decided(_)));
    }
    // Several vCPUs ask at the same time.
    let open = [(); 8].map(|()| decisions.ask(event(1), soon).expect("it is not dropped"));
    for asked in open {
        assert!(matches!(asked.wait(|| false), Reply::Unanswered));
    }
    assert!(!slow.was_dropped());
}

#[test]
fn questions_that_are_open_when_a_client_is_dropped_fall_to_the_default() {
    let decisions = Decisions::default();
    let _frozen = decisions.attach(Vec::new());
    thread::scope(|scope| {
        let (asked, was_asked) = mpsc::channel();
        let decisions = &decisions;
        let other = scope.spawn(move || {
            let open = decisions.ask(event(2), LONG).expect("a client");
            asked.send(()).expect("the test waits");
            matches!(open.wait(|| false), Reply::Unanswered)
        });
        was_asked.recv_timeout(LONG).expect("it asks");
        for _ in 0..MISSES {
            assert_eq!(ask(decisions, 1, Duration::from_millis(1)), None);
        }
        assert!(other.join().expect("no panic"));
    });
    let counts = decisions.counts();
    assert_eq!((counts.expired, counts.unattended), (u64::from(MISSES), 1));
}

#[test]
fn an_answer_after_the_deadline_is_too_late_even_if_the_vcpu_has_not_looked() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    let asked = decisions.ask(event(1), Duration::ZERO).expect("a client");
    let question = next(&mut client).expect("it asked");
    let late = client.answer(question.token, returning(1));
    assert_eq!(late, too_late(question.token));
    assert!(matches!(asked.wait(|| true), Reply::Unanswered));
}

#[test]
fn a_client_that_goes_frees_its_questions_and_no_others() {
    let decisions = Decisions::default();
    let mut leaves = decisions.attach(vec![ProbeId(1)]);
    let mut stays = decisions.attach(vec![ProbeId(2)]);
    thread::scope(|scope| {
        let freed = scope.spawn(|| ask(&decisions, 1, LONG));
        let open = scope.spawn(|| ask(&decisions, 2, LONG));
        next(&mut leaves).expect("it asks");
        let question = next(&mut stays).expect("it asks");
        drop(leaves);
        assert_eq!(freed.join().expect("no panic"), None);
        assert_eq!(stays.answer(question.token, returning(2)), Ok(()));
        assert_eq!(open.join().expect("no panic"), Some(returning(2)));
    });
    assert_eq!(ask(&decisions, 1, LONG), None, "nobody is left for it");
}

#[test]
fn only_the_client_that_was_asked_can_answer_and_they_take_turns() {
    let decisions = Decisions::default();
    let mut clients = [(); 2].map(|()| decisions.attach(Vec::new()));
    for turn in [0, 1, 0] {
        let asked = decisions.ask(event(1), LONG).expect("a client");
        let question = next(&mut clients[turn]).expect("its turn");
        let other = clients[1 - turn].answer(question.token, returning(1));
        assert_eq!(other, too_late(question.token));
        assert_eq!(clients[turn].answer(question.token, returning(2)), Ok(()));
        assert!(matches!(asked.wait(|| false), Reply::Decided(d) if d == returning(2)));
    }
}

#[test]
fn a_client_that_takes_no_questions_is_not_asked_more_than_it_has_room_for() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    let first = decisions.ask(event(1), LONG).expect("there is room");
    for _ in 1..QUEUE {
        assert!(decisions.ask(event(1), LONG).is_some());
    }
    assert!(decisions.ask(event(2), LONG).is_none());
    let question = next(&mut client).expect("it asked");
    assert_eq!(client.answer(question.token, returning(1)), Ok(()));
    assert!(matches!(first.wait(|| false), Reply::Decided(_)));
    assert!(decisions.ask(event(2), LONG).is_some());
}

#[test]
fn a_vcpu_whose_attention_is_wanted_parks_and_waits_on() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    let attention = AtomicBool::new(false);
    let (parked, parks) = mpsc::channel();
    let (go, goes) = mpsc::channel();
    thread::scope(|scope| {
        let attention = &attention;
        let vcpu = scope.spawn({
            let decisions = &decisions;
            move || {
                let mut asked = decisions.ask(event(1), LONG).expect("a client");
                loop {
                    match asked.wait(|| attention.load(Ordering::Acquire)) {
                        Reply::Decided(decision) => return decision,
                        Reply::Unanswered => panic!("the client is there"),
                        Reply::Interrupted(again) => {
                            asked = again;
                            parked.send(()).expect("the test waits");
                            goes.recv_timeout(LONG).expect("the test lets it go on");
                        }
                    }
                }
            }
        });
        let question = next(&mut client).expect("it asks");
        for _ in 0..100 {
            attention.store(true, Ordering::Release);
            vcpu.thread().unpark();
            parks.recv_timeout(LONG).expect("it parks");
            attention.store(false, Ordering::Release);
            go.send(()).expect("it waits");
        }
        attention.store(true, Ordering::Release);
        vcpu.thread().unpark();
        parks.recv_timeout(LONG).expect("it parks");
        // The vCPU is parked now.
        assert_eq!(client.answer(question.token, returning(3)), Ok(()));
        go.send(()).expect("it waits");
        assert_eq!(vcpu.join().expect("no panic"), returning(3));
    });
}

#[test]
fn a_question_that_is_dropped_is_not_open() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    drop(decisions.ask(event(1), LONG));
    let question = next(&mut client).expect("it asked");
    let late = client.answer(question.token, returning(1));
    assert_eq!(late, too_late(question.token));
}

#[test]
fn a_decision_beyond_the_limits_is_refused_and_the_question_stays_open() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    let asked = decisions.ask(event(1), LONG).expect("a client");
    let question = next(&mut client).expect("it asked");
    let monster = Decision {
        changes: vec![Change::Memory {
            base: None,
            offset: 0,
            bytes: vec![0; CAPTURE_MAX + 1].into(),
        }],
        ..Decision::default()
    };
    let refused = client.answer(question.token, monster);
    assert!(
        matches!(refused, Err(AnswerError::Invalid(_))),
        "{refused:?}"
    );
    assert_eq!(client.answer(question.token, returning(1)), Ok(()));
    assert!(matches!(asked.wait(|| false), Reply::Decided(_)));
}

#[test]
fn the_end_of_the_machine_ends_streams_and_frees_questions() {
    let decisions = Decisions::default();
    let mut client = decisions.attach(Vec::new());
    thread::scope(|scope| {
        let vcpu = scope.spawn(|| ask(&decisions, 1, LONG));
        next(&mut client).expect("it asks");
        decisions.close();
        assert_eq!(vcpu.join().expect("no panic"), None);
    });
    assert_eq!(next(&mut client), None);
    assert_eq!(next(&mut decisions.attach(Vec::new())), None);
    assert_eq!(ask(&decisions, 1, LONG), None);
}

#[test]
fn every_question_comes_to_an_end_while_clients_come_and_go() {
    const VCPUS: u32 = 4;
    const ROUNDS: u32 = 500;
    let decisions = Decisions::default();
    let over = AtomicBool::new(false);
    let decided = AtomicU64::new(0);
    thread::scope(|scope| {
        for patience in 1..4 {
            let (decisions, over) = (&decisions, &over);
            scope.spawn(move || {
                // The client leaves while one question is unanswered and others may be in its queue, and attaches
                // again.
                while !over.load(Ordering::Relaxed) {
                    let mut client = decisions.attach(Vec::new());
                    for _ in 0..patience * 5 {
                        let Some(question) = next(&mut client) else {
                            return;
                        };
                        let value = u64::from(question.event.probe.0);
                        // The question is open: deadlines are long, and no vCPU gives up.
                        let answered = client.answer(question.token, returning(value));
                        assert_eq!(answered, Ok(()));
                    }
                    next(&mut client);
                }
            });
        }
        let vcpus: Vec<_> = (0..VCPUS)
            .map(|index| {
                let (decisions, decided) = (&decisions, &decided);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let probe = index * ROUNDS + round;
                        if let Some(decision) = ask(decisions, probe, LONG) {
                            assert_eq!(decision, returning(u64::from(probe)));
                            decided.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        for vcpu in vcpus {
            vcpu.join().expect("every question ends");
        }
        over.store(true, Ordering::Relaxed);
        decisions.close();
    });
    let counts = decisions.counts();
    assert_eq!(counts.answered, decided.into_inner());
    let asked = u64::from(VCPUS * ROUNDS);
    assert_eq!(counts.answered + counts.unattended, asked);
    assert!(decisions.state().open.is_empty());
}
