//! A client that reconnects repeatedly gets each event once, or the number of missing ones.

use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, Event, EventKind};
use hvprobe_linux::task::Task;
use hvprobe_machine::Listen as _;
use hvprobe_spec::{ProbeId, RegisterSet};
use proptest::prelude::*;
use prost::Message as _;
use tokio::runtime::Runtime;

use super::*;
use crate::events::broadcast::{Broadcast, Limits, Listener};
use crate::events::wanted::Wanted;

/// Number of yields after which the feed has checked all held events of a machine.
const LOOKS: usize = 4000;

/// Limits of the machine's events: a few messages.
const LIMITS: Limits = Limits {
    waiting: 1 << 20,
    held: 1 << 20,
};

/// A step of a test: something happens to a machine's events, or to their client.
#[derive(Clone, Debug)]
enum Step {
    /// This many events arrive; before them, this many were dropped in the machine.
    Hear(u64, u64),
    /// More events arrive than can wait for a client that does not read.
    Flood,
    /// The client reads this many messages, if there are any.
    Read(usize),
    /// The client's connection breaks. It processes this many events of the last message that it reads.
    Break(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..5_u64, prop_oneof![3 => Just(0), 1 => 1..4_u64]).prop_map(|(n, lost)| Step::Hear(n, lost)),
        1 => Just(Step::Flood),
        6 => (1..4_usize).prop_map(Step::Read),
        3 => (0..4_u64).prop_map(Step::Break),
    ]
}

/// Returns an event. Every third one is of task 1.
fn event(seq: u64) -> Event {
    let pid = i32::from(seq.is_multiple_of(3));
    Event {
        kind: EventKind::Hit,
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        seq,
        probe: ProbeId(1),
        vcpu: 0,
        host_ns: 0,
        guest_tsc: 0,
        regs: Regs::default(),
        task: Some(Task {
            pid,
            tgid: pid,
            comm: [0; 16],
        }),
        cost_ns: 0,
    }
}

/// Decodes a message as a client does.
fn read(message: Message) -> v1::SubscribeResponse {
    let mut bytes = message.head.encode_to_vec();
    for events in message.events {
        bytes.extend_from_slice(&events);
    }
    v1::SubscribeResponse::decode(&bytes[..]).expect("a message")
}

struct Machine {
    listener: Listener,
    events: u64,
    dropped: u64,
}

impl Machine {
    fn hear(&mut self, count: u64, dropped: u64) {
        let events: Vec<_> = (self.events..self.events + count).map(event).collect();
        self.listener.hear(&events, dropped);
        self.events += count;
        self.dropped += dropped;
    }
}

/// A client that remembers its position.
struct Client {
    broadcast: Broadcast,
    wanted: Arc<Wanted>,
    runtime: Runtime,
    from: Option<mpsc::Receiver<Result<Message, Status>>>,
    position: Option<v1::Position>,
    seen: Vec<u64>,
    dropped: u64,
    missed: u64,
}

impl Client {
    fn connect(&mut self) {
        let after = self.position.as_ref().map(Position::from);
        let events = self.broadcast.subscribe(Arc::clone(&self.wanted), after);
        let events = events.expect("a position that was told");
        let (to_client, from) = mpsc::channel(2);
        let feed = Feed::new(Origin::Published("m".into()), to_client);
        self.runtime.spawn(feed.run(Some(events)));
        self.from = Some(from);
    }

    /// Returns the next message, if there is one before the machine has further events.
    fn next(&mut self) -> Option<v1::SubscribeResponse> {
        if self.from.is_none() {
            self.connect();
        }
        let from = self.from.as_mut()?;
        let message = self.runtime.block_on(async {
            // The feed runs on this thread, and has sent everything available when it waits. It checks held events
            // in many steps.
            for _ in 0..LOOKS {
                tokio::task::yield_now().await;
                if let Ok(message) = from.try_recv() {
                    return Some(message);
                }
            }
            None
        });
        Some(read(message?.expect("no error")))
    }

    /// Processes `message` and remembers its position.
    fn take(&mut self, message: &v1::SubscribeResponse) {
        self.dropped += message.dropped;
        self.missed += message.missed;
        self.seen
            .extend(message.events.iter().map(|event| event.seq));
        self.position = message.position.clone().or(self.position.take());
    }

