//! Makes every call with the longest lists that it accepts, and measures how long another client waits. No
//! machine runs: the calls are about an ended machine with the maximum number of probes.

use std::path::Path;
use std::time::Instant;

use hvprobe_fixtures::calls::Call;
use hvprobe_fixtures::messages::Messages;
use hvprobe_proto::v1::actions::Hold;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::{
    Actions, AggregateFor, AggregateRequest, ArmAllRequest, Ask, BootRequest, ConsoleRequest,
    ConsoleWriteRequest, DecideFor, DecideRequest, DeleteMachineRequest, DescribeTypesRequest,
    DisableRequest, DisarmAllRequest, EnableRequest, EventKind, GetMachineRequest, HoldRequest,
    InjectNmiRequest, ListLinesRequest, ListMachinesRequest, ListProbesRequest,
    ListSessionsRequest, ListSymbolsRequest, ListVariablesRequest, MachineState, OpenSession,
    PauseRequest, Probe, ProbeSpec, ReadKernelRequest, RegisterRequest, ReportRequest,
    ResumeRequest, SetOptimizationRequest, StopRequest, SubscribeRequest, UnregisterRequest,
    UploadDebugInfoRequest, WaitRequest, WatchMachinesRequest, WatchRequest, aggregate_request,
    decide_request, hold_request,
};
use prost::Message;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::bounds::limits::{BATCH, CONSOLE_WRITE, DEFINITION, MESSAGE, SHOWN, STATES, TYPES};
use crate::machines::fleet::tests::add_ended_with;

/// Maximum number of probes of a machine.
const PROBES: u32 = 65_536;
const ENDED: &str = "ended";
const SYNTHETIC: &str = "synthetic";
/// Maximum time that another client may wait for its answer. A search of one list for each entry of another takes
/// far longer. An answer can take ten times as long on a busy machine as on an idle one.
const ANSWERED: Duration = Duration::from_secs(1);
/// Time limit for a call.
const PATIENCE: Duration = Duration::from_secs(120);

