//! Malicious clients, all at once and one after the other, do not harm the server: it does not panic, keeps
//! nothing of them, sends each a clear error, and serves the next one.
//!
//! The requests are generated from the interface's descriptors. `HVPROBE_FUZZ_RUNS` sets how many are made,
//! `HVPROBE_FUZZ_SEED` the seed that they are made from.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod process;
mod raw;

use std::env;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::time::Duration;

use hvprobe_fixtures::calls::{AnswerCounts, Call};
use hvprobe_fixtures::messages::Messages;
use hvprobe_fixtures::panics::count_panics;
use hvprobe_proto::v1::ListMachinesRequest;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::{FILE_DESCRIPTOR_SET, Token};
use hvprobe_server::{Listener, Loopback, Server};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// Number of requests in a short run; `HVPROBE_FUZZ_RUNS` sets the number for a long one.
const REQUESTS: u64 = 4000;
/// Number of connections at a time.
const CONNECTIONS: u64 = 4;
/// Maximum number of calls under way at a time, on all connections together.
const AT_ONCE: usize = 24;
/// One of this many calls of the [`DEAR`] methods is made, because each runs a guest.
const SELDOM: u64 = 100;
const DEAR: [&str; 1] = ["/hvprobe.v1.Host/Report"];
/// How many more threads the process may have at the end than after the first requests.
const THREADS: u64 = 2;
/// How many more file descriptors it may have.
const DESCRIPTORS: u64 = 2;
/// How many more bytes it may have allocated.
const MEMORY: u64 = 4 << 20;
const LONG: Duration = Duration::from_secs(60);

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

async fn connect(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
    endpoint.unwrap().connect().await.unwrap()
}

async fn serves(socket: &Path) {
    let mut client = MachinesClient::new(connect(socket).await);
    let list = client.list_machines(ListMachinesRequest::default());
    let list = timeout(LONG, list).await.expect("it still serves").unwrap();
    assert!(list.into_inner().machines.is_empty());
}

/// Makes `count` calls of random methods.
async fn calls(socket: &Path, messages: &mut Messages, count: u64, answers: &mut AnswerCounts) {
    let methods = messages.methods();
    let mut left = count;
    while left > 0 {
        let mut channels = Vec::new();
        for _ in 0..CONNECTIONS {
            channels.push(connect(socket).await);
        }
        let here = left.min(1000);
        left -= here;
        let mut open = JoinSet::new();
        for _ in 0..here {
            let mut method = &methods[messages.index(methods.len())];
            while DEAR.contains(&method.path.as_str()) && !messages.one_in(SELDOM) {
                method = &methods[messages.index(methods.len())];
            }
            let call = Call::of(method, messages);
            let channel = channels[messages.index(channels.len())].clone();
            open.spawn(async move { (call.path.clone(), call.make(channel).await) });
            if open.len() >= AT_ONCE {
                let (path, answer) = open.join_next().await.unwrap().unwrap();
                answers.note(&path, answer);
            }
        }
        while let Some(done) = open.join_next().await {
            let (path, answer) = done.unwrap();
            answers.note(&path, answer);
        }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(Duration::from_millis(100))
        .enable_all()
        .build()
        .unwrap()
}

#[test]
fn nothing_that_clients_send_harms_the_server() {
    let count = number("HVPROBE_FUZZ_RUNS").unwrap_or(REQUESTS);
    let seed = number("HVPROBE_FUZZ_SEED");
    let seed = seed.unwrap_or_else(|| RandomState::new().hash_one("a seed") >> 32);
    eprintln!("again with: HVPROBE_FUZZ_SEED={seed} HVPROBE_FUZZ_RUNS={count}");
    let panics = count_panics();
    let folder = tempfile::tempdir().unwrap();
    let (socket, file) = (folder.path().join("socket"), folder.path().join("token"));
    // Files that a kernel's path may lead to.
    let (fifo, empty) = (folder.path().join("fifo"), folder.path().join("empty"));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    std::fs::write(&empty, b"").unwrap();
    let [fifo, empty, itself] =
        [&fifo, &empty, &env::current_exe().unwrap()].map(|path| path.to_str().unwrap().to_owned());

    // Concatenated descriptor sets form one set.
    let descriptors = [
        FILE_DESCRIPTOR_SET,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
    ];
    let mut messages = Messages::new(&descriptors.concat(), seed);
    messages.prefer("machine", &["synthetic", "nobody", ""]);
    messages.prefer("name", &["a", "b", ""]);
    let files = [&fifo, &empty, &itself, "/dev/zero", "/", "/nowhere"];
    messages.prefer("kernel", &files);
    messages.prefer("initrd", &files);

    runtime().block_on(async {
        let token = Token::read_or_create(&file).unwrap();
        let loopback = Loopback::bind("127.0.0.1:0".parse().unwrap(), token);
        let loopback = loopback.await.unwrap();
        let address = loopback.address();
        let mut server = Server::new();
        let sink = server.publish("synthetic");
        server.listen_too(loopback);
        let listener = Listener::bind(&socket).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(server.serve(listener, async {
            let _asked_or_dropped = stopped.await;
        }));

        let mut answers = AnswerCounts::default();
        calls(&socket, &mut messages, REQUESTS / 4, &mut answers).await;
        raw::connections(&socket, address, &mut messages, 100).await;
        let before = process::Size::settled(None).await;

        calls(&socket, &mut messages, count, &mut answers).await;
        raw::connections(&socket, address, &mut messages, count / 10).await;
        serves(&socket).await;

        let bound = process::Size {
            threads: before.threads + THREADS,
            descriptors: before.descriptors + DESCRIPTORS,
            memory: before.memory + MEMORY,
        };
        let after = process::Size::settled(Some(&bound)).await;
        eprintln!("{before:?}, then {after:?}");
        assert!(after.is_within(&bound), "{before:?}, then {after:?}");
        assert_eq!(panics(), 0, "panics, which are printed above");
        let unclear = answers.unclear();
        assert!(unclear.is_empty(), "{unclear:#?}");
        // Otherwise the test would test nothing.
        for code in [Code::Ok, Code::NotFound, Code::InvalidArgument] {
            assert!(answers.with(code) > count / 100, "{answers:#?}");
        }

        drop(sink);
        stop.send(()).unwrap();
        let ended = timeout(LONG, serving).await;
        ended.expect("the server ends").unwrap().unwrap();
    });
    assert_eq!(panics(), 0, "panics, which are printed above");
}
