//! Tests clients that are killed at random moments, together with all they own: nothing must be left behind.
//!
//! A client plants probes that count, stop the machine or ask the client. It pauses the machine, decides,
//! subscribes, and is killed in one of three ways: its connection is closed; or the connection stays open but
//! carries no more data, as with a host that is gone; or it carries none for longer than the session's lifetime, as
//! with a frozen process. The clients run in rounds. When all of a round are gone, the machine must run. In every
//! other round no client resumes the machine, because a resume would hide a pause that was left behind. At the end
//! the kernel's text must be unchanged. `HVPROBE_CLIENTS` sets the number of clients; `HVPROBE_STRESS_SEED` repeats
//! a run.

use std::env;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_proto::v1::{
    DecideFor, DecideRequest, ErrorKind, ListSessionsRequest, ListSymbolsRequest, MachineState,
    OpenSession, PauseRequest, ProbeSpec, ReadKernelRequest, ResumeRequest, SubscribeRequest,
    UnregisterRequest, decide_request,
};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::rig::{progress, rig};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Endpoint, Uri};

use super::client::{Client, Running, detail, request, specs};
use super::sessions::{BUSY, LONG, Session, asking, plant, stopping, wait_until};
use super::used::Used;

/// Default number of clients.
const CLIENTS: u64 = 16;
/// Maximum number of clients at a time.
const AT_A_TIME: usize = 8;
/// Number of clients of a round.
const ROUND: u64 = 16;
/// Number of clients that run before the used resources are measured for reference.
const FIRST: u64 = 8;
/// Time for which a session outlives its client.
const TTL: Duration = Duration::from_secs(1);
/// Maximum life of a client in milliseconds.
const LIFE: u64 = 3000;
/// Size of a read of the guest's kernel: the maximum allowed.
const PIECE: u32 = 1 << 20;

/// Functions that the workload calls, or that are called all the time.
const FUNCTIONS: [&str; 8] = [
    "__x64_sys_getpgid",
    "do_getpgid",
    "vfs_read",
    "vfs_write",
    "try_to_wake_up",
    "handle_mm_fault",
    "kmem_cache_alloc",
    "dput",
];

/// Way in which a client is killed.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// Its connection is closed, as by SIGKILL.
    Closed,
    /// Its connection stays open, but carries no more data.
    HalfOpen,
    /// It does nothing for longer than its session's lifetime; then it continues.
    Frozen,
}

/// Connects a client through a relay that passes nothing on while `frozen` is true.
async fn connect(socket: PathBuf, frozen: watch::Receiver<bool>) -> Client {
    let server = UnixStream::connect(socket).await.unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let (from_server, to_server) = server.into_split();
    let (from_client, to_client) = near.into_split();
    tokio::spawn(pump(from_server, to_client, frozen.clone()));
    tokio::spawn(pump(from_client, to_server, frozen));
    let mut far = Some(TokioIo::new(far));
    let connector = tower::service_fn(move |_: Uri| {
        let far = far.take().ok_or(io::ErrorKind::NotConnected);
        async move { far.map_err(io::Error::from) }
    });
    let channel = Endpoint::from_static("http://hvprobe")
        .connect_with_connector(connector)
        .await;
    Client::over(channel.unwrap())
}

/// Relays bytes, except while `frozen`, until either end is closed.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut frozen: watch::Receiver<bool>) {
    let mut bytes = vec![0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if frozen.wait_for(|it| !*it).await.is_err() || to.write_all(&bytes[..count]).await.is_err()
        {
            return;
        }
    }
}

/// Acts as a client until it is killed. Resumes the machine now and then if `resumes` is set.
async fn live(
    mut client: Client,
    machine: String,
    session: &Session,
    resumes: bool,
    mut random: Random,
) {
    let mut kept = Vec::new();
    loop {
        session.renew();
        match random.below(10) {
            0..4 => {
                let probes = (0..=random.below(3)).map(|_| some(&mut random)).collect();
                // Fails if a probe of another kind is there, or if the session ends meanwhile.
                let _refused = plant(&mut client, &machine, &session.id, probes).await;
            }
            4 => {
                let request = PauseRequest {
                    machine: machine.clone(),
                    session: session.id.clone(),
                };
                let _refused = client.machines.pause(request).await;
            }
            5 | 6 if resumes => {
                let machine = machine.clone();
                let _refused = client.machines.resume(ResumeRequest { machine }).await;
            }
            7 => {
                let subscription = SubscribeRequest {
                    machine: machine.clone(),
                    ..Default::default()
                };
                if let Ok(unread) = client.events.subscribe(subscription).await
                    && kept.len() < 2
                {
                    kept.push(unread);
                }
            }
            8 => decide(&mut client, &machine, session, &mut random).await,
            _ => sleep(Duration::from_millis(random.below(200))).await,
        }
    }
}