    /// Processes `count` events of `message`, and remembers the position after them.
    fn take_part(&mut self, mut message: v1::SubscribeResponse, count: u64) {
        let count = usize::try_from(count).expect("a few");
        if count < message.events.len() {
            let position = message.position.as_mut().expect("a position");
            match count {
                0 => position.seq = message.events[0].seq,
                _ => position.seq = message.events[count - 1].seq + 1,
            }
            message.events.truncate(count);
        }
        self.take(&message);
    }
}

/// Runs `steps`. Returns the client and the machine, both of which have ended.
fn run(steps: &[Step], wanted: Wanted) -> (Client, Machine) {
    let broadcast = Broadcast::limited(LIMITS);
    let mut machine = Machine {
        listener: broadcast.listener(),
        events: 0,
        dropped: 0,
    };
    let runtime = tokio::runtime::Builder::new_current_thread();
    let mut client = Client {
        broadcast,
        wanted: wanted.into(),
        runtime: { runtime }.build().expect("a runtime"),
        from: None,
        position: None,
        seen: Vec::new(),
        dropped: 0,
        missed: 0,
    };
    let first = client.next().expect("the first message");
    client.take(&first);
    for step in steps {
        match step {
            Step::Hear(count, dropped) => machine.hear(*count, *dropped),
            Step::Flood => {
                for _ in 0..12 {
                    machine.hear(1000, 1);
                }
            }
            Step::Read(count) => {
                for _ in 0..*count {
                    if let Some(message) = client.next() {
                        client.take(&message);
                    }
                }
            }
            Step::Break(part) => {
                if let Some(message) = client.next() {
                    client.take_part(message, *part);
                }
                client.from = None;
            }
        }
    }
    while let Some(message) = client.next() {
        client.take(&message);
    }
    (client, machine)
}

/// Runs an eighth of the requested number of cases, because a case has thousands of events: 32 by default.
fn cases() -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig {
        cases: asked.cases / 8,
        ..asked
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn each_event_comes_once_or_is_reported_missing(steps in proptest::collection::vec(any_step(), 0..60)) {
        let (client, machine) = run(&steps, Wanted::default());
        prop_assert!(client.seen.is_sorted_by(|one, other| one < other), "{:?}", client.seen);
        prop_assert_eq!(
            client.seen.len() as u64 + client.dropped + client.missed,
            machine.events + machine.dropped
        );
        let end = Position { seq: machine.events, dropped: machine.dropped };
        prop_assert_eq!(client.position.as_ref().map(Position::from), Some(end));
    }

    #[test]
    fn a_filter_changes_nothing_about_that(steps in proptest::collection::vec(any_step(), 0..60)) {
        let wanted = Wanted { pids: [1].into(), ..Wanted::default() };
        let (client, machine) = run(&steps, wanted);
        prop_assert!(client.seen.is_sorted_by(|one, other| one < other), "{:?}", client.seen);
        prop_assert!(client.seen.iter().all(|seq| seq.is_multiple_of(3)));
        let of_its_own = machine.events.div_ceil(3);
        let accounted = client.seen.len() as u64 + client.dropped;
        prop_assert!(accounted <= of_its_own + machine.dropped);
        // The client may not have wanted all events that it missed.
        prop_assert!(accounted + client.missed >= of_its_own + machine.dropped);
    }
}

#[test]
fn a_break_without_a_gap_loses_and_repeats_nothing() {
    let steps = [
        Step::Hear(3, 0),
        Step::Read(1),
        Step::Hear(4, 2),
        Step::Break(2),
        Step::Hear(4, 1),
    ];
    let (client, _) = run(&steps, Wanted::default());
    assert_eq!(client.seen, (0..11).collect::<Vec<_>>());
    assert_eq!((client.dropped, client.missed), (3, 0));
}

/// It makes no difference where the client breaks off among the events before the lost ones.
#[test]
fn what_was_lost_is_reported_once_wherever_a_client_breaks_off() {
    /// More messages than wait for a client after a flood.
    const MESSAGES: usize = 10;
    let mut most_lost = 0;
    for read in 0..MESSAGES {
        let steps = [Step::Flood, Step::Read(read), Step::Break(0)];
        let (client, machine) = run(&steps, Wanted::default());
        let lost = client.dropped + client.missed;
        let accounted = client.seen.len() as u64 + lost;
        assert_eq!(accounted, machine.events + machine.dropped, "{read}");
        most_lost = most_lost.max(lost - machine.dropped);
    }
    assert!(most_lost > 0, "the flood is too small");
}
