use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, EventKind};
use hvprobe_linux::task::Task;
use hvprobe_proto::v1::{SubscribeRequest, SubscribeResponse};
use hvprobe_spec::{ProbeId, RegisterSet};
use prost::Message as _;

use super::*;
use crate::events::held::HELD;
use crate::services::wanted::wanted;

fn event(probe: u32) -> Event {
    Event {
        kind: EventKind::Hit,
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        seq: 0,
        probe: ProbeId(probe),
        vcpu: 0,
        host_ns: 0,
        guest_tsc: 0,
        regs: Regs::default(),
        task: None,
        cost_ns: 0,
    }
}

/// Makes a batch of events of one probe, numbered from `first`.
fn numbered(first: u64, count: u64) -> Vec<Event> {
    let event = |seq| Event { seq, ..event(1) };
    (first..first + count).map(event).collect()
}

/// Subscribes to the events of `probes`, or of all probes if empty, from now on.
fn subscribe(broadcast: &Broadcast, probes: &[u32]) -> Subscription {
    let subscribed = broadcast.subscribe(Wanted::of_probes(probes), None);
    subscribed.expect("a position that can be")
}

/// Subscribes to all events, from `seq` on.
fn resume(broadcast: &Broadcast, seq: u64) -> Subscription {
    let after = Position { seq, dropped: 0 };
    let resumed = broadcast.subscribe(Wanted::default(), Some(after));
    resumed.expect("a position that was reached")
}

/// Returns the numbers of the events that can be taken without waiting.
fn numbers(from: &mut Subscription) -> Vec<u64> {
    let mut numbers = Vec::new();
    while let Some(taken) = from.try_next() {
        let events = taken.item.map(|encoded| encoded.events).unwrap_or_default();
        let message = SubscribeResponse::decode(events).expect("a message");
        numbers.extend(message.events.iter().map(|event| event.seq));
    }
    numbers
}

/// Returns the probes of the next events, and the number of events lost before them.
fn next(from: &mut Subscription) -> Option<(Vec<u32>, u64)> {
    let taken = from.queue.blocking_next()?;
    let events = taken.item.map(|encoded| encoded.events).unwrap_or_default();
    let message = SubscribeResponse::decode(events).expect("a message");
    let probes = message.events.iter().map(|event| event.probe).collect();
    Some((probes, taken.lost.count))
}

#[test]
fn batch_is_shared_by_all_who_want_all_of_it() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut clients = [subscribe(&broadcast, &[]), subscribe(&broadcast, &[])];
    listener.hear(&[event(3), event(1), event(3)], 0);
    let taken = clients.each_mut().map(|from| from.try_next());
    let [one, other] = taken.map(|taken| taken.and_then(|taken| taken.item).expect("a batch"));
    assert_eq!(one.events.as_ptr(), other.events.as_ptr());
    assert_eq!(*one.probes, [1, 3]);
}

#[test]
fn filter_lets_only_its_probes_through_and_losses_of_the_machine_reach_all() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut filtered = subscribe(&broadcast, &[2]);
    let mut all = subscribe(&broadcast, &[]);
    listener.hear(&[event(1), event(2), event(3)], 0);
    listener.hear(&[event(1)], 7);
    drop(listener);
    assert_eq!(next(&mut filtered), Some((vec![2], 0)));
    assert_eq!(next(&mut filtered), Some((vec![], 7)));
    assert_eq!(next(&mut filtered), None);
    assert_eq!(next(&mut all), Some((vec![1, 2, 3], 0)));
    assert_eq!(next(&mut all), Some((vec![1], 7)));
    assert_eq!(next(&mut all), None);
    // A client that comes too late finds the end of the stream.
    assert_eq!(next(&mut subscribe(&broadcast, &[])), None);
}

#[test]
fn client_that_never_reads_costs_a_bounded_number_of_bytes_and_knows_what_it_lost() {
    /// Number of batches that arrive: many times as many as may wait.
    const BATCHES: u64 = 500;
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut stuck = subscribe(&broadcast, &[]);
    let batch: Vec<_> = (0..1000).map(event).collect();
    for _ in 0..BATCHES {
        listener.hear(&batch, 0);
        assert!(broadcast.state().clients[0].queue.waiting() <= WAITING);
    }
    drop(listener);
    let (mut bytes, mut events, mut lost) = (0, 0, 0);
    while let Some(taken) = stuck.try_next() {
        lost += taken.lost.count;
        if let Some(encoded) = taken.item {
            bytes += encoded.weight();
            events += batch.len() as u64;
        }
    }
    assert!(bytes > WAITING / 2 && bytes <= WAITING, "{bytes}");
    assert_eq!(events + lost, BATCHES * batch.len() as u64);
}

#[test]
fn client_that_left_is_forgotten() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    drop(subscribe(&broadcast, &[]));
    listener.hear(&[event(1)], 0);
    assert!(broadcast.state().clients.is_empty());
}

#[test]
fn clients_that_come_and_go_without_an_event_leave_nothing() {
    let broadcast = Broadcast::default();
    let _listener = broadcast.listener();
    for _ in 0..100 {
        drop(subscribe(&broadcast, &[]));
    }
    let _last = subscribe(&broadcast, &[]);
    assert_eq!(broadcast.state().clients.len(), 1);
}