fn some(random: &mut Random) -> ProbeSpec {
    let function = random.pick(&FUNCTIONS);
    match random.below(10) {
        0 => stopping(&format!("p {function}")),
        1 => asking(&format!("p {function}"), 50),
        2..5 => specs(&[&format!("r {function}")]).remove(0),
        _ => specs(&[&format!("p {function}")]).remove(0),
    }
}

/// Becomes the decider of a probe, receives some questions, and lets them expire.
async fn decide(client: &mut Client, machine: &str, session: &Session, random: &mut Random) {
    let asks = asking("p do_getpgid", 50);
    let Ok(probes) = plant(client, machine, &session.id, vec![asks]).await else {
        return;
    };
    let (to_server, answers) = mpsc::channel(1);
    let decide_for = DecideFor {
        machine: machine.to_owned(),
        probes,
        session: session.id.clone(),
    };
    let what = Some(decide_request::What::DecideFor(decide_for));
    to_server.send(DecideRequest { what }).await.unwrap();
    let Ok(questions) = client.decisions.decide(ReceiverStream::new(answers)).await else {
        return;
    };
    let mut questions = questions.into_inner();
    for _ in 0..random.below(4) {
        let question = timeout(Duration::from_millis(200), questions.message()).await;
        if !matches!(question, Ok(Ok(Some(_)))) {
            return;
        }
        session.renew();
    }
}

/// Runs one client until it is killed. Returns the way in which it was killed.
async fn one(socket: PathBuf, machine: String, resumes: bool, mut random: Random) -> Death {
    let (freeze, frozen) = watch::channel(false);
    let mut client = connect(socket, frozen).await;
    let death = random.pick(&[Death::Closed, Death::HalfOpen, Death::Frozen]);
    let open = OpenSession {
        owner: "killed".into(),
        ttl_ms: 1000,
        ..Default::default()
    };
    let session = Session::open(&mut client, open).await.unwrap();
    let life = Duration::from_millis(random.below(LIFE));
    let lives = live(client.clone(), machine.clone(), &session, resumes, random);
    match death {
        Death::Closed => {
            let _killed = timeout(life, lives).await;
        }
        Death::HalfOpen | Death::Frozen => {
            // The client is frozen in the middle of whatever it does.
            let frozen = async {
                sleep(life).await;
                freeze.send_replace(true);
                sleep(TTL * 3).await;
            };
            tokio::select! {
                () = lives => {}
                () = frozen => {}
            }
        }
    }
    if let Death::Frozen = death {
        freeze.send_replace(false);
        let late = plant(&mut client, &machine, &session.id, specs(&["p vfs_read"]));
        let late = timeout(LONG, late).await.expect("an answer").unwrap_err();
        assert_eq!(detail(&late).kind(), ErrorKind::NoSuchSession, "{late:?}");
    }
    death
}

/// Runs the clients with these numbers, a few at a time, until all are killed. Returns the number of clients for
/// each [`Death`], in the order of its variants. If `resume` is set, clients with even numbers resume the machine.
async fn kill(
    server: &Running,
    machine: &str,
    numbers: Range<u64>,
    resume: bool,
    seed: u64,
) -> [u64; 3] {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    let mut clients = JoinSet::new();
    for number in numbers {
        let resumes = resume && number.is_multiple_of(2);
        let (socket, machine) = (server.socket(), machine.to_owned());
        let random = Random::new(&[seed, number]);
        let places = Arc::clone(&places);
        clients.spawn(async move {
            let _place = places.acquire().await.unwrap();
            one(socket, machine, resumes, random).await
        });
    }
    let mut deaths = [0; 3];
    while let Some(death) = clients.join_next().await {
        let death = death.unwrap();
        progress(&format!("{death:?}"));
        match death {
            Death::Closed => deaths[0] += 1,
            Death::HalfOpen => deaths[1] += 1,
            Death::Frozen => deaths[2] += 1,
        }
    }
    deaths
}

