//! Tests a server with many machines, whose guests are micro-kernels, on any KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hvprobe_fixtures::dwarf::{self, BUILD_ID};
use hvprobe_machine::{Bounds, MachineConfig};
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::probes_client::ProbesClient;
use hvprobe_proto::v1::sources_client::SourcesClient;
use hvprobe_proto::v1::watch_machines_response::What;
use hvprobe_proto::v1::{
    BootRequest, DeleteMachineRequest, EndReason, ErrorDetail, ErrorKind, ListLinesRequest,
    ListMachinesRequest, ListProbesRequest, ListVariablesRequest, Machine, MachineState,
    PauseRequest, ProbeSpec, RegisterRequest, StopRequest, SubscribeRequest,
    UploadDebugInfoRequest, WatchMachinesRequest, WatchRequest,
};
use hvprobe_server::{Limits, Listener, ServeError, Server};
use hvprobe_tests::micro::host::{build, catch_mode};
use prost::Message as _;
use prost_types::FieldMask;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

const PATIENCE: Duration = Duration::from_secs(120);
/// Default maximum number of machines of a server.
const MACHINES: usize = 64;
/// Memory limit of the server: more than all machines have.
const MEMORY: u64 = 64 << 30;
/// Time limit for stopping a server that runs all its machines.
const STOPPED: Duration = Duration::from_secs(5);

/// A server, and a kernel whose guest runs until it is stopped.
struct Running {
    folder: TempDir,
    kernel: MachineConfig,
    _kernel: TempDir,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServeError>>,
}

