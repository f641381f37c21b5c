//! Sessions and their clients, with fake machines, and a clock that advances when everything waits.

use hvprobe_machine::Owner;
use hvprobe_proto::v1::{self, RenewSession, SessionState};
use proptest::prelude::*;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use super::*;
use crate::sessions::keeper::Ticket;
use crate::sessions::owners::Owners;
use crate::status::tests::{detail, info};

mod fake;
mod pages;

use fake::Fake;

/// Longer than anything takes, by the clock of the test.
const LONG: Duration = Duration::from_secs(600);

/// A client that holds a session.
struct Client {
    id: String,
    to_server: mpsc::Sender<Result<HoldRequest, Status>>,
    answers: mpsc::Receiver<Answer>,
}

fn wants(owner: &str, ttl_ms: u32) -> OpenSession {
    OpenSession {
        owner: owner.to_owned(),
        ttl_ms,
        ..Default::default()
    }
}

impl Client {
    async fn open(sessions: &Sessions<Fake>, open: OpenSession) -> Result<Self, Status> {
        let (to_server, messages) = mpsc::channel(8);
        let what = Some(hold_request::What::Open(open));
        to_server.send(Ok(HoldRequest { what })).await.unwrap();
        let mut answers = hold(sessions, ReceiverStream::new(messages)).await?;
        let first = answers.recv().await.unwrap()?;
        let Some(hold_response::What::Opened(session)) = first.what else {
            panic!("not opened: {first:?}");
        };
        assert_eq!(session.state(), SessionState::Held);
        assert!(opened_just_now(&session, first.anchor), "{session:?}");
        Ok(Self {
            id: session.id,
            to_server,
            answers,
        })
    }

    async fn renew(&self) -> bool {
        let what = Some(hold_request::What::Renew(RenewSession {}));
        self.to_server.send(Ok(HoldRequest { what })).await.is_ok()
    }

    /// Returns how the session ended. The client's side of the stream is open until then.
    async fn ended(&mut self) -> Result<SessionEnded, Status> {
        let answer = timeout(LONG, self.answers.recv()).await.expect("an end");
        match answer.expect("a last message")?.what {
            Some(hold_response::What::Ended(ended)) => Ok(ended),
            other => panic!("not ended: {other:?}"),
        }
    }

    /// Ends the client's side of the stream.
    async fn close(mut self) -> SessionEnded {
        let (nobody, _) = mpsc::channel(1);
        self.to_server = nobody;
        self.ended().await.unwrap()
    }
}

fn new() -> (Sessions<Fake>, Owners) {
    let owners = Owners::default();
    (
        Sessions::new(1024, owners.clone(), Handle::current()),
        owners,
    )
}

fn begin(sessions: &Sessions<Fake>, id: &str, on: &Fake) -> Ticket<Fake> {
    sessions.begin(id, on).unwrap().expect("a ticket")
}

/// Registers `count` probes at once.
fn plant(sessions: &Sessions<Fake>, id: &str, on: &Fake, count: usize) -> Owner {
    let ticket = begin(sessions, id, on);
    *on.inside().probes.entry(ticket.owner).or_default() += count;
    ticket.owner
}

fn pause(sessions: &Sessions<Fake>, id: &str, on: &Fake) {
    let ticket = begin(sessions, id, on);
    on.inside().paused_by.insert(ticket.owner);
}

/// Whether `session` was opened in the last hour, by the wall clock in `anchor`.
fn opened_just_now(session: &Session, anchor: Option<v1::Anchor>) -> bool {
    let anchor = anchor.expect("an anchor");
    let since = anchor.monotonic_ns.checked_sub(session.open_ns);
    let opened = anchor.realtime_ns - since.expect("opened before the clocks were read");
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    now.abs_diff(opened.into()) < Duration::from_hours(1).as_nanos()
}

fn kind(status: &Status) -> ErrorKind {
    detail(status).kind()
}

fn listed(sessions: &Sessions<Fake>) -> Vec<Session> {
    let all = sessions.all().into_iter();
    all.map(|(_, session)| session).collect()
}

