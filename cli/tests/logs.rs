//! Tests of a server's log: its contents, and the work of the server while nothing reads the log. Needs no KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod below_timeout;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use hvprobe_proto::v1::ListMachinesRequest;
use hvprobe_proto::v1::machines_client::MachinesClient;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::timeout;
use tonic::transport::Endpoint;

use below_timeout::signal;

/// Number of calls that log far more lines than can wait.
const CALLS: u32 = 3000;
/// Number of calls whose lines can all wait by default.
const FEW_CALLS: u32 = 200;
const LONG: Duration = Duration::from_secs(60);

struct Server {
    folder: TempDir,
    child: Child,
    stderr: BufReader<ChildStderr>,
    /// Output before the line that says that the server listens.
    before: String,
    first: String,
}

impl Server {
    /// Starts a server under `timeout`, in case it hangs, and waits until it listens.
    fn start(log: Option<&str>, options: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), log, options)
    }

    fn start_in(folder: TempDir, log: Option<&str>, options: &[&str]) -> Self {
        let mut command = Command::new("timeout");
        command
            .args(["--foreground", "--kill-after=5", "200"])
            .arg(env!("CARGO_BIN_EXE_hvprobe"))
            .args(options)
            .args(["serve", "--socket"])
            .arg(folder.path().join("socket"))
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(log) = log {
            command.env("RUST_LOG", log);
        }
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let (mut before, mut first) = (String::new(), String::new());
        while !first.contains("listening on") {
            before.push_str(&first);
            first.clear();
            let read = stderr.read_line(&mut first).unwrap();
            assert!(read > 0, "it has ended: {before}");
        }
        Self {
            folder,
            child,
            stderr,
            before,
            first,
        }
    }

    fn terminate(&self) {
        signal(&self.child, Signal::TERM);
    }

    /// Ends the server; returns its unread output and its exit status.
    fn end(mut self) -> (String, Option<i32>) {
        self.terminate();
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().code())
    }
}

async fn call(socket: &Path, times: u32) {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
    let channel = endpoint.unwrap().connect().await.unwrap();
    let mut client = MachinesClient::new(channel);
    for _ in 0..times {
        let answer = client.list_machines(ListMachinesRequest::default());
        let answer = timeout(LONG, answer).await.expect("an answer");
        answer.unwrap();
    }
}

#[tokio::test]
async fn server_whose_log_nobody_reads_answers_and_says_later_what_was_lost() {
    let lost = lost(&[], CALLS).await;
    assert!(lost > u64::from(CALLS), "{lost}");
}

#[tokio::test]
async fn as_few_lines_of_the_log_wait_as_was_said() {
    assert!(lost(&["--log-lines", "16"], FEW_CALLS).await > 0);
}

/// Returns the number of log lines that a server with these `options` reports as lost. Nothing reads its log before
/// `calls` calls have been made.
async fn lost(options: &[&str], calls: u32) -> u64 {
    let server = Server::start(Some("trace"), options);
    let socket = server.folder.path().join("socket");
    call(&socket, calls).await;
    // From here on the log is read.
    let Server {
        folder,
        mut child,
        stderr,
        ..
    } = server;
    let (found, notice) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let lost = |line: &String| line.contains("lines of the log were lost");
        let mut lines = stderr.lines().map_while(Result::ok);
        found.send(lines.find(lost)).unwrap();
        lines.count()
    });
    let line = notice.recv_timeout(LONG).expect("it is told");
    let line = line.expect("it is told before the server ends");
    let count = line.strip_prefix("hvprobe: ").unwrap();
    let count = count.split(' ').next().unwrap().parse().unwrap();
    call(&socket, 1).await;
    signal(&child, Signal::TERM);
    assert!(reader.join().unwrap() > 0);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    drop(folder);
    count
}

#[tokio::test]
async fn server_whose_log_nobody_reads_can_be_ended() {
    let mut server = Server::start(Some("trace"), &[]);
    call(&server.folder.path().join("socket"), CALLS).await;
    server.terminate();
    // Read the status of the server itself: `timeout` would end later, with a status of its own.
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn log_in_json_is_json_to_the_last_line() {
    let server = Server::start(Some("debug"), &["--log-format", "json"]);
    let first = server.first.clone();
    let (rest, status) = server.end();
    assert_eq!(status, Some(0));
    for line in std::iter::once(first.as_str()).chain(rest.lines()) {
        let message: Value = serde_json::from_str(line).unwrap();
        assert!(message["timestamp"].is_string(), "{line}");
        assert!(message["level"].is_string(), "{line}");
        assert!(message["fields"]["message"].is_string(), "{line}");
    }
    assert!(rest.contains("stopping"), "{rest}");
}

#[test]
fn log_is_plain_where_no_terminal_shows_it() {
    let server = Server::start(Some("trace"), &[]);
    let (before, first) = (server.before.clone(), server.first.clone());
    let (rest, status) = server.end();
    assert_eq!(status, Some(0));
    let log = [before, first, rest].concat();
    assert!(log.contains("TRACE"), "{log}");
    assert!(!log.contains('\u{1b}'), "{log}");
}

#[test]
fn log_says_what_the_environment_asks_for_unless_more_was_typed() {
    for (log, options, says) in [
        (None, &[][..], false),
        (Some("hvprobe=info"), &[], true),
        (Some("off"), &["-v"], true),
        (Some("hvprobe=warn"), &[], false),
    ] {
        // The socket of a killed server is replaced, which is logged at level INFO.
        let mut killed = Server::start(None, &[]);
        signal(&killed.child, Signal::KILL);
        killed.child.wait().unwrap();
        let server = Server::start_in(killed.folder, log, options);
        let before = server.before.clone();
        let all = before + &server.end().0;
        assert_eq!(
            all.contains("replacing a stale socket"),
            says,
            "{log:?}: {all}"
        );
    }
}