#[test]
fn nothing_is_encoded_or_held_before_there_was_a_client() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    listener.hear(&numbered(0, 5), 2);
    assert_eq!(broadcast.state().held.weight(), 0);
    let mut from = resume(&broadcast, 1);
    assert_eq!((from.missed, from.dropped), (4, 2));
    assert_eq!(from.start, Position { seq: 5, dropped: 2 });
    listener.hear(&numbered(5, 1), 0);
    assert_eq!(numbers(&mut from), [5]);
}

#[test]
fn who_comes_back_gets_what_is_held_from_the_middle_of_a_batch_on() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    drop(subscribe(&broadcast, &[]));
    listener.hear(&numbered(0, 3), 0);
    listener.hear(&numbered(3, 3), 0);
    listener.hear(&[], 9);
    let mut from = resume(&broadcast, 4);
    assert_eq!((from.missed, from.dropped), (0, 9));
    assert_eq!(from.start, Position { seq: 4, dropped: 9 });
    listener.hear(&numbered(6, 1), 0);
    assert_eq!(numbers(&mut from), [4, 5, 6]);
    let mut at_the_end = resume(&broadcast, 7);
    assert!(numbers(&mut at_the_end).is_empty());
    let beyond = Position { seq: 8, dropped: 0 };
    let refused = broadcast.subscribe(Wanted::default(), Some(beyond));
    assert_eq!(refused.err(), Some(Beyond));
    drop(listener);
    // The held events stay after the machine has ended.
    assert_eq!(numbers(&mut resume(&broadcast, 5)), [5, 6]);
}

#[test]
fn what_is_held_is_bounded_and_what_is_gone_is_counted() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let quick = subscribe(&broadcast, &[]);
    let mut made = 0;
    while made < 1_000_000 {
        listener.hear(&numbered(made, 1000), 0);
        made += 1000;
        assert!(broadcast.state().held.weight() <= HELD);
    }
    assert!(broadcast.state().held.weight() > HELD / 2);
    drop(quick);
    let mut from = resume(&broadcast, 10);
    let got = numbers(&mut from);
    assert_eq!(from.missed + got.len() as u64, made - 10);
    assert_eq!(got.first(), Some(&(10 + from.missed)));
    assert_eq!(got.last(), Some(&(made - 1)));
    drop(listener);
    let held = broadcast.state().held.weight();
    assert!(held <= HELD_OF_ENDED && held > HELD_OF_ENDED / 2, "{held}");
}

#[tokio::test]
async fn what_lists_pick_is_a_copy_of_what_was_encoded_for_all() {
    let task = |pid| {
        let comm = [0; 16];
        Some(Task {
            pid,
            tgid: pid,
            comm,
        })
    };
    let events: Vec<_> = (0..4_u32)
        .map(|number| Event {
            seq: number.into(),
            task: task(i32::try_from(number % 2).expect("a bit")),
            ..event(number)
        })
        .collect();
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let wanted = Arc::new(Wanted {
        pids: [1].into(),
        ..Wanted::default()
    });
    let subscribed = broadcast.subscribe(Arc::clone(&wanted), None);
    let mut some = subscribed.expect("a subscription");
    listener.hear(&events, 0);
    let taken = some.try_next().and_then(|taken| taken.item);
    let taken = taken.expect("a batch");
    assert_eq!(*taken.probes, [1, 3]);
    // A client that reconnects gets the same.
    let start = Some(Position::default());
    let resumed = broadcast.subscribe(wanted, start).expect("a position");
    let again = { resumed }.next().await.and_then(|taken| taken.item);
    let again = again.expect("a batch");
    assert_eq!((again.events, again.end), (taken.events, taken.end));
    assert_eq!(again.probes, taken.probes);
}

/// Selects the events on virtual CPU 1. The filter has the maximum number of comparisons.
fn dear() -> Arc<Wanted> {
    let no = ["cpu == 9"; 63].join(" || ");
    let mut request = SubscribeRequest {
        filter: format!("cpu == 1 || {no}"),
        ..SubscribeRequest::default()
    };
    Arc::new(wanted(&mut request).expect("a filter"))
}

/// Makes a batch in which every tenth event is of virtual CPU 1.
fn of_two(first: u64, count: u64) -> Vec<Event> {
    let mut events = numbered(first, count);
    for event in &mut events {
        event.vcpu = u32::from(event.seq.is_multiple_of(10));
    }
    events
}

