//! Clients that are not part of this project, with hits of guests. A client in Python boots a guest, plants probes,
//! reads events, decides, and stops the guest. A client in JavaScript does the same twice: with the `.proto` files,
//! and with the server's reflection. The server runs in a rig of the lab: on the host itself or, if the host cannot
//! run guests, in an emulated machine whose port is forwarded.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Time limit for the machine, in seconds.
const MACHINE: &str = "170";
/// Time limit for each client, in seconds.
const CLIENT: &str = "60";
/// Number of attempts, because an emulated machine sometimes dies.
const TRIES: u32 = 2;
/// Maximum time from the start of the machine until its server listens.
const BOOT: Duration = Duration::from_secs(60);
/// Output of each client: its guest's kernel was up, had hits, and was stopped.
const HITS: &str = "running: True\nhits: 3\ndecided: 2\nstopped: 3\n";
/// Script that starts the server in a temporary folder of its machine, and prints the token that the server
/// creates.
const SERVE: &str = r#"
cd "$(mktemp -d)" || exit
exec hvprobe serve --socket "$PWD/socket" --listen "127.0.0.1:$0" --token-file token 2>&1 |
while read -r line; do
    echo "$line"
    case $line in
    *"who has the token"*) echo "token $(cat token)" ;;
    esac
done
"#;

/// Process of `lab`, which ends with the test.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        // `lab` ends the processes that it has started.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Returns a free port of this machine.
fn port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts a server on `port`; returns its token.
fn serve(lab: &OsStr, rig: &OsStr, port: u16) -> Result<(Machine, String), String> {
    let port = port.to_string();
    let mut child = Command::new("timeout");
    child
        .args(["--foreground", "--kill-after=10", MACHINE])
        .arg(lab)
        .args([
            "run",
            "--no-build",
            "--memory",
            "1536M",
            "--timeout",
            MACHINE,
        ])
        .args(["--forward", &port, "--rig"])
        .arg(rig)
        .args(["--", "sh", "-c", SERVE, &port])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut machine = Machine(child.spawn().unwrap());
    let output = BufReader::new(machine.0.stdout.take().unwrap());
    let (sender, tokens) = mpsc::channel();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            eprintln!("server: {line}");
            if let Some(token) = line.trim().strip_prefix("token ") {
                // The receiver is gone if the test is over.
                let _ = sender.send(token.to_owned());
            }
        }
    });
    let token = tokens.recv_timeout(BOOT);
    let token = token.map_err(|error| format!("no server listens: {error}"))?;
    Ok((machine, token))
}

fn client(program: &OsStr) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", CLIENT]).arg(program);
    command
}

fn script(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "foreign_clients", name]
        .iter()
        .collect()
}

fn check(client: &mut Command, expected: &str) -> Result<(), String> {
    let output = client.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() && stdout == expected {
        return Ok(());
    }
    Err(format!("{client:?}: {}, {stdout}{stderr}", output.status))
}

/// Values of environment variables: Python and the Node modules for the clients, the lab, and the kind of rig for
/// the server.
struct Environment {
    python: OsString,
    modules: OsString,
    lab: OsString,
    rig: OsString,
}

/// Runs all clients, one after another, against a server in a machine of its own.
fn attempt(environment: &Environment) -> Result<(), String> {
    let [kernel, initrd] = ["KERNEL", "INITRD"]
        .map(|name| env::var_os(format!("HVPROBE_TEST_{name}")).expect("the lab tells it"));
    let port = port();
    let (machine, token) = serve(&environment.lab, &environment.rig, port)?;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let mut options = std::fs::OpenOptions::new();
    let written = options.write(true).create_new(true).mode(0o600).open(&file);
    std::io::Write::write_all(&mut written.unwrap(), token.as_bytes()).unwrap();
    let target = format!("127.0.0.1:{port}");

    let mut python = client(&environment.python);
    python.arg(script("client.py")).arg(&target).arg(&file);
    check(python.arg(&kernel).arg(&initrd), HITS)?;
    let protos = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto");
    for from in [protos, "reflection"] {
        let mut node = client("node".as_ref());
        node.env("NODE_PATH", &environment.modules)
            .arg(script("client.js"));
        node.arg(&target).arg(from).arg(&file);
        check(node.arg(&kernel).arg(&initrd), HITS)?;
    }
    drop(machine);
    Ok(())
}

#[test]
fn clients_of_other_languages_read_and_decide_hits_of_a_guest() {
    let variable = |name: &str| {
        let value = env::var_os(name);
        if value.is_none() {
            eprintln!("skipped: needs {name} (cargo lab test)");
        }
        value
    };
    let (Some(python), Some(modules)) = (
        variable("HVPROBE_TEST_PYTHON"),
        variable("HVPROBE_TEST_NODE"),
    ) else {
        return;
    };
    let (Some(lab), Some(rig)) = (variable("HVPROBE_TEST_LAB"), variable("HVPROBE_TEST_RIG"))
    else {
        return;
    };
    let environment = Environment {
        python,
        modules,
        lab,
        rig,
    };
    let tries = if environment.rig == "direct" {
        1
    } else {
        TRIES
    };
    for number in 1..=tries {
        match attempt(&environment) {
            Ok(()) => return,
            Err(error) if number < tries => eprintln!("try {number}: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}