fn probe(id: u32) -> Probe {
    Probe {
        id,
        actions: Some(Actions {
            hold: Some(Hold::Ask(Ask::default())),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns lists of ids of the maximum length: all the same, all unknown, all different.
fn lists() -> [Vec<u32>; 3] {
    let length = u32::try_from(BATCH).unwrap();
    [
        vec![PROBES - 1; BATCH],
        (PROBES..PROBES + length).collect(),
        (PROBES - length..PROBES).rev().collect(),
    ]
}

/// Returns the longest messages that begin a call of the method at `path`, with these ids if it takes ids.
fn longest(path: &str, ids: &[u32]) -> Vec<Vec<u8>> {
    fn one(message: impl Message) -> Vec<Vec<u8>> {
        vec![message.encode_to_vec()]
    }
    let machine = || ENDED.to_owned();
    let numbers = || ids.iter().map(|id| id.cast_signed());
    let names = |count: usize| (0..count).map(|number| format!("{:x<60}", ids[number]));
    let specs = || {
        // As long as fits into a message.
        let definition = format!("p {}", "x".repeat(MESSAGE / BATCH - 24));
        let spec = ProbeSpec {
            definition,
            ..Default::default()
        };
        vec![spec; BATCH]
    };
    let labels = || names(64).map(|name| (name.clone(), name)).collect();
    let mask = || {
        let paths = vec!["name".to_owned(); 64];
        Some(prost_types::FieldMask { paths })
    };
    match path {
        "/hvprobe.v1.Decisions/Decide" => one(DecideRequest {
            what: Some(decide_request::What::DecideFor(DecideFor {
                machine: machine(),
                probes: ids.to_vec(),
                ..Default::default()
            })),
        }),
        "/hvprobe.v1.Events/Subscribe" => one(SubscribeRequest {
            machine: SYNTHETIC.to_owned(),
            probes: ids.to_vec(),
            pids: numbers().collect(),
            tgids: numbers().collect(),
            comms: ids.iter().map(|id| id.to_string().into_bytes()).collect(),
            kinds: vec![EventKind::Hit.into(); BATCH],
            filter: ["cpu == 9"; 64].join(" || "),
            ..Default::default()
        }),
        "/hvprobe.v1.Histograms/Aggregate" => one(AggregateRequest {
            what: Some(aggregate_request::What::AggregateFor(AggregateFor {
                machine: machine(),
                probes: ids.to_vec(),
                histogram: "keys=common_pid".to_owned(),
            })),
        }),
        "/hvprobe.v1.Host/Report" => one(ReportRequest {}),
        "/hvprobe.v1.Machines/Boot" => one(BootRequest {
            kernel: "/nowhere".to_owned(),
            probes: specs(),
            labels: labels(),
            request_id: "x".repeat(128),
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/ListMachines" => one(ListMachinesRequest {
            labels: labels(),
            states: vec![MachineState::Stopped.into(); STATES],
            read_mask: mask(),
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/WatchMachines" => one(WatchMachinesRequest {
            labels: labels(),
            read_mask: mask(),
        }),
        "/hvprobe.v1.Machines/GetMachine" => one(GetMachineRequest { machine: machine() }),
        "/hvprobe.v1.Machines/Watch" => one(WatchRequest { machine: machine() }),
        "/hvprobe.v1.Machines/Pause" => one(PauseRequest {
            machine: machine(),
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/Resume" => one(ResumeRequest { machine: machine() }),
        "/hvprobe.v1.Machines/InjectNmi" => one(InjectNmiRequest {
            machine: machine(),
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/Stop" => one(StopRequest { machine: machine() }),
        // Names no existing machine: the ended one is still needed.
        "/hvprobe.v1.Machines/DeleteMachine" => one(DeleteMachineRequest {
            machine: "x".repeat(MESSAGE / 2),
        }),
        "/hvprobe.v1.Machines/Wait" => one(WaitRequest { machine: machine() }),
        "/hvprobe.v1.Machines/Console" => one(ConsoleRequest {
            machine: machine(),
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/ReadKernel" => one(ReadKernelRequest {
            machine: machine(),
            length: 1 << 20,
            ..Default::default()
        }),
        "/hvprobe.v1.Machines/ConsoleWrite" => one(ConsoleWriteRequest {
            machine: machine(),
            data: vec![b'x'; CONSOLE_WRITE],
        }),
        "/hvprobe.v1.Probes/Register" => one(RegisterRequest {
            machine: machine(),
            probes: specs(),
            request_id: "x".repeat(128),
            ..Default::default()
        }),
        "/hvprobe.v1.Probes/Unregister" => one(UnregisterRequest {
            machine: machine(),
            ids: ids.to_vec(),
        }),
        "/hvprobe.v1.Probes/Enable" => one(EnableRequest {
            machine: machine(),
            ids: ids.to_vec(),
        }),
        "/hvprobe.v1.Probes/Disable" => one(DisableRequest {
            machine: machine(),
            ids: ids.to_vec(),
        }),
        "/hvprobe.v1.Probes/ArmAll" => one(ArmAllRequest { machine: machine() }),
        "/hvprobe.v1.Probes/DisarmAll" => one(DisarmAllRequest { machine: machine() }),
        "/hvprobe.v1.Probes/SetOptimization" => one(SetOptimizationRequest {
            machine: machine(),
            ..Default::default()
        }),
        "/hvprobe.v1.Probes/ListProbes" => one(ListProbesRequest {
            machine: machine(),
            page_token: ids[0].saturating_sub(1).to_string(),
            ..Default::default()
        }),
        "/hvprobe.v1.Sessions/Hold" => one(HoldRequest {
            what: Some(hold_request::What::Open(OpenSession {
                owner: "me".to_owned(),
                take_over: names(64).collect(),
                ..Default::default()
            })),
        }),
        "/hvprobe.v1.Sessions/ListSessions" => one(ListSessionsRequest {
            owner: "x".repeat(SHOWN),
            ..Default::default()
        }),
        "/hvprobe.v1.Sources/ListLines" => one(ListLinesRequest {
            machine: machine(),
            function: "x".repeat(DEFINITION),
        }),
        "/hvprobe.v1.Sources/ListVariables" => one(ListVariablesRequest {
            machine: machine(),
            point: "x".repeat(DEFINITION),
        }),
        "/hvprobe.v1.Sources/UploadDebugInfo" => one(UploadDebugInfoRequest {
            machine: machine(),
            data: vec![0; MESSAGE - 100],
        }),
        "/hvprobe.v1.Symbols/ListSymbols" => one(ListSymbolsRequest {
            machine: machine(),
            pattern: "*".repeat(DEFINITION),
            ..Default::default()
        }),
        "/hvprobe.v1.Symbols/DescribeTypes" => one(DescribeTypesRequest {
            machine: machine(),
            names: names(TYPES).collect(),
        }),
        _ => panic!("{path} has no case here: say what its longest lists are"),
    }
}

async fn connect(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
    endpoint.unwrap().connect().await.unwrap()
}

/// Returns the longest time that a client waited for a list of machines while `call` was made.
async fn waited(others: &Channel, call: impl Future<Output = ()> + Send + 'static) -> Duration {
    let mut machines = MachinesClient::new(others.clone());
    let calling = tokio::spawn(call);
    let mut longest = Duration::ZERO;
    loop {
        let is_last = calling.is_finished();
        let asked = Instant::now();
        let list = machines.list_machines(ListMachinesRequest::default());
        let list = list.await.unwrap().into_inner();
        assert_eq!(list.machines[0].name, ENDED);
        longest = longest.max(asked.elapsed());
        if is_last {
            calling.await.unwrap();
            return longest;
        }
    }
}

// On one thread: any long computation on it keeps the other client waiting.
#[tokio::test]
async fn no_call_with_the_longest_lists_keeps_another_client_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut server = Server::new().with_limits(Limits {
        // The machine that ended last is kept in any case.
        ended_bytes: usize::MAX,
        ..Limits::of_host()
    });
    let probes = (0..PROBES).map(probe).collect();
    add_ended_with(&server.fleet, ENDED, "", b"", probes);
    let _sink = server.publish(SYNTHETIC);
    let listener = Listener::bind(&socket).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(listener, async {
        let _asked_or_dropped = stopped.await;
    }));
    let (channel, others) = (connect(&socket).await, connect(&socket).await);
    let mut slow = Vec::new();
    for method in Messages::new(FILE_DESCRIPTOR_SET, 0).methods() {
        for (ids, which) in lists().iter().zip(["equal", "unknown", "all"]) {
            let messages = longest(&method.path, ids);
            let call = Call::with(&method, messages);
            let (path, channel) = (method.path.clone(), channel.clone());
            let made = async move {
                let answered = tokio::time::timeout(PATIENCE, call.make(channel)).await;
                let answered = answered.expect("an answer").expect("it is not left");
                if let Err(status) = answered {
                    assert!(
                        status.code() != tonic::Code::OutOfRange,
                        "{path}: {status:?}"
                    );
                }
            };
            let longest = waited(&others, made).await;
            eprintln!("{} of {which} ids: {longest:?}", method.path);
            if longest > ANSWERED {
                slow.push((method.path.clone(), which, longest));
            }
        }
    }
    assert!(slow.is_empty(), "{slow:#?}");
    drop((stop, channel, others));
    serving.await.unwrap().unwrap();
}
