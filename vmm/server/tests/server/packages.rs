//! The packages in `docs/clients`, built as their users build them: they read events, and their examples boot a
//! guest, plant a probe and stop the guest.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, Event, EventKind, Sink};
use hvprobe_linux::task::Task;
use hvprobe_proto::Token;
use hvprobe_server::{Listener, Loopback, Server};
use hvprobe_spec::{ProbeId, RegisterSet};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Programs that print the events of the machine `synthetic`, and the error of planting a probe there.
const READ_IN_PYTHON: &str = r#"
import sys
from hvprobe import Client, Refused
with Client(sys.argv[1], open(sys.argv[2]).read().strip()) as client:
    events = client.events("synthetic")
    print("in force", flush=True)
    for event in events:
        print(event.seq, event.vcpu, event.task.comm.decode(), hex(event.registers.rdi))
    print(events.dropped, "dropped")
    try:
        client.plant("synthetic", "p vfs_read")
    except Refused as refused:
        print(refused.code.name, refused)
"#;
const READ_IN_JAVASCRIPT: &str = r#"
const { Client, Refused } = require("hvprobe");
async function main(target, file) {
  const token = require("fs").readFileSync(file, "utf8").trim();
  const client = new Client(target, { token });
  const events = await client.events("synthetic");
  console.log("in force");
  for await (const { seq, vcpu, task, registers } of events) {
    console.log(`${seq} ${vcpu} ${task.comm} 0x${BigInt(registers.rdi).toString(16)}`);
  }
  console.log(events.dropped, "dropped");
  await client.plant("synthetic", "p vfs_read").catch((error) => {
    if (error instanceof Refused) console.log(error.code, error.message);
  });
  client.close();
}
main(...process.argv.slice(1));
"#;
/// Output of these programs.
const READ: &str = "\
0 0 cat 0xffff888000000000
1 1 cat 0xffff888000000001
2 2 cat 0xffff888000000002
7 dropped
NOT_FOUND there is no machine `synthetic`
";

/// Programs that serve two pages of machines and then a page that leads to itself, and print the machines and the
/// error that their client gets.
const PAGES_IN_PYTHON: &str = r#"
from concurrent.futures import ThreadPoolExecutor
import grpc
from hvprobe import Client, Machine
from hvprobe.v1 import machines_pb2, machines_pb2_grpc
class Pages(machines_pb2_grpc.MachinesServicer):
    last = ("b", "")
    def ListMachines(self, request, context):
        name, token = self.last if request.page_token == "behind a" else ("a", "behind a")
        return machines_pb2.ListMachinesResponse(machines=[Machine(name=name)], next_page_token=token)
server = grpc.server(ThreadPoolExecutor(1))
machines_pb2_grpc.add_MachinesServicer_to_server(Pages(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with Client(f"127.0.0.1:{port}") as client:
    print(*(machine.name for machine in client.machines()))
    Pages.last = ("b", "behind a")
    try:
        client.machines()
    except RuntimeError as error:
        print(error)
server.stop(None)
"#;
const PAGES_IN_JAVASCRIPT: &str = r#"
const grpc = require("@grpc/grpc-js");
const { Client } = require("hvprobe");
async function main() {
  const server = new grpc.Server();
  const { service } = new Client("127.0.0.1:1").services.Machines.constructor;
  let last = { machines: [{ name: "b" }] };
  const first = { machines: [{ name: "a" }], nextPageToken: "behind a" };
  const ListMachines = ({ request }, answer) =>
    answer(null, request.pageToken === "behind a" ? last : first);
  server.addService(service, { ListMachines });
  const credentials = grpc.ServerCredentials.createInsecure();
  const port = await new Promise((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", credentials, (error, port) => (error ? reject(error) : resolve(port))),
  );
  const client = new Client(`127.0.0.1:${port}`);
  console.log((await client.machines()).map(({ name }) => name).join(" "));
  last = first;
  await client.machines().catch((error) => console.log(error.message));
  client.close();
  server.forceShutdown();
}
main();
"#;

/// Output of these programs.
const PAGES: &str = "a b\nthe server's list of machines does not end\n";

/// A server with events of a machine called `synthetic`.
struct Serving {
    folder: TempDir,
    runtime: Runtime,
    stop: oneshot::Sender<()>,
    served: JoinHandle<()>,
    sink: Sink,
    address: String,
}

impl Serving {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let entered = runtime.enter();
        let mut server = Server::new();
        let sink = server.publish("synthetic");
        let token = Token::read_or_create(&folder.path().join("token")).unwrap();
        let loopback = Loopback::bind("127.0.0.1:0".parse().unwrap(), token);
        let loopback = runtime.block_on(loopback).unwrap();
        let address = loopback.address().to_string();
        server.listen_too(loopback);
        let listener = Listener::bind(&folder.path().join("socket")).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = runtime.spawn(async {
            let stopped = async {
                let _asked_or_dropped = stopped.await;
            };
            server.serve(listener, stopped).await.unwrap();
        });
        drop(entered);
        Self {
            folder,
            runtime,
            stop,
            served,
            sink,
            address,
        }
    }

    /// Runs `reader`, which reads the events of the machine over TCP, and returns its output.
    fn read_by(&mut self, mut reader: Command) -> String {
        reader.arg(&self.address);
        reader.arg(self.folder.path().join("token"));
        let mut child = reader.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "in force");
        (self.sink)(&[event(0), event(1)], 0);
        (self.sink)(&[event(2)], 7);
        // The events end with the sink.
        self.sink = Box::new(|_, _| ());
        let printed = lines.map(|line| line.unwrap() + "\n").collect();
        assert!(child.wait().unwrap().success(), "{printed}");
        printed
    }

    /// Runs `example`, which boots a guest and probes it for some seconds, over the socket.
    fn example_of(&self, mut example: Command) {
        let kernel = env::var_os("HVPROBE_TEST_VMLINUZ");
        let Some(kernel) = kernel.filter(|_| Path::new("/dev/kvm").exists()) else {
            eprintln!("skipped in part: needs a kernel (cargo lab test) and KVM");
            return;
        };
        let socket = self.folder.path().join("socket");
        example.arg(format!("unix:{}", socket.display()));
        example.args(["--seconds", "3", "--kernel"]).arg(kernel);
        let output = example.output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let wrong = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{printed}{wrong}");
        // On a host that can run Linux, events are printed before that.
        assert!(
            printed.ends_with(" dropped\nthe guest has ended\n"),
            "{printed}"
        );
    }

    fn end(self) {
        drop(self.stop);
        let patience = Duration::from_secs(60);
        let ended = self
            .runtime
            .block_on(async { timeout(patience, self.served).await });
        ended.expect("the server ends").unwrap();
    }
}

fn event(number: u64) -> Event {
    let mut comm = [0; 16];
    comm[..3].copy_from_slice(b"cat");
    Event {
        kind: EventKind::Hit,
        seq: number,
        probe: ProbeId(1),
        vcpu: u32::try_from(number).unwrap(),
        host_ns: number,
        guest_tsc: number,
        regs: Regs {
            rdi: 0xffff_8880_0000_0000 + number,
            ..Regs::default()
        },
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: Some(Task {
            pid: 1,
            tgid: 1,
            comm,
        }),
        cost_ns: 0,
    }
}

/// Returns a command that runs `name` under `timeout`, in case it hangs.
fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "120"]).arg(name);
    command.stdin(Stdio::null());
    command
}