#[tokio::test]
async fn a_filter_is_paid_for_by_who_takes_its_events_and_not_by_the_collector() {
    const CLIENTS: usize = 250;
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut all = subscribe(&broadcast, &[]);
    let wanted = dear();
    let subscribe = || broadcast.subscribe(Arc::clone(&wanted), None);
    let mut filtered: Vec<_> = (0..CLIENTS).map(|_| subscribe().expect("one")).collect();
    let begun = Instant::now();
    listener.hear(&of_two(0, 1000), 0);
    eprintln!("heard for {CLIENTS} filters in {:?}", begun.elapsed());
    // No client has looked at its queue yet.
    let waiting: Vec<_> = { broadcast.state() }
        .clients
        .iter()
        .map(|client| client.queue.waiting())
        .collect();
    assert_eq!(waiting, vec![waiting[0]; CLIENTS + 1]);
    let begun = Instant::now();
    let taken = filtered[0].next().await.expect("a batch");
    eprintln!("looked at for one of them in {:?}", begun.elapsed());
    let encoded = taken.item.expect("events");
    let message = SubscribeResponse::decode(encoded.events).expect("a message");
    let seen: Vec<_> = message.events.iter().map(|event| event.seq).collect();
    assert_eq!(seen, (0..1000).step_by(10).collect::<Vec<_>>());
    assert_eq!(numbers(&mut all).len(), 1000);
}

#[tokio::test]
async fn a_few_short_filters_leave_nothing_in_the_queues_that_nobody_wants() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let short = || {
        let mut request = SubscribeRequest {
            filter: "cpu == 1".to_owned(),
            ..SubscribeRequest::default()
        };
        wanted(&mut request).expect("a filter")
    };
    let clients = SHORT_OF_ALL + 3;
    let mut filtered: Vec<_> = (0..clients)
        .map(|_| broadcast.subscribe(short(), None).expect("one"))
        .collect();
    listener.hear(&of_two(0, 1000), 0);
    let waiting: Vec<_> = { broadcast.state() }
        .clients
        .iter()
        .map(|client| client.queue.waiting())
        .collect();
    let (few, all) = (waiting[0], waiting[clients - 1]);
    assert!(few < all / 5, "{few} of {all}");
    let expected = [vec![few; SHORT_OF_ALL], vec![all; 3]].concat();
    assert_eq!(waiting, expected);
    for client in &mut filtered {
        let taken = client.next().await.expect("a batch");
        let encoded = taken.item.expect("events");
        let message = SubscribeResponse::decode(encoded.events).expect("a message");
        assert_eq!(message.events.len(), 100);
    }
}

#[tokio::test]
async fn what_a_filter_is_too_slow_for_is_lost_to_its_own_client_alone() {
    const BATCHES: u64 = 200;
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut slow = broadcast.subscribe(dear(), None).expect("one");
    let mut all = subscribe(&broadcast, &[]);
    let mut quick = 0;
    for number in 0..BATCHES {
        listener.hear(&of_two(1000 * number, 1000), 0);
        assert!(broadcast.state().clients[0].queue.waiting() <= WAITING);
        quick += numbers(&mut all).len() as u64;
    }
    assert_eq!(quick, 1000 * BATCHES);
    drop(listener);
    let (mut seen, mut lost) = (0, 0);
    while let Some(taken) = slow.next().await {
        lost += taken.lost.count;
        let events = taken.item.map(|encoded| encoded.events).unwrap_or_default();
        let message = SubscribeResponse::decode(events).expect("a message");
        seen += message.events.len() as u64;
    }
    // Whether the lost events were wanted is unknown, because they were not looked at.
    assert!(lost > 0 && seen > 0, "{seen} seen, {lost} lost");
    assert_eq!(10 * seen + lost, 1000 * BATCHES);
}

#[tokio::test]
async fn a_filter_that_lets_nothing_pass_reports_where_the_stream_is_once_a_while() {
    let broadcast = Broadcast::default();
    let mut listener = broadcast.listener();
    let mut none = broadcast.subscribe(dear(), None).expect("one");
    let others = |first| {
        let mut events = numbered(first, 10);
        events.iter_mut().for_each(|event| event.vcpu = 0);
        events
    };
    listener.hear(&others(0), 0);
    let soon = tokio::time::timeout(Duration::from_millis(50), none.next());
    assert!(soon.await.is_err(), "nothing is to be told");
    none.last_returned = Instant::now().checked_sub(PASSING).expect("a while ago");
    listener.hear(&others(10), 0);
    let taken = none.next().await.expect("a position");
    let item = taken.item.expect("an empty batch");
    assert!(item.events.is_empty());
    assert_eq!(
        item.end,
        Position {
            seq: 20,
            dropped: 0
        }
    );
}

#[test]
fn lists_are_shared_by_all_machines_and_gone_with_the_subscription() {
    let pool = Pool::new(1 << 20);
    let machines = [(); 3].map(|()| Broadcast::within(pool.clone()));
    let listeners = machines.each_ref().map(Broadcast::listener);
    let mut wanted = Wanted::of_probes(&(0..16_384).collect::<Vec<_>>());
    let weight = wanted.weight();
    assert!((16_384 * 4..1 << 18).contains(&weight), "{weight}");
    wanted.room.extend(pool.take(weight));
    let wanted = Arc::new(wanted);
    let each = machines.each_ref().map(|machine| {
        let subscribed = machine.subscribe(Arc::clone(&wanted), None);
        subscribed.expect("one")
    });
    drop(wanted);
    assert_eq!(pool.taken(), weight);
    // No event has to arrive to detect that the clients have left.
    drop(each);
    assert_eq!(pool.taken(), 0);
    drop(listeners);
}