/// Waits until all sessions are gone.
async fn none_left(sessions: &Sessions<Fake>) {
    let gone = async {
        while !listed(sessions).is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = timeout(LONG, gone).await;
    in_time.unwrap_or_else(|_| panic!("left: {:?}", listed(sessions)));
}

#[tokio::test(start_paused = true)]
async fn what_a_client_had_goes_with_it() {
    let (sessions, owners) = new();
    let machine = Fake::new(1);
    let client = Client::open(&sessions, wants("me", 0)).await.unwrap();
    let owner = plant(&sessions, &client.id, &machine, 3);
    pause(&sessions, &client.id, &machine);
    let named = owners.get(owner).unwrap();
    assert_eq!((&*named.owner, &*named.session), ("me", &*client.id));
    let mut over = sessions.follow(&client.id).unwrap().unwrap();
    let ended = client.close().await;
    assert_eq!(ended.reason(), SessionEnd::Disconnected);
    let let_go = v1::LetGo {
        machine: "fake".to_owned(),
        probes: 3,
        resumed: true,
    };
    assert_eq!(ended.let_go, [let_go]);
    assert!(machine.has_nothing());
    assert_eq!(over_by(&mut over).await, SessionEnd::Disconnected);
    assert_eq!((listed(&sessions), owners.get(owner)), (vec![], None));
}

async fn over_by(over: &mut tokio::sync::watch::Receiver<Option<SessionEnd>>) -> SessionEnd {
    timeout(LONG, crate::sessions::keeper::ended(over))
        .await
        .expect("it ends")
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_frozen_for_longer_than_it_said_loses_what_it_had() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let mut client = Client::open(&sessions, wants("me", 2000)).await.unwrap();
    plant(&sessions, &client.id, &machine, 1);
    for _ in 0..10 {
        sleep(Duration::from_millis(1900)).await;
        assert!(client.renew().await);
    }
    // A message that was sent in time counts.
    sleep(Duration::from_millis(10)).await;
    assert!(!machine.has_nothing(), "it renewed the session");
    let since = Instant::now();
    let ended = client.ended().await.unwrap();
    assert_eq!(ended.reason(), SessionEnd::Expired);
    assert!(since.elapsed() <= Duration::from_millis(2100), "{since:?}");
    assert!(machine.has_nothing());
    // The client wakes up and is refused.
    let refused = sessions.begin(&client.id, &machine).unwrap_err();
    assert_eq!(kind(&refused), ErrorKind::NoSuchSession);
    assert!(sessions.follow(&client.id).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_lost_ends_the_session_without_waiting_for_its_time() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let client = Client::open(&sessions, wants("me", 3_600_000))
        .await
        .unwrap();
    plant(&sessions, &client.id, &machine, 1);
    let Client {
        to_server, answers, ..
    } = client;
    // A lost connection closes both sides of the stream; here closing one has to suffice.
    drop(answers);
    none_left(&sessions).await;
    assert!(machine.has_nothing());
    drop(to_server);
}

#[tokio::test(start_paused = true)]
async fn what_is_done_on_another_thread_when_its_client_goes_is_let_go() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let client = Client::open(&sessions, wants("me", 0)).await.unwrap();
    let ticket = begin(&sessions, &client.id, &machine);
    machine.inside().probes.insert(ticket.owner, 1);
    drop(client);
    sleep(LONG).await;
    assert!(!machine.has_nothing(), "it is not done yet");
    // A call into a machine runs and ends on a thread without a runtime.
    std::thread::spawn(move || drop(ticket)).join().unwrap();
    none_left(&sessions).await;
    assert!(machine.has_nothing());
}

#[tokio::test(start_paused = true)]
async fn what_is_kept_stays_until_it_is_taken_over() {
    let (sessions, owners) = new();
    let machine = Fake::new(1);
    let keep = OpenSession {
        keep: true,
        ..wants("first", 0)
    };
    let first = Client::open(&sessions, keep).await.unwrap();
    let (id, owner) = (first.id.clone(), plant(&sessions, &first.id, &machine, 2));
    assert_eq!(first.close().await.let_go, []);
    sleep(LONG).await;
    assert_eq!(listed(&sessions)[0].state(), SessionState::Kept);
    assert!(sessions.begin(&id, &machine).is_err(), "nobody holds it");

    let take_over = vec![id.clone()];
    let heir = OpenSession {
        take_over,
        ..wants("heir", 0)
    };
    let heir = Client::open(&sessions, heir).await.unwrap();
    let named = owners.get(owner).unwrap();
    assert_eq!((&*named.owner, &*named.session), ("heir", &*heir.id));
    assert_eq!(listed(&sessions).len(), 1);
    let ended = heir.close().await;
    assert_eq!(ended.let_go[0].probes, 2);
    assert!(machine.has_nothing());
}

#[tokio::test(start_paused = true)]
async fn a_kept_session_that_has_nothing_is_forgotten() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let keep = || OpenSession {
        keep: true,
        ..wants("me", 0)
    };
    let idle = Client::open(&sessions, keep()).await.unwrap();
    idle.close().await;
    assert_eq!(listed(&sessions), []);
    let client = Client::open(&sessions, keep()).await.unwrap();
    plant(&sessions, &client.id, &machine, 1);
    client.close().await;
    assert_eq!(listed(&sessions).len(), 1);
    machine.inside().has_ended = true;
    assert_eq!(listed(&sessions), []);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_lives_is_notified_that_another_took_over() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let mut first = Client::open(&sessions, wants("first", 0)).await.unwrap();
    plant(&sessions, &first.id, &machine, 2);
    let mut deciding = sessions.follow(&first.id).unwrap().unwrap();
    let take_over = vec![first.id.clone()];
    let heir = OpenSession {
        take_over,
        ..wants("heir", 0)
    };
    let heir = Client::open(&sessions, heir).await.unwrap();
    let ended = first.ended().await.unwrap();
    assert_eq!(
        (ended.reason(), ended.let_go),
        (SessionEnd::TakenOver, vec![])
    );
    assert_eq!(over_by(&mut deciding).await, SessionEnd::TakenOver);
    assert!(!machine.has_nothing());
    let again = OpenSession {
        take_over: vec![heir.id.clone(), first.id.clone()],
        ..wants("late", 0)
    };
    let late = Client::open(&sessions, again).await.err().expect("refused");
    assert_eq!(kind(&late), ErrorKind::NoSuchSession);
    assert_eq!(detail(&late).index, Some(1));
    heir.close().await;
    assert!(machine.has_nothing());
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_let_go_of_is_listed_and_tried_again() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let client = Client::open(&sessions, wants("me", 0)).await.unwrap();
    plant(&sessions, &client.id, &machine, 1);
    machine.inside().fails = 4;
    let closing = tokio::spawn(client.close());
    sleep(Duration::from_secs(2)).await;
    assert_eq!(listed(&sessions)[0].state(), SessionState::Ending);
    // Another session that ends meanwhile is cleaned up with it.
    let other = Client::open(&sessions, wants("other", 0)).await.unwrap();
    plant(&sessions, &other.id, &machine, 5);
    let ended = other.close().await;
    assert_eq!(ended.let_go[0].probes, 5);
    assert_eq!(closing.await.unwrap().let_go[0].probes, 1);
    assert!(machine.has_nothing());
    assert_eq!(machine.inside().stops, 5);
}

