//! Clients that nobody here wrote: those of other languages call a server as they come, and find out
//! what it offers by asking it. Needs no KVM: no machine is booted.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use expect_test::expect;

/// A server that ends with its test, below a `timeout` should that hang.
struct Server(Child);

impl Server {
    fn start(socket: &Path) -> Self {
        let mut child = Command::new("timeout")
            .args(["--kill-after=5", "120", env!("CARGO_BIN_EXE_hvprobe")])
            .args(["serve", "--socket"])
            .arg(socket)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        stderr.read_line(&mut line).unwrap();
        assert!(line.starts_with("hvprobe: listening on "), "{line}");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It keeps nothing, and cannot put this off.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn pythons_grpc_calls_a_server_on_a_unix_socket() {
    let Some(python) = env::var_os("HVPROBE_TEST_PYTHON") else {
        eprintln!("skipped: needs Python's gRPC (cargo lab test)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hvprobe.sock");
    let _server = Server::start(&socket);
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/foreign_clients/client.py"
    );
    let client = Command::new(python)
        .arg(script)
        .arg(format!("unix:{}", socket.display()))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&client.stderr);
    assert!(client.status.success(), "{stderr}");
    expect![[r#"
        machines: 0
        machines: 0
        machines: 0
        health: 1
        boot: INVALID_ARGUMENT True
        get: NOT_FOUND True
        symbols: NOT_FOUND True
        events: NOT_FOUND True
    "#]]
    .assert_eq(&String::from_utf8(client.stdout).unwrap());
}
