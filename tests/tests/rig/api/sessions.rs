//! Tests sessions of clients: ownership of probes and pauses, and the end of sessions.

use std::time::Duration;

use hvprobe_proto::v1::{
    Actions, Anchor, Ask, DecideFor, DecideRequest, ErrorKind, HoldRequest, HoldResponse,
    ListProbesRequest, ListSessionsRequest, Machine, MachineState, OpenSession, PauseRequest,
    ProbeSpec, RegisterRequest, RenewSession, ResumeRequest, SessionEnd, StopMachine, WatchRequest,
    actions, decide_request, decide_response, hold_request, hold_response,
};
use hvprobe_tests::rig::rig;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::client::{Client, Running, detail, specs};

/// Calls getpgid without end.
pub(crate) const BUSY: &[&str] = &["workload", "stdin-hold", "1"];
/// Time limit of every wait here; less than the time for which a rig may print nothing.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Converts a monotonic time to the wall clock with `anchor`, and returns whether it is within an hour of the
/// present.
fn is_just_now(monotonic_ns: u64, anchor: Option<Anchor>) -> bool {
    let anchor = anchor.expect("an anchor");
    let since_read = i128::from(monotonic_ns) - i128::from(anchor.monotonic_ns);
    let realtime_ns = i128::from(anchor.realtime_ns) + since_read;
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    let apart = now.cast_signed() - realtime_ns;
    apart.unsigned_abs() < Duration::from_hours(1).as_nanos()
}

/// A session that is open while this value exists.
pub(crate) struct Session {
    pub(crate) id: String,
    to_server: mpsc::Sender<HoldRequest>,
    answers: Streaming<HoldResponse>,
}

impl Session {
    pub(crate) async fn open(client: &mut Client, open: OpenSession) -> Result<Self, Status> {
        let (to_server, messages) = mpsc::channel(4);
        let what = Some(hold_request::What::Open(open));
        to_server.send(HoldRequest { what }).await.unwrap();
        let answers = client.sessions.hold(ReceiverStream::new(messages)).await?;
        let mut answers = answers.into_inner();
        let first = answers.message().await?.unwrap();
        let Some(hold_response::What::Opened(session)) = first.what else {
            panic!("not opened: {first:?}");
        };
        assert!(is_just_now(session.open_ns, first.anchor), "{session:?}");
        Ok(Self {
            id: session.id,
            to_server,
            answers,
        })
    }

    /// Renews the session.
    pub(crate) fn renew(&self) {
        let what = Some(hold_request::What::Renew(RenewSession {}));
        // A full queue already holds a renewal.
        let _full = self.to_server.try_send(HoldRequest { what });
    }

    /// Waits for the end of the session. Returns the reason, the number of probes that were removed, and
    /// whether a machine was resumed.
    pub(crate) async fn ended(&mut self) -> (SessionEnd, u32, bool) {
        let answer = tokio::time::timeout(LONG, self.answers.message()).await;
        match answer.expect("it ends").unwrap().and_then(|it| it.what) {
            Some(hold_response::What::Ended(ended)) => {
                let probes = ended.let_go.iter().map(|it| it.probes).sum();
                (
                    ended.reason(),
                    probes,
                    ended.let_go.iter().any(|it| it.resumed),
                )
            }
            other => panic!("not ended: {other:?}"),
        }
    }

    /// Closes the session's stream, and waits for the end of the session as [`Session::ended`] does.
    async fn close(mut self) -> (SessionEnd, u32, bool) {
        let (nobody, _) = mpsc::channel(1);
        self.to_server = nobody;
        self.ended().await
    }
}

fn named(owner: &str) -> OpenSession {
    OpenSession {
        owner: owner.into(),
        ..Default::default()
    }
}

pub(crate) fn stopping(definition: &str) -> ProbeSpec {
    holding(definition, actions::Hold::Stop(StopMachine {}))
}

pub(crate) fn asking(definition: &str, deadline_ms: u32) -> ProbeSpec {
    let ask = Ask {
        deadline_ms,
        ..Default::default()
    };
    holding(definition, actions::Hold::Ask(ask))
}

