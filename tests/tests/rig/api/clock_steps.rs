//! Tests a server whose wall clock is set while it runs. The only effect must be on the conversion of times to
//! wall-clock times.

use std::time::{Duration, Instant};

use hvprobe_proto::v1::{
    Anchor, ListSessionsRequest, OpenSession, SessionEnd, SessionState, SubscribeRequest,
    SubscribeResponse,
};
use hvprobe_tests::rig::rig;
use rustix::time::{ClockId, clock_gettime, clock_settime};
use tonic::Streaming;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::client::{Client, Running};
use super::sessions::{LONG, Session};

/// Calls getpgid at a low rate without end, so that reading events keeps up.
const CALM: &[&str] = &[
    "sh",
    "-c",
    "echo ready; while workload calls getpgid 10; do :; done",
];
const HOUR: i64 = 3600;
/// Time for which the session outlives its client: far less than the steps of the clock.
const TTL: Duration = Duration::from_secs(5);
/// Minimum time for which the stream is read after a step.
const AFTER: Duration = Duration::from_secs(1);
/// Maximum error, in seconds, of a step as the server reports it.
const OFF: i64 = 60;

/// Offset in seconds by which the rig's wall clock was moved. Dropping this moves the clock back.
struct Wall(i64);

impl Wall {
    fn step(&mut self, seconds: i64) {
        let mut time = clock_gettime(ClockId::Realtime);
        time.tv_sec += seconds;
        clock_settime(ClockId::Realtime, time).expect("root can set the clock");
        self.0 += seconds;
    }
}

impl Drop for Wall {
    fn drop(&mut self) {
        if self.0 != 0 {
            self.step(-self.0);
        }
    }
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
fn monotonic() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

/// Returns the number of seconds by which the wall clock is ahead of the monotonic clock in `anchor`.
fn ahead(anchor: Anchor) -> i64 {
    let apart = i128::from(anchor.realtime_ns) - i128::from(anchor.monotonic_ns);
    i64::try_from(apart / 1_000_000_000).unwrap()
}

/// A stream of events, and a session that is renewed while the stream is read.
struct Reader {
    stream: Streaming<SubscribeResponse>,
    session: Session,
    /// Number of the next event.
    seq: Option<u64>,
}

impl Reader {
    /// Returns the next message, and checks that it begins where the last one ended.
    async fn next(&mut self) -> SubscribeResponse {
        let message = tokio::time::timeout(LONG, self.stream.message()).await;
        let message = message.expect("events come").unwrap().expect("it goes on");
        self.session.renew();
        let position = message.position.as_ref().expect("the machine lives");
        if let Some(expected) = self.seq {
            let accounted = message.events.len() as u64 + message.dropped;
            assert!(
                position.seq <= expected + accounted,
                "{expected}: {message:?}"
            );
            let seqs = message.events.iter().map(|event| event.seq);
            assert!(seqs.is_sorted_by(|one, next| one < next));
            let mut seqs = message.events.iter().map(|event| event.seq);
            assert!(seqs.all(|seq| (expected..position.seq).contains(&seq)));
        }
        self.seq = Some(position.seq);
        message
    }

    /// Reads messages for at least [`AFTER`], and until an event was made after `since`. Returns the last anchor,
    /// which applies to the event's time.
    async fn anchor(&mut self, since: u64) -> Anchor {
        let begun = Instant::now();
        let mut anchor = None;
        let (mut seen, mut events) = (false, 0);
        while begun.elapsed() < AFTER || !seen {
            assert!(begun.elapsed() < LONG, "no events are from after the step");
            let message = self.next().await;
            // The last anchor counts: the server sends another one after a reading of the clocks that took long.
            anchor = message.anchor.or(anchor);
            events += message.events.len();
            // The first message made after the step carries the anchor that applies after it.
            seen |= message.events.iter().any(|event| event.host_ns > since);
            assert!(anchor.is_some() || !seen, "the step is not told");
        }
        assert!(events > 0);
        anchor.unwrap()
    }
}

async fn is_well(client: &mut Client, session: &str) {
    let mut health = HealthClient::new(client.channel.clone());
    let response = health.check(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(response.into_inner().status(), ServingStatus::Serving);
    let list = client
        .sessions
        .list_sessions(ListSessionsRequest::default())
        .await;
    let list = list.unwrap().into_inner().sessions;
    let held = |state| state == SessionState::Held;
    let is_held = list.iter().any(|it| it.id == session && held(it.state()));
    assert!(is_held, "{list:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wall_clock_that_is_set_changes_what_times_stand_for_and_nothing_else() {
    match rig("api: a clock that is set").as_deref() {
        None => return,
        Some("direct") => {
            eprintln!("skipped: this machine's clock is not to be set");
            return;
        }
        Some(_) => {}
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(CALM, &["p __x64_sys_getpgid"]).await.name;
    client.wait_running(&machine).await;
    client.wait_printed(&machine, "ready").await;
    let open = OpenSession {
        owner: "me".into(),
        ttl_ms: u32::try_from(TTL.as_millis()).unwrap(),
        ..Default::default()
    };
    let session = Session::open(&mut client, open).await.unwrap();
    let id = session.id.clone();
    let subscription = SubscribeRequest {
        machine,
        ..Default::default()
    };
    let stream = client.events.subscribe(subscription).await.unwrap();
    let mut reader = Reader {
        stream: stream.into_inner(),
        session,
        seq: None,
    };
    let mut before = ahead(reader.anchor(0).await);
    let mut wall = Wall(0);
    // One hour ahead, two hours back, and one hour ahead.
    for seconds in [HOUR, -2 * HOUR, HOUR] {
        wall.step(seconds);
        let after = ahead(reader.anchor(monotonic()).await);
        let moved = after - before;
        assert!((moved - seconds).abs() < OFF, "{moved} s for {seconds} s");
        before = after;
        is_well(&mut client, &id).await;
    }
    // The expiry of the session does not wait for the hour by which the clock is set back.
    wall.step(-HOUR);
    let begun = Instant::now();
    let ended = reader.session.ended().await;
    assert_eq!(ended, (SessionEnd::Expired, 0, false));
    assert!(begun.elapsed() < LONG);
    drop(wall);
    server.stop().await;
}