/// Runs `command`, and returns its output.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {wrong}");
    String::from_utf8(output.stdout).unwrap()
}

/// Copies the package of a language and the `.proto` files to where they may be changed. Returns the package's
/// folder; `folder` stands for the root of the repository.
fn copied(folder: &Path, language: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let package = format!("docs/clients/{language}");
    fs::create_dir_all(folder.join("docs/clients")).unwrap();
    for name in [package.as_str(), "proto"] {
        let (from, to) = (root.join(name), folder.join(name));
        run(Command::new("cp").arg("-r").arg(from).arg(to));
    }
    folder.join(package)
}

#[test]
fn python_package_traces() {
    let Some(python) = env::var_os("HVPROBE_TEST_PYTHON") else {
        eprintln!("skipped: needs Python's gRPC (cargo lab test)");
        return;
    };
    let mut serving = Serving::start();
    let folder = serving.folder.path().to_owned();
    let package = copied(&folder, "python");
    let site = folder.join("site");
    run(program(&python)
        .args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--no-build-isolation", "--target"])
        .args([&site, &package]));
    let python = || {
        let mut command = program(&python);
        command.env("PYTHONPATH", &site);
        command
    };
    let mut reader = python();
    reader.args(["-c", READ_IN_PYTHON]);
    assert_eq!(serving.read_by(reader), READ);
    assert_eq!(run(python().args(["-c", PAGES_IN_PYTHON])), PAGES);
    let mut example = python();
    example.arg(package.join("example.py"));
    serving.example_of(example);
    serving.end();
}

#[test]
fn node_package_traces() {
    let Some(modules) = env::var_os("HVPROBE_TEST_NODE") else {
        eprintln!("skipped: needs Node's gRPC (cargo lab test)");
        return;
    };
    let mut serving = Serving::start();
    let folder = serving.folder.path().to_owned();
    let package = copied(&folder, "node");
    run(program("npm")
        .args(["pack", "--silent", "--pack-destination"])
        .arg(&folder)
        .current_dir(&package));
    // The files that npm creates when it installs the package.
    let own = folder.join("node_modules");
    let installed = own.join("hvprobe");
    fs::create_dir_all(&installed).unwrap();
    run(program("tar")
        .args(["--extract", "--strip-components=1", "--directory"])
        .arg(&installed)
        .arg("--file")
        .arg(folder.join(concat!("hvprobe-", env!("CARGO_PKG_VERSION"), ".tgz"))));
    let node = || {
        let mut command = program("node");
        let mut paths = OsString::from(&own);
        paths.push(":");
        paths.push(&modules);
        command.env("NODE_PATH", paths);
        command
    };
    let mut reader = node();
    reader.args(["-e", READ_IN_JAVASCRIPT]);
    assert_eq!(serving.read_by(reader), READ);
    assert_eq!(run(node().args(["-e", PAGES_IN_JAVASCRIPT])), PAGES);
    let mut example = node();
    example.arg(package.join("example.js"));
    serving.example_of(example);
    serving.end();
}
