//! Clients that are not part of this project: the stock gRPC libraries of other languages call a server over
//! its socket and over TCP, with the `.proto` files or with the server's reflection. Needs no KVM, because no
//! machine is booted.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod below_timeout;

use std::env;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use tempfile::TempDir;

use below_timeout::signal;

/// Server that ends with its test. If the test hangs, `timeout` ends the server.
struct Server {
    folder: TempDir,
    child: Child,
    /// Address of its TCP port.
    address: String,
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new("timeout")
            .args(["--kill-after=5", "120", env!("CARGO_BIN_EXE_hvprobe")])
            .args(["serve", "--listen", "127.0.0.1:0", "--socket"])
            .arg(folder.path().join("socket"))
            .arg("--token-file")
            .arg(folder.path().join("token"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut place = || {
            let line = lines.next().unwrap().unwrap();
            let place = line.strip_prefix("hvprobe: listening on ").expect(&line);
            place.split_whitespace().next().unwrap().to_owned()
        };
        let _socket = place();
        let address = place().strip_prefix("http://").unwrap().to_owned();
        Self {
            folder,
            child,
            address,
        }
    }

    /// Returns the arguments with which clients connect to the socket and to the port.
    fn targets(&self) -> [Vec<OsString>; 2] {
        let socket = self.folder.path().join("socket");
        let token = self.folder.path().join("token");
        [
            vec![format!("unix:{}", socket.display()).into()],
            vec![self.address.clone().into(), token.into()],
        ]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        signal(&self.child, Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Returns the path of the client called `name`.
fn script(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "foreign_clients", name]
        .iter()
        .collect()
}

/// Output of the clients.
const ANSWERS: &str = "\
machines: 0
machines: 0
machines: 0
health: 1
boot: INVALID_ARGUMENT True
get: NOT_FOUND True
symbols: NOT_FOUND True
lines: NOT_FOUND True
upload: NOT_FOUND True
events: NOT_FOUND True
histograms: NOT_FOUND True
";

fn check(client: &mut Command, expected: &str) {
    let output = client.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{client:?}: {stderr}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

#[test]
fn pythons_grpc_calls_a_server() {
    let Some(python) = env::var_os("HVPROBE_TEST_PYTHON") else {
        eprintln!("skipped: needs Python's gRPC (cargo lab test)");
        return;
    };
    let server = Server::start();
    for target in server.targets() {
        let mut client = Command::new(&python);
        check(client.arg(script("client.py")).args(target), ANSWERS);
    }
}

#[test]
fn nodes_grpc_calls_a_server() {
    let Some(modules) = env::var_os("HVPROBE_TEST_NODE") else {
        eprintln!("skipped: needs Node's gRPC (cargo lab test)");
        return;
    };
    let server = Server::start();
    let protos = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto");
    for target in server.targets() {
        // The `.proto` files do not contain the health service.
        let without = ANSWERS.replace("health: 1\n", "");
        for (from, expected) in [("reflection", ANSWERS), (protos, &without)] {
            let (place, token) = target.split_first().unwrap();
            let mut client = Command::new("node");
            client.env("NODE_PATH", &modules).arg(script("client.js"));
            client.arg(place).arg(from).args(token);
            check(&mut client, expected);
        }
    }
}
