use super::*;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// Maximum time that a vCPU waits in these tests.
const SHORT: Duration = Duration::from_millis(50);

/// Waits, with `wake` in place of the collector. Returns whether another attempt makes sense, and how often `wake`
/// was called.
fn wait(room: impl Fn() -> Headroom, is_called: impl Fn() -> bool) -> (bool, usize) {
    let waiting = Waiting {
        longest: SHORT,
        ..Waiting::default()
    };
    let woken = Cell::new(0);
    let is_worth_it = waiting.wait(room, is_called, || {
        woken.set(woken.get() + 1);
        waiting.look_again();
    });
    (is_worth_it, woken.get())
}

#[test]
fn plenty_of_room_is_not_waited_for() {
    assert_eq!(wait(|| Headroom::Plenty, || false), (true, 0));
}

#[test]
fn whoever_is_called_goes_at_once() {
    assert_eq!(wait(|| Headroom::None, || true), (true, 0));
}

#[test]
fn some_room_will_do_after_a_while_and_none_never() {
    let since = Instant::now();
    let (is_worth_it, woken) = wait(|| Headroom::Scant, || false);
    assert!(is_worth_it && woken > 0);
    let after = since.elapsed();
    assert!(after >= FOR_PLENTY, "{after:?}");
    let since = Instant::now();
    let (is_worth_it, _) = wait(|| Headroom::None, || false);
    assert!(!is_worth_it && since.elapsed() >= SHORT);
}

#[test]
fn room_that_another_takes_at_once_is_worth_another_try() {
    let (waiting, was_scant) = (Waiting::default(), Cell::new(false));
    // There is no room for twice the time that a vCPU waits for plenty. Then one check finds scant room, and later
    // checks would find none again.
    let since = Instant::now();
    let room = || match since.elapsed() > 2 * FOR_PLENTY && !was_scant.replace(true) {
        true => Headroom::Scant,
        false => Headroom::None,
    };
    assert!(waiting.wait(room, || false, || waiting.look_again()));
    assert!(was_scant.get());
}

#[test]
fn room_that_is_made_meanwhile_is_seen() {
    let (waiting, looks) = (Waiting::default(), AtomicUsize::new(0));
    let (is_made, (ask, is_asked)) = (AtomicBool::new(false), mpsc::channel());
    thread::scope(|scope| {
        let (waiting, is_made) = (&waiting, &is_made);
        scope.spawn(move || {
            is_asked.recv_timeout(LONGEST).expect("room is asked for");
            is_made.store(true, Ordering::Release);
            waiting.look_again();
        });
        let room = || {
            looks.fetch_add(1, Ordering::Relaxed);
            match is_made.load(Ordering::Acquire) {
                true => Headroom::Plenty,
                false => Headroom::None,
            }
        };
        let is_worth_it = waiting.wait(room, || false, || ask.send(()).expect("it is waited for"));
        assert!(is_worth_it);
    });
    // The vCPU does not poll.
    assert!(looks.into_inner() <= 3);
}

#[test]
fn nobody_is_entered_twice() {
    let waiting = Waiting::default();
    for _ in 0..3 {
        assert!(waiting.wait(|| Headroom::Plenty, || false, || ()));
    }
    assert_eq!(waiting.threads().len(), 1);
}