/// Waits until no session is left.
async fn none_left(client: &mut Client) {
    let since = Instant::now();
    loop {
        let answer = client
            .sessions
            .list_sessions(ListSessionsRequest::default())
            .await;
        let left = answer.unwrap().into_inner().sessions;
        if left.is_empty() {
            return;
        }
        assert!(since.elapsed() < LONG, "left: {left:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until no session is left and the machine runs, although there is no client to resume it. Only the probe
/// `stays` must be left.
async fn goes_on(client: &mut Client, machine: &str) {
    none_left(client).await;
    let names: Vec<_> = client
        .list(machine)
        .await
        .into_iter()
        .map(|it| it.name)
        .collect();
    assert_eq!(names, ["stays"]);
    let runs = |machine: &hvprobe_proto::v1::Machine| machine.state() == MachineState::Running;
    let last = wait_until(client, machine, "running", runs).await;
    assert_eq!((last.stopped_at, last.paused_by.len()), (None, 0));
    // A hit proves that it really runs.
    let hits = client.list(machine).await[0].hits;
    let since = Instant::now();
    while client.list(machine).await[0].hits == hits {
        assert!(since.elapsed() < LONG, "no hit since {hits}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the address of the kernel's symbol `name`.
async fn address(client: &mut Client, machine: &str, name: &str) -> u64 {
    let request = ListSymbolsRequest {
        machine: machine.into(),
        pattern: name.into(),
        ..Default::default()
    };
    let symbols = client.symbols.list_symbols(request).await.unwrap();
    let first = symbols.into_inner().message().await.unwrap();
    first.unwrap_or_else(|| panic!("no {name}")).symbols[0].address
}

/// Returns the start of the kernel's text, and the text.
async fn text(client: &mut Client, machine: &str) -> (u64, Vec<u8>) {
    let begin = address(client, machine, "_stext").await;
    let end = address(client, machine, "_etext").await;
    let mut all = Vec::new();
    let mut at = begin;
    while at < end {
        let length = u32::try_from(end - at).unwrap_or(PIECE).min(PIECE);
        let request = ReadKernelRequest {
            machine: machine.into(),
            address: at,
            length,
        };
        let read = client.machines.read_kernel(request).await;
        all.extend(read.unwrap().into_inner().data);
        at += u64::from(length);
    }
    (begin, all)
}

/// Asserts that the kernel's text equals `before`.
async fn text_is(client: &mut Client, machine: &str, before: &(u64, Vec<u8>)) {
    let (begin, now) = text(client, machine).await;
    assert_eq!((begin, now.len()), (before.0, before.1.len()));
    let bytes = (begin..).zip(before.1.iter().zip(&now));
    let changed = bytes.filter(|(_, (was, is))| was != is);
    let changed: Vec<_> = changed
        .take(16)
        .map(|(at, (was, is))| format!("{at:#x}: {was:02x}, now {is:02x}"))
        .collect();
    assert!(changed.is_empty(), "{changed:#?}");
}

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |it| it.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_are_killed_at_random_moments_leave_nothing_behind() {
    if rig("api: killed clients").is_none() {
        return;
    }
    let (count, seed) = (
        setting("HVPROBE_CLIENTS", CLIENTS),
        setting("HVPROBE_STRESS_SEED", 1),
    );
    let server = Running::start();
    let mut client = server.client().await;
    let mut boot = request(BUSY, &[]);
    boot.cpus = 2;
    let machine = client.machines.boot(boot).await.unwrap().into_inner().name;
    client.wait_running(&machine).await;
    let before = text(&mut client, &machine).await;
    let stays = client.register(&machine, &["p:stays __x64_sys_getpgid"]);
    let stays = stays.await.unwrap();

    kill(&server, &machine, 0..FIRST, false, seed + 1).await;
    goes_on(&mut client, &machine).await;
    let used = Used::now();
    let since = Instant::now();
    let mut deaths = [0; 3];
    for first in (0..count).step_by(usize::try_from(ROUND).unwrap()) {
        let round = first..count.min(first + ROUND);
        let resume = (first / ROUND).is_multiple_of(2);
        let more = kill(&server, &machine, round, resume, seed).await;
        deaths = std::array::from_fn(|way| deaths[way] + more[way]);
        goes_on(&mut client, &machine).await;
    }
    let [closed, half_open, frozen] = deaths;
    eprintln!(
        "seed {seed}: {count} clients killed in {:?}: {closed} closed, {half_open} half-open, {frozen} frozen",
        since.elapsed()
    );

    let request = UnregisterRequest {
        machine: machine.clone(),
        ids: stays,
    };
    client.probes.unregister(request).await.unwrap();
    text_is(&mut client, &machine, &before).await;
    used.come_back().await;
    server.stop().await;
}