#[tokio::test(start_paused = true)]
async fn a_registration_that_lands_after_the_end_is_let_go_of() {
    let (sessions, _) = new();
    let (machine, other) = (Fake::new(1), Fake::new(2));
    let client = Client::open(&sessions, wants("me", 0)).await.unwrap();
    plant(&sessions, &client.id, &other, 1);
    let ticket = begin(&sessions, &client.id, &machine);
    let id = client.id.clone();
    let closing = tokio::spawn(client.close());
    sleep(Duration::from_secs(5)).await;
    assert!(other.has_nothing(), "it waits for no other machine");
    assert!(sessions.begin(&id, &machine).is_err());
    machine.inside().probes.insert(ticket.owner, 7);
    drop(ticket);
    assert_eq!(closing.await.unwrap().let_go.len(), 2);
    assert!(machine.has_nothing());
}

#[tokio::test(start_paused = true)]
async fn many_that_end_at_once_take_few_stops() {
    let (sessions, _) = new();
    let machine = Fake::new(1);
    let mut clients = Vec::new();
    for _ in 0..500 {
        let client = Client::open(&sessions, wants("me", 0)).await.unwrap();
        plant(&sessions, &client.id, &machine, 1);
        clients.push(client);
    }
    drop(clients);
    none_left(&sessions).await;
    let stops = machine.inside().stops;
    assert!(machine.has_nothing() && stops < 50, "{stops} stops");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_server_ends_sessions_and_lets_none_begin() {
    let (sessions, _) = new();
    let mut client = Client::open(&sessions, wants("me", 0)).await.unwrap();
    sessions.close();
    let ended = client.ended().await.unwrap();
    assert_eq!(ended.reason(), SessionEnd::ServerStopping);
    let late = Client::open(&sessions, wants("me", 0))
        .await
        .err()
        .expect("refused");
    assert_eq!(late.code(), Code::Unavailable);
    assert_eq!(kind(&late), ErrorKind::ServerStopping);
}

#[tokio::test(start_paused = true)]
async fn sessions_beyond_those_that_may_be_are_refused_with_the_limit() {
    let (sessions, _) = new();
    let mut held = Vec::new();
    let refused = loop {
        match Client::open(&sessions, wants("me", 0)).await {
            Ok(client) => held.push(client),
            Err(refused) => break refused,
        }
    };
    assert_eq!(held.len(), 1024);
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(kind(&refused), ErrorKind::TooManySessions);
    let info = info(&refused);
    let metadata = ["limit", "most", "left"].map(|name| info.metadata[name].as_str());
    assert_eq!(metadata, ["sessions", "1024", "0"]);
}

#[tokio::test(start_paused = true)]
async fn what_no_session_can_be_is_refused() {
    let (sessions, _) = new();
    for (open, why) in [
        (wants("", 0), ErrorKind::BadOwner),
        (wants("a b", 0), ErrorKind::BadOwner),
        (wants(&"x".repeat(64), 0), ErrorKind::BadOwner),
        (wants("me", 999), ErrorKind::BadTtl),
        (wants("me", 3_600_001), ErrorKind::BadTtl),
        (
            OpenSession {
                take_over: vec![String::new(); TAKE_OVER + 1],
                ..wants("me", 0)
            },
            ErrorKind::TooLarge,
        ),
    ] {
        let refused = Client::open(&sessions, open.clone()).await.err();
        assert_eq!(kind(&refused.expect("refused")), why, "{open:?}");
    }
    for ttl_ms in [1000, 3_600_000] {
        Client::open(&sessions, wants("me", ttl_ms)).await.unwrap();
    }
    let nothing = hold(&sessions, tokio_stream::empty()).await.unwrap_err();
    assert_eq!(kind(&nothing), ErrorKind::BadStream);
    let mut twice = Client::open(&sessions, wants("me", 0)).await.unwrap();
    let what = Some(hold_request::What::Open(wants("me", 0)));
    let again = twice.to_server.send(Ok(HoldRequest { what }));
    again.await.unwrap();
    let refused = twice.ended().await.unwrap_err();
    assert_eq!(kind(&refused), ErrorKind::BadStream);
}

/// An action of a client.
#[derive(Clone, Debug)]
enum Act {
    Renew,
    Plant(usize),
    Pause(usize),
    /// A request that takes this long, in milliseconds.
    Slow(usize, u64),
}

fn act() -> impl Strategy<Value = (u64, Act)> {
    let what = prop_oneof![
        4 => Just(Act::Renew),
        3 => (0..3_usize).prop_map(Act::Plant),
        2 => (0..3_usize).prop_map(Act::Pause),
        2 => ((0..3_usize), 0..4000_u64).prop_map(|(on, time)| Act::Slow(on, time)),
    ];
    (0..1500_u64, what)
}

/// How a client ends.
#[derive(Clone, Copy, Debug)]
enum Death {
    Closes,
    ConnectionLost,
    Freezes,
}

/// Behaviour of a client: whether its probes and pauses are kept, whether it takes over a session, its actions with
/// the delays before them, and how it ends.
type Script = (bool, bool, Vec<(u64, Act)>, Death);

fn script() -> impl Strategy<Value = Script> {
    let death = prop_oneof![
        Just(Death::Closes),
        Just(Death::ConnectionLost),
        Just(Death::Freezes)
    ];
    let acts = prop::collection::vec(act(), 0..8);
    (prop::bool::weighted(0.2), any::<bool>(), acts, death)
}

async fn live(sessions: Sessions<Fake>, machines: [Fake; 3], script: Script) {
    let (keep, takes_over, acts, death) = script;
    let mut take_over = Vec::new();
    if takes_over {
        let first = listed(&sessions).into_iter().next();
        take_over.extend(first.map(|session| session.id));
    }
    let open = OpenSession {
        keep,
        take_over,
        ..wants("me", 1000)
    };
    // The session to be taken over may have begun to end.
    let Ok(mut client) = Client::open(&sessions, open).await else {
        return;
    };
    let mut slow = Vec::new();
    for (wait, act) in acts {
        sleep(Duration::from_millis(wait)).await;
        let on = |machine: usize| sessions.begin(&client.id, &machines[machine]);
        match act {
            Act::Renew => {
                client.renew().await;
            }
            Act::Plant(machine) => {
                if let Ok(Some(ticket)) = on(machine) {
                    *machines[machine]
                        .inside()
                        .probes
                        .entry(ticket.owner)
                        .or_default() += 1;
                }
            }
            Act::Pause(machine) => {
                if let Ok(Some(ticket)) = on(machine) {
                    machines[machine].inside().paused_by.insert(ticket.owner);
                }
            }
            Act::Slow(machine, time) => {
                let Ok(Some(ticket)) = on(machine) else {
                    continue;
                };
                let machine = machines[machine].clone();
                slow.push(tokio::spawn(async move {
                    sleep(Duration::from_millis(time)).await;
                    machine.inside().probes.insert(ticket.owner, 1);
                    drop(ticket);
                }));
            }
        }
    }
    match death {
        Death::Closes => {
            client.close().await;
        }
        Death::ConnectionLost => drop(client),
        Death::Freezes => {
            client.ended().await.unwrap();
        }
    }
    for slow in slow {
        slow.await.unwrap();
    }
}

proptest! {
    #[test]
    fn whatever_clients_do_and_however_they_end_nothing_is_left(
        scripts in prop::collection::vec(script(), 1..12),
        fails in 0..3_u32,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let (sessions, owners) = new();
            let machines = [1, 2, 3].map(Fake::new);
            machines[0].inside().fails = fails;
            let all = scripts.into_iter().map(|script| {
                tokio::spawn(live(sessions.clone(), machines.clone(), script))
            });
            for client in all.collect::<Vec<_>>() {
                client.await.unwrap();
            }
            // Kept sessions are taken over by one that is not kept.
            let last = async {
                loop {
                    let states: Vec<_> = listed(&sessions);
                    let kept: Vec<_> = states.iter().filter(|it| it.state() == SessionState::Kept).collect();
                    let take_over: Vec<_> = kept.into_iter().map(|it| it.id.clone()).collect();
                    if !take_over.is_empty() {
                        let open = OpenSession { take_over, ..wants("heir", 0) };
                        Client::open(&sessions, open).await.unwrap().close().await;
                    }
                    if listed(&sessions).is_empty() {
                        return;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            };
            timeout(LONG, last).await.expect("all end");
            for machine in &machines {
                assert!(machine.has_nothing(), "{machine:?}");
            }
            assert!(owners.is_empty(), "{owners:?}");
        });
    }
}