impl Running {
    /// Starts a server. Without a suitable KVM, returns `None`.
    fn start(test: &str, limits: Limits) -> Option<Self> {
        catch_mode(test)?;
        let (_kernel, kernel) = build(|kernel| {
            let asm = kernel.asm();
            let mut again = asm.create_label();
            // An instruction can have only one label.
            asm.nop()?;
            asm.set_label(&mut again)?;
            // Idles, because so many spinning guests would leave the host no time to boot the last ones.
            asm.hlt()?;
            asm.jmp(again)
        });
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket")).unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = Server::new()
            .with_limits(limits)
            .with_debug_dir(folder.path().join("debug"));
        let served = tokio::spawn(server.serve(listener, async {
            let _asked_or_dropped = stopped.await;
        }));
        Some(Self {
            folder,
            kernel,
            _kernel,
            stop,
            served,
        })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    async fn connect(&self) -> Channel {
        let endpoint = Endpoint::try_from(format!("unix:{}", self.socket().display()));
        endpoint.unwrap().connect().await.unwrap()
    }

    async fn machines(&self) -> MachinesClient<Channel> {
        MachinesClient::new(self.connect().await)
    }

    fn request(&self, name: &str) -> BootRequest {
        BootRequest {
            name: name.to_owned(),
            kernel: self.kernel.kernel.display().to_string(),
            cmdline: self.kernel.cmdline.clone(),
            cpus: self.kernel.cpus,
            memory: self.kernel.memory,
            ..Default::default()
        }
    }

    /// Boots a machine, waits until its guest runs, and returns the machine.
    async fn boot(&self, machines: &mut MachinesClient<Channel>, name: &str) -> Machine {
        machines.boot(self.request(name)).await.unwrap();
        let machine = name.to_owned();
        let mut states = machines
            .watch(WatchRequest { machine })
            .await
            .unwrap()
            .into_inner();
        let running = async {
            while let Some(machine) = states.message().await.unwrap() {
                if machine.state() != MachineState::Booting {
                    return machine;
                }
            }
            panic!("{name} ended without a word");
        };
        let machine = timeout(PATIENCE, running).await.expect("its guest runs");
        assert_eq!(machine.state(), MachineState::Running, "{machine:?}");
        machine
    }

    async fn stop(self) -> Duration {
        let since = Instant::now();
        self.stop.send(()).unwrap();
        let served = timeout(PATIENCE, self.served).await;
        served.expect("it ends").unwrap().unwrap();
        since.elapsed()
    }
}

fn kind(status: &Status) -> ErrorKind {
    let packed = tonic_types::Status::decode(status.details()).unwrap();
    let detail = ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap();
    detail.kind()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_ends_all_the_machines_it_may_have_within_five_seconds() {
    let limits = Limits {
        // Few pages of the machines are ever touched, so any host has room for them.
        memory: MEMORY,
        ..Limits::of_host()
    };
    let Some(running) = Running::start("64 machines", limits) else {
        return;
    };
    let mut machines = running.machines().await;
    for number in 0..MACHINES {
        running.boot(&mut machines, &format!("m{number}")).await;
    }
    let error = machines.boot(running.request("more")).await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::TooManyMachines);
    let took = running.stop().await;
    eprintln!("{MACHINES} machines ended in {took:?}");
    assert!(took < STOPPED, "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_machines_have_is_given_back_when_they_end() {
    let limits = Limits {
        memory: 128 << 20,
        ..Limits::of_host()
    };
    let Some(running) = Running::start("memory in all", limits) else {
        return;
    };
    let mut machines = running.machines().await;
    for round in 0..3 {
        running.boot(&mut machines, &format!("a{round}")).await;
        running.boot(&mut machines, &format!("b{round}")).await;
        let error = machines.boot(running.request("c")).await.unwrap_err();
        assert_eq!(kind(&error), ErrorKind::TooMuchMemory);
        for name in ["a", "b"] {
            let machine = format!("{name}{round}");
            let ended = machines.stop(StopRequest { machine }).await.unwrap();
            let ending = ended.into_inner().ending.unwrap();
            assert_eq!(ending.reason(), EndReason::Stopped);
        }
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_are_seen_to_come_change_end_and_go() {
    let Some(running) = Running::start("a watch of machines", Limits::of_host()) else {
        return;
    };
    let mut machines = running.machines().await;
    running.boot(&mut machines, "first").await;
    let watched = machines
        .watch_machines(WatchMachinesRequest::default())
        .await;
    let mut watched = watched.unwrap().into_inner();
    let mut next = async || {
        let message = timeout(PATIENCE, watched.message()).await;
        message.expect("a message").unwrap().unwrap().what.unwrap()
    };
    match next().await {
        What::Machine(machine) => assert_eq!(machine.name, "first"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(next().await, What::AllTold(_)));

    let mut events = EventsClient::new(running.connect().await);
    let all = events.subscribe(SubscribeRequest::default()).await;
    let mut all = all.unwrap().into_inner();
    let mut event = async || {
        let message = timeout(PATIENCE, all.message()).await;
        message.expect("a message").unwrap().unwrap()
    };
    assert_eq!(event().await.machine, "first");
    let second = running.boot(&mut machines, "second").await;
    let mut states = Vec::new();
    let limit = std::time::Instant::now() + PATIENCE;
    let mut until = async |wanted: MachineState| {
        loop {
            // A time limit for all messages together, because messages may come without end.
            assert!(
                std::time::Instant::now() < limit,
                "{wanted:?} after {states:?}"
            );
            match next().await {
                // The first machine may be reported again.
                What::Machine(machine) if machine.name == "first" => {
                    assert_eq!(machine.state(), MachineState::Running);
                }
                What::Machine(machine) => {
                    assert_eq!((&machine.name, &machine.uid), (&second.name, &second.uid));
                    states.push(machine.state());
                    if machine.state() == wanted {
                        return machine;
                    }
                }
                other => panic!("{other:?} after {states:?}"),
            }
        }
    };
    let machine = || "second".to_owned();
    until(MachineState::Running).await;
    machines
        .pause(PauseRequest {
            machine: machine(),
            ..Default::default()
        })
        .await
        .unwrap();
    until(MachineState::Paused).await;
    machines
        .stop(StopRequest { machine: machine() })
        .await
        .unwrap();
    let ended = until(MachineState::Stopped).await;
    // A stream of all machines includes machines that are booted later, until they end.
    let came = event().await;
    let position = came.position.as_ref().expect("where its stream is");
    assert_eq!(
        (&came.machine, &position.machine_uid),
        (&second.name, &second.uid)
    );
    assert!(came.anchor.is_some() && came.events.is_empty(), "{came:?}");
    let over = loop {
        assert!(std::time::Instant::now() < limit, "its stream never ends");
        let message = event().await;
        assert_eq!(message.machine, second.name, "{message:?}");
        if message.ended.is_some() {
            break message.ended;
        }
    };
    assert_eq!(over, ended.ending);
    assert!(ended.end_ns.is_some() && ended.ending.is_some());
    let request = DeleteMachineRequest { machine: machine() };
    machines.delete_machine(request).await.unwrap();
    let gone = loop {
        assert!(std::time::Instant::now() < limit, "it never goes");
        match next().await {
            // The end may be reported again, unchanged.
            What::Machine(again) => {
                assert_eq!(
                    (again.uid, again.ending),
                    (second.uid.clone(), ended.ending.clone())
                );
                assert_eq!(again.end_ns, ended.end_ns);
            }
            What::Gone(gone) => break gone,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((gone.name, gone.uid), (second.name, second.uid));

    let mut names = async |states: &[MachineState], page_size| {
        let (mut names, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = ListMachinesRequest {
                states: states.iter().map(|state| (*state).into()).collect(),
                page_size,
                page_token,
                ..Default::default()
            };
            let list = machines.list_machines(request).await.unwrap().into_inner();
            assert!(page_size == 0 || list.machines.len() <= 1);
            names.extend(list.machines.into_iter().map(|machine| machine.name));
            page_token = list.next_page_token;
            if page_token.is_empty() {
                return names;
            }
        }
    };
    assert_eq!(names(&[], 0).await, ["first"]);
    assert_eq!(names(&[MachineState::Running], 1).await, ["first"]);
    assert!(names(&[MachineState::Stopped], 1).await.is_empty());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_and_watches_have_pages_and_the_fields_that_are_asked_for() {
    let Some(running) = Running::start("pages", Limits::of_host()) else {
        return;
    };
    let mut machines = running.machines().await;
    let mut uids = Vec::new();
    for name in ["c", "a", "b"] {
        uids.push((name, running.boot(&mut machines, name).await.uid));
    }
    let (mut pages, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListMachinesRequest {
            page_size: 1,
            page_token,
            read_mask: Some(FieldMask {
                paths: vec!["name".to_owned()],
            }),
            ..Default::default()
        };
        let list = machines.list_machines(request).await.unwrap().into_inner();
        pages.push(list.machines);
        page_token = list.next_page_token;
        if page_token.is_empty() {
            break;
        }
        assert!(pages.len() < 10, "the pages do not end: {pages:?}");
    }
    let named = |name: &str| Machine {
        name: name.to_owned(),
        ..Default::default()
    };
    // No kernel, no state: only the requested fields.
    assert_eq!(pages, [[named("a")], [named("b")], [named("c")]]);
    let whole = ListMachinesRequest::default();
    let whole = machines.list_machines(whole).await.unwrap().into_inner();
    let kernels = whole.machines.iter().filter(|it| !it.kernel.is_empty());
    assert_eq!((kernels.count(), &*whole.next_page_token), (3, ""));

    let watch = WatchMachinesRequest {
        read_mask: Some(FieldMask {
            paths: vec!["name".to_owned()],
        }),
        ..Default::default()
    };
    let mut watched = machines.watch_machines(watch).await.unwrap().into_inner();
    let mut listed = BTreeMap::new();
    for _ in 0..100 {
        let next = timeout(PATIENCE, watched.message()).await;
        match next.expect("a message").unwrap().unwrap().what {
            Some(What::Machine(machine)) => listed.insert(machine.name.clone(), machine),
            Some(What::AllTold(_)) => break,
            other => panic!("{other:?} after {listed:?}"),
        };
    }
    let expected = uids.into_iter().map(|(name, uid)| {
        let machine = Machine { uid, ..named(name) };
        (machine.name.clone(), machine)
    });
    assert_eq!(listed, expected.collect());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_crowd_one_machine_keep_nobody_from_another() {
    /// Number of calls: 200 on each of three connections.
    const CALLS: usize = 3 * 200;
    /// Time limit of another client's call while these calls run.
    const SOON: Duration = Duration::from_secs(20);
    let Some(running) = Running::start("a crowd", Limits::of_host()) else {
        return;
    };
    let mut machines = running.machines().await;
    for name in ["crowded", "other"] {
        running.boot(&mut machines, name).await;
    }
    let mut crowd = JoinSet::new();
    let mut channel = running.connect().await;
    for number in 0..CALLS {
        if number % 200 == 0 {
            channel = running.connect().await;
        }
        let mut machines = MachinesClient::new(channel.clone());
        let mut probes = ProbesClient::new(channel.clone());
        crowd.spawn(async move {
            let machine = || "crowded".to_owned();
            machines
                .pause(PauseRequest {
                    machine: machine(),
                    ..Default::default()
                })
                .await?;
            let request = ListProbesRequest {
                machine: machine(),
                ..Default::default()
            };
            probes.list_probes(request).await.map(drop)
        });
        if number == CALLS / 2 {
            let mut other = running.machines().await;
            let listed = timeout(SOON, other.list_machines(ListMachinesRequest::default()));
            let listed = listed.await.expect("a list").unwrap().into_inner();
            assert_eq!(listed.machines.len(), 2);
            let machine = "other".to_owned();
            let stopped = timeout(SOON, other.stop(StopRequest { machine })).await;
            stopped.expect("it is stopped").unwrap();
        }
    }
    while let Some(called) = timeout(PATIENCE, crowd.join_next())
        .await
        .expect("an answer")
    {
        called.unwrap().unwrap();
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_beyond_those_of_a_machine_are_refused_and_what_is_left_is_reported() {
    let limits = Limits {
        each: Bounds {
            probes: 3,
            ..Bounds::default()
        },
        ..Limits::of_host()
    };
    let Some(running) = Running::start("many probes", limits) else {
        return;
    };
    let mut machines = running.machines().await;
    running.boot(&mut machines, "one").await;
    let mut probes = ProbesClient::new(running.connect().await);
    let mut register = async |definitions: &[&str]| {
        let spec = |definition: &&str| ProbeSpec {
            definition: (*definition).to_owned(),
            ..Default::default()
        };
        let request = RegisterRequest {
            machine: "one".to_owned(),
            probes: definitions.iter().map(spec).collect(),
            ..Default::default()
        };
        let registered = timeout(PATIENCE, probes.register(request)).await;
        Ok::<_, Status>(registered.expect("an answer")?.into_inner().ids.len())
    };
    assert_eq!(register(&["p:a main", "p:b main"]).await.unwrap(), 2);
    let error = register(&["p:c main", "p:d main"]).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    assert_eq!(kind(&error), ErrorKind::TooManyProbes);
    let info = error.get_details_error_info().unwrap();
    let metadata = ["limit", "most", "left"].map(|name| info.metadata[name].as_str());
    assert_eq!(metadata, ["probes_per_machine", "3", "1"]);
    assert_eq!(register(&["p:c main"]).await.unwrap(), 1);
    assert_eq!(
        register(&["p:d main"]).await.unwrap_err().code(),
        error.code()
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_and_variables_of_a_machines_kernel_are_found_by_its_build_id() {
    let Some(running) = Running::start("sources", Limits::of_host()) else {
        return;
    };
    let mut machines = running.machines().await;
    running.boot(&mut machines, "m").await;
    let mut sources = SourcesClient::new(running.connect().await);
    let lines = |function: &str| ListLinesRequest {
        machine: "m".to_owned(),
        function: function.to_owned(),
    };
    let error = sources.list_lines(lines("vfs_test")).await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::NoDebugInfo);

    // The file is added while the server runs. It has this kernel's build id, though not its functions.
    let id: Vec<_> = BUILD_ID.iter().map(|byte| format!("{byte:02x}")).collect();
    let debug = running.folder.path().join("debug/.build-id").join(&id[0]);
    fs::create_dir_all(&debug).unwrap();
    fs::write(
        debug.join(format!("{}.debug", id[1..].concat())),
        dwarf::file(),
    )
    .unwrap();
    let found = sources.list_lines(lines("vfs_test")).await.unwrap();
    let functions = found.into_inner().functions;
    let numbers: Vec<_> = functions[0].lines.iter().map(|line| line.number).collect();
    assert_eq!((functions[0].first, numbers), (10, vec![0, 1, 3, 4, 5]));
    let places = functions[0].lines.iter().flat_map(|line| &line.places);
    assert!(
        places.into_iter().all(|place| !place.is_empty()),
        "{functions:?}"
    );
    let error = sources.list_lines(lines("nobody")).await.unwrap_err();
    assert_eq!(
        (error.code(), kind(&error)),
        (Code::NotFound, ErrorKind::NotInSources)
    );

    let request = ListVariablesRequest {
        machine: "m".to_owned(),
        point: "vfs_test:5".to_owned(),
    };
    let found = sources.list_variables(request).await.unwrap().into_inner();
    let variables = &found.places[0].variables;
    let fetch = |name: &str| {
        let found = variables.iter().find(|it| it.name == name);
        found.map(|it| (it.fetch.as_str(), it.unreadable.as_str()))
    };
    assert_eq!(fetch("count"), Some(("+8(%sp)", "")));
    assert_eq!(fetch("file"), Some(("", "not kept here")));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploaded_debug_information_answers_until_its_machine_ends() {
    let Some(running) = Running::start("uploads", Limits::of_host()) else {
        return;
    };
    let mut machines = running.machines().await;
    for name in ["m", "other"] {
        running.boot(&mut machines, name).await;
    }
    let mut sources = SourcesClient::new(running.connect().await);
    let upload = |named: [&str; 2], file: &[u8]| {
        let part = |machine: &str, data: &[u8]| UploadDebugInfoRequest {
            machine: machine.to_owned(),
            data: data.to_vec(),
        };
        let (first, rest) = file.split_at(file.len() / 2);
        let mut parts = vec![part(named[0], first), part(named[1], b"")];
        parts.extend(rest.chunks(100).map(|data| part("", data)));
        tokio_stream::iter(parts)
    };
    let file = dwarf::file();
    for (named, file, expected) in [
        (["nobody", ""], &*file, ErrorKind::NoSuchMachine),
        (["m", "m"], &*file, ErrorKind::BadStream),
        (["m", ""], b"no file with anything", ErrorKind::NoDebugInfo),
        (
            ["m", ""],
            &dwarf::file_of(b"another build"),
            ErrorKind::NoDebugInfo,
        ),
    ] {
        let refused = sources.upload_debug_info(upload(named, file)).await;
        assert_eq!(kind(&refused.unwrap_err()), expected);
    }
    let nothing = sources.upload_debug_info(tokio_stream::iter([])).await;
    assert_eq!(kind(&nothing.unwrap_err()), ErrorKind::BadStream);

    let kept = sources.upload_debug_info(upload(["m", ""], &file)).await;
    let kept = kept.unwrap().into_inner();
    assert_eq!(kept.build_id, BUILD_ID);
    assert_eq!(kept.length, file.len() as u64);
    let lines = |machine: &str| ListLinesRequest {
        machine: machine.to_owned(),
        function: "vfs_test".to_owned(),
    };
    for machine in ["m", "other"] {
        let found = sources.list_lines(lines(machine)).await.unwrap();
        assert_eq!(found.into_inner().functions[0].first, 10);
    }
    let machine = "m".to_owned();
    machines.stop(StopRequest { machine }).await.unwrap();
    // Threads of the machine may use the file for a moment longer.
    let gone = async { while sources.list_lines(lines("other")).await.is_ok() {} };
    timeout(PATIENCE, gone).await.expect("it goes");
    let error = sources.list_lines(lines("other")).await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::NoDebugInfo);
    running.stop().await;
}
