//! Signals that are sent to a server in error, or by tools that make other servers reload. Needs no KVM,
//! because no machine is booted.

mod below_timeout;

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use below_timeout::signal;

#[test]
fn a_server_says_so_and_goes_on_at_signals_that_mean_nothing_to_it() {
    let folder = tempfile::tempdir().expect("there is room");
    let socket = folder.path().join("socket");
    let mut server = Command::new("timeout")
        .args(["--kill-after=5", "120", env!("CARGO_BIN_EXE_hvprobe")])
        .args(["serve", "--socket"])
        .arg(&socket)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("timeout is there");
    let stderr = BufReader::new(server.stderr.take().expect("a pipe"));
    let mut lines = stderr.lines().map(|line| line.expect("text"));
    let mut wait = |what: &str| {
        let line = lines.find(|line| line.contains(what));
        line.unwrap_or_else(|| panic!("it never said {what}"))
    };
    wait("listening on ");
    for (sent, name) in [
        (Signal::HUP, "SIGHUP"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::HUP, "SIGHUP"),
    ] {
        signal(&server, sent);
        wait(name);
        UnixStream::connect(&socket).expect("it listens");
    }
    signal(&server, Signal::TERM);
    wait("stopping");
    let ended = server.wait().expect("it is ours");
    assert_eq!(ended.code(), Some(0));
    assert!(!socket.exists());
}