fn holding(definition: &str, hold: actions::Hold) -> ProbeSpec {
    ProbeSpec {
        definition: definition.into(),
        actions: Some(Actions {
            hold: Some(hold),
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub(crate) async fn plant(
    client: &mut Client,
    machine: &str,
    session: &str,
    probes: Vec<ProbeSpec>,
) -> Result<Vec<u32>, Status> {
    let request = RegisterRequest {
        machine: machine.into(),
        probes,
        session: session.into(),
        ..Default::default()
    };
    Ok(client.probes.register(request).await?.into_inner().ids)
}

/// Waits until `wanted` accepts the machine, and returns the machine.
pub(crate) async fn wait_until(
    client: &mut Client,
    machine: &str,
    what: &str,
    wanted: impl Fn(&Machine) -> bool,
) -> Machine {
    let request = WatchRequest {
        machine: machine.into(),
    };
    let mut states = client.machines.watch(request).await.unwrap().into_inner();
    let mut last = None;
    let seen = async {
        while let Some(machine) = states.message().await.unwrap() {
            if wanted(&machine) {
                return Some(machine);
            }
            last = Some(machine);
        }
        None
    };
    let seen = tokio::time::timeout(LONG, seen).await.unwrap_or_default();
    seen.unwrap_or_else(|| panic!("not {what}: {last:?}"))
}

fn running(machine: &Machine) -> bool {
    machine.state() == MachineState::Running
}

fn paused(machine: &Machine) -> bool {
    machine.state() == MachineState::Paused
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_the_machine_and_dies_leaves_it_running() {
    if rig("api: a client that dies in a stop").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(BUSY, &["p:stays vfs_read"]).await.name;
    client.wait_running(&machine).await;
    let session = {
        let mut dies = server.client().await;
        let session = Session::open(&mut dies, named("dies")).await.unwrap();
        let probes = vec![
            stopping("p:halt __x64_sys_getpgid"),
            stopping("p do_getpgid"),
        ];
        plant(&mut dies, &machine, &session.id, probes)
            .await
            .unwrap();
        let stopped = wait_until(&mut client, &machine, "stopped", paused).await;
        assert!(stopped.stopped_at.is_some());
        assert_eq!(stopped.paused_by, std::slice::from_ref(&session.id));
        let list = client.list(&machine).await;
        let owners: Vec<_> = list.iter().map(|probe| probe.owner.as_str()).collect();
        assert_eq!(owners, ["", "dies", "dies"]);
        assert_eq!(list[1].session, session.id);
        let theirs = ListProbesRequest {
            machine: machine.clone(),
            owner: "dies".into(),
            ..Default::default()
        };
        let theirs = client
            .probes
            .list_probes(theirs)
            .await
            .unwrap()
            .into_inner();
        assert_eq!(theirs.probes.len(), 2);
        session.id
    };
    let goes_on = wait_until(&mut client, &machine, "running", running).await;
    assert_eq!((goes_on.stopped_at, goes_on.paused_by.len()), (None, 0));
    let names: Vec<_> = client
        .list(&machine)
        .await
        .into_iter()
        .map(|it| it.name)
        .collect();
    assert_eq!(names, ["stays"]);
    let error = plant(&mut client, &machine, &session, specs(&["p vfs_write"])).await;
    let error = error.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(detail(&error).kind(), ErrorKind::NoSuchSession);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_end_with_the_last_who_wanted_them_and_things_can_be_taken_over() {
    if rig("api: pauses of several clients").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(BUSY, &[]).await.name;
    client.wait_running(&machine).await;
    let pause = |session: &str| PauseRequest {
        machine: machine.clone(),
        session: session.into(),
    };
    let first = Session::open(&mut client, named("first")).await.unwrap();
    let second = Session::open(&mut client, named("second")).await.unwrap();
    for session in [&first, &second] {
        client.machines.pause(pause(&session.id)).await.unwrap();
    }
    assert_eq!(first.close().await, (SessionEnd::Disconnected, 0, false));
    let still = wait_until(&mut client, &machine, "looked at", |_| true).await;
    assert!(paused(&still), "{still:?}");
    assert_eq!(second.close().await, (SessionEnd::Disconnected, 0, true));
    wait_until(&mut client, &machine, "running", running).await;

    // A pause without a session outlives the sessions.
    let third = Session::open(&mut client, named("third")).await.unwrap();
    client.machines.pause(pause("")).await.unwrap();
    client.machines.pause(pause(&third.id)).await.unwrap();
    let planting = RegisterRequest {
        machine: machine.clone(),
        probes: specs(&["p vfs_read"]),
        session: third.id.clone(),
        request_id: "plant".to_owned(),
        ..Default::default()
    };
    let planted = client.probes.register(planting.clone()).await.unwrap();
    let mut third = third;
    let take_over = OpenSession {
        take_over: vec![third.id.clone()],
        ..named("heir")
    };
    let heir = Session::open(&mut client, take_over).await.unwrap();
    assert_eq!(third.ended().await, (SessionEnd::TakenOver, 0, false));
    // A repeated request gets the first answer, although its session is gone.
    let again = client.probes.register(planting).await.unwrap();
    assert_eq!(again.get_ref(), planted.get_ref());
    assert_eq!(client.list(&machine).await[0].owner, "heir");
    assert_eq!(heir.close().await, (SessionEnd::Disconnected, 1, false));
    assert_eq!(client.list(&machine).await, []);
    let still = wait_until(&mut client, &machine, "looked at", |_| true).await;
    assert!(paused(&still), "{still:?}");
    let request = ResumeRequest {
        machine: machine.clone(),
    };
    client.machines.resume(request).await.unwrap();

    // If a session is to be kept, its probes remain after its end for a session that takes them over.
    let keep = OpenSession {
        keep: true,
        ..named("keeps")
    };
    let keeps = Session::open(&mut client, keep).await.unwrap();
    plant(&mut client, &machine, &keeps.id, specs(&["p vfs_read"]))
        .await
        .unwrap();
    assert_eq!(keeps.close().await, (SessionEnd::Disconnected, 0, false));
    assert_eq!(client.list(&machine).await[0].owner, "keeps");
    let list = client
        .sessions
        .list_sessions(ListSessionsRequest::default())
        .await;
    let list = list.unwrap().into_inner();
    assert_eq!(list.sessions.len(), 1, "{list:?}");
    assert!(
        is_just_now(list.sessions[0].open_ns, list.anchor),
        "{list:?}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decider_that_is_frozen_costs_the_guest_few_deadlines() {
    if rig("api: a frozen decider").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(BUSY, &[]).await.name;
    client.wait_running(&machine).await;
    let probes = vec![asking("p __x64_sys_getpgid", 1000)];
    let ids = plant(&mut client, &machine, "", probes).await.unwrap();
    let decide = async |client: &mut Client, session: String| {
        let (to_server, answers) = mpsc::channel(1);
        let decide_for = DecideFor {
            machine: machine.clone(),
            probes: ids.clone(),
            session,
        };
        let what = Some(decide_request::What::DecideFor(decide_for));
        to_server.send(DecideRequest { what }).await.unwrap();
        let questions = client.decisions.decide(ReceiverStream::new(answers)).await;
        (to_server, questions.unwrap().into_inner())
    };
    // This client receives its questions, and does not answer.
    let (_silent, mut questions) = decide(&mut client, String::new()).await;
    let (mut put, mut anchor) = (0, None);
    let why = loop {
        match tokio::time::timeout(LONG, questions.message())
            .await
            .expect("an end")
        {
            Ok(Some(message)) => {
                // The first message has the anchor in addition to its other content.
                anchor = message.anchor.or(anchor);
                if let Some(decide_response::What::Question(question)) = message.what {
                    put += 1;
                    assert!(is_just_now(question.deadline_ns, anchor), "{question:?}");
                    let hit = question.event.expect("the hit").host_ns;
                    assert!(is_just_now(hit, anchor), "{hit} {anchor:?}");
                }
            }
            Ok(None) => panic!("it ended without a reason, after {put} questions"),
            Err(status) => break status,
        }
    };
    assert_eq!(why.code(), Code::DeadlineExceeded, "{why:?}");
    assert_eq!(detail(&why).kind(), ErrorKind::Unresponsive);
    assert_eq!(put, 3);

    let session = Session::open(&mut client, named("me")).await.unwrap();
    let (_silent, mut questions) = decide(&mut client, session.id.clone()).await;
    session.close().await;
    let why = async {
        loop {
            if let Err(status) = questions.message().await {
                return status;
            }
        }
    };
    let why = tokio::time::timeout(LONG, why).await.expect("an end");
    assert_eq!(detail(&why).kind(), ErrorKind::SessionEnded, "{why:?}");
    server.stop().await;
}
