//! Tests the gRPC interface with a generated client over a real socket.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod client;
mod clock_steps;
mod histograms;
mod killed;
mod misuse;
mod sessions;
mod unread;
mod used;

use hvprobe_proto::v1::{
    ConsoleWriteRequest, DeleteMachineRequest, DescribeTypesRequest, DisableRequest, EnableRequest,
    EndReason, ErrorKind, Event, GetMachineRequest, InjectNmiRequest, ListLinesRequest,
    ListMachinesRequest, ListSymbolsRequest, MachineState, PauseRequest, ProbeState,
    RegisterRequest, Remedy, ResumeRequest, StopRequest, SubscribeRequest, UnregisterRequest,
    WaitRequest,
};
use hvprobe_tests::rig::rig;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use client::{OBEDIENT, Running, detail, request, specs};

#[tokio::test(flavor = "multi_thread")]
async fn pending_probe_counts_a_workload_and_the_stream_ends_with_the_machine() {
    const CALLS: usize = 1000;
    if rig("api: a workload").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let command = &["workload", "calls", "getpgid", "1000"];
    let machine = client.boot(command, &["p:entry __x64_sys_getpgid"]).await;
    assert_eq!(machine.state(), MachineState::Booting);

    let subscription = SubscribeRequest {
        machine: machine.name.clone(),
        ..Default::default()
    };
    let mut stream = client
        .events
        .subscribe(subscription)
        .await
        .unwrap()
        .into_inner();
    let seen = client.wait_running(&machine.name).await;
    assert_eq!(seen.first(), Some(&MachineState::Booting));

    let (mut probes, mut events, mut ending) = (Vec::new(), Vec::<Event>::new(), None);
    while let Some(batch) = stream.message().await.unwrap() {
        assert_eq!((batch.machine, batch.dropped), (machine.name.clone(), 0));
        assert!(ending.is_none(), "something came after the end");
        probes.extend(batch.probes);
        events.extend(batch.events);
        ending = batch.ended;
    }
    let ending = ending.unwrap();
    assert_eq!(ending.reason(), EndReason::Shutdown);
    assert_eq!(ending.guest_status, Some(0));
    assert_eq!(events.len(), CALLS);
    assert_eq!(probes.len(), 1, "described once");
    assert_eq!(probes[0].name, "entry");
    for event in &events {
        assert_eq!(event.probe, probes[0].id);
        assert_eq!(Some(event.registers.unwrap().rip), probes[0].address);
        assert_eq!(event.task.as_ref().unwrap().comm, b"workload"[..]);
    }

    let list = client.list(&machine.name).await;
    assert_eq!(list[0].hits, CALLS as u64);
    let request = WaitRequest {
        machine: machine.name.clone(),
    };
    let waited = client.machines.wait(request).await.unwrap().into_inner();
    assert_eq!(waited.ending, Some(ending));
    let error = client
        .register(&machine.name, &["p vfs_read"])
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(detail(&error).kind(), ErrorKind::MachineEnded);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_change_nothing_and_say_what_was_wrong() {
    if rig("api: mistakes").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;

    let mut absurd = request(OBEDIENT, &[]);
    absurd.cpus = 100_000;
    let error = client.machines.boot(absurd).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_eq!(detail(&error).kind(), ErrorKind::TooManyCpus);
    let unknown = request(OBEDIENT, &["p vfs_read", "p vfs_raed"]);
    let error = client.machines.boot(unknown).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(detail(&error).index, Some(1));
    let list = client
        .machines
        .list_machines(ListMachinesRequest::default())
        .await;
    assert_eq!(list.unwrap().into_inner().machines, []);

    let machine = client.boot(OBEDIENT, &[]).await.name;
    let mut taken = request(OBEDIENT, &[]);
    taken.name.clone_from(&machine);
    let error = client.machines.boot(taken).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    client.wait_printed(&machine, "ready").await;

    let batch = ["p vfs_write", "p vfs_raed"];
    let error = client.register(&machine, &batch).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    let details = detail(&error);
    assert_eq!(details.kind(), ErrorKind::UnknownSymbol);
    assert_eq!(details.index, Some(1));
    assert!(
        details.candidates.contains(&"vfs_read".into()),
        "{details:?}"
    );

    let error = client
        .register(&machine, &["p vfs_read", "p vfs_read+"])
        .await
        .unwrap_err();
    let details = detail(&error);
    assert_eq!(details.kind(), ErrorKind::Definition);
    assert_eq!((details.index, details.column), (Some(1), Some(11)));

    for (definition, remedy) in [
        ("p jiffies_64", Remedy::WrongRequest),
        ("p vfs_read+1", Remedy::WrongRequest),
        ("p asm_exc_int3", Remedy::Never),
    ] {
        let error = client.register(&machine, &[definition]).await.unwrap_err();
        let details = detail(&error);
        assert_eq!(
            details.kind(),
            ErrorKind::Refused,
            "{definition}: {error:?}"
        );
        assert_eq!(details.index, Some(0), "{definition}");
        assert_eq!(details.remedy(), remedy, "{definition}: {error:?}");
    }
    let request = UnregisterRequest {
        machine: machine.clone(),
        ids: vec![4711],
    };
    let error = client.probes.unregister(request).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(detail(&error).kind(), ErrorKind::NoSuchProbe);
    assert_eq!(client.list(&machine).await, []);

    let request = InjectNmiRequest {
        machine: machine.clone(),
        cpu: Some(1),
    };
    let error = client.machines.inject_nmi(request).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(detail(&error).kind(), ErrorKind::NoSuchCpu);

    let request = ListSymbolsRequest {
        machine: machine.clone(),
        pattern: "vfs_[".into(),
        ..Default::default()
    };
    let mut symbols = client
        .symbols
        .list_symbols(request)
        .await
        .unwrap()
        .into_inner();
    let error = symbols.message().await.unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::BadPattern);

    let describe = |names: &[&str]| DescribeTypesRequest {
        machine: machine.clone(),
        names: names.iter().map(|&name| name.to_owned()).collect(),
    };
    let error = client.symbols.describe_types(describe(&["open_how"]));
    let error = error.await.unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::UnknownType);
    assert!(
        detail(&error)
            .candidates
            .contains(&"struct open_how".to_owned())
    );
    let error = client.symbols.describe_types(describe(&["int"; 17]));
    let error = error.await.unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::TooLarge);
    let of_module = describe(&["int", "no_such_module:int"]);
    let error = client.symbols.describe_types(of_module).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let details = detail(&error);
    assert_eq!(
        (details.kind(), details.index),
        (ErrorKind::Refused, Some(1))
    );
    assert_eq!(details.remedy(), Remedy::NotNow);
    // This server was not given debug information of that kernel.
    let lines = ListLinesRequest {
        machine: machine.clone(),
        function: "vfs_read".to_owned(),
    };
    let error = client.sources.list_lines(lines).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(detail(&error).kind(), ErrorKind::NoDebugInfo);
    assert!(error.message().contains("/.build-id/"), "{error}");
    let described = client.symbols.describe_types(describe(&["vfs_read"]));
    let described = described.await.unwrap().into_inner().types;
    let names: Vec<_> = described[0].parameters.iter().map(|it| &it.name).collect();
    assert_eq!(names, ["file", "buf", "count", "pos"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_and_probes_outlive_the_client_but_not_the_server() {
    if rig("api: clients that come and go").is_none() {
        return;
    }
    let server = Running::start();
    let machine = {
        let mut gone = server.client().await;
        let machine = gone.boot(OBEDIENT, &[]).await.name;
        gone.wait_printed(&machine, "ready").await;
        gone.register(&machine, &["p:r vfs_read"]).await.unwrap();
        let subscription = SubscribeRequest {
            machine: machine.clone(),
            ..Default::default()
        };
        let _unread = gone.events.subscribe(subscription).await.unwrap();
        machine
    };

    let mut client = server.client().await;
    let list = client.list(&machine).await;
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].state(), ProbeState::Placed);
    assert_eq!(list[0].symbol.as_ref().unwrap().name, "vfs_read");
    let ids = vec![list[0].id];
    let request = DisableRequest {
        machine: machine.clone(),
        ids: ids.clone(),
    };
    client.probes.disable(request).await.unwrap();
    assert!(client.list(&machine).await[0].disabled);
    let request = EnableRequest {
        machine: machine.clone(),
        ids: ids.clone(),
    };
    client.probes.enable(request).await.unwrap();
    assert!(!client.list(&machine).await[0].disabled);
    let request = UnregisterRequest {
        machine: machine.clone(),
        ids,
    };
    client.probes.unregister(request).await.unwrap();
    assert_eq!(client.list(&machine).await, []);

    let request = PauseRequest {
        machine: machine.clone(),
        ..Default::default()
    };
    let paused = client.machines.pause(request).await.unwrap().into_inner();
    assert_eq!(paused.state(), MachineState::Paused);
    let request = ResumeRequest {
        machine: machine.clone(),
    };
    let resumed = client.machines.resume(request).await.unwrap().into_inner();
    assert_eq!(resumed.state(), MachineState::Running);

    let request = ListSymbolsRequest {
        machine: machine.clone(),
        pattern: "vfs_rea?".into(),
        ..Default::default()
    };
    let mut pieces = client
        .symbols
        .list_symbols(request)
        .await
        .unwrap()
        .into_inner();
    let mut found = Vec::new();
    while let Some(piece) = pieces.message().await.unwrap() {
        found.extend(piece.symbols);
    }
    let names: Vec<_> = found.iter().map(|symbol| &symbol.name).collect();
    assert_eq!(names, ["vfs_read"]);
    for (address, expected) in [(found[0].address + 1, Some(&found[0])), (1, None)] {
        let request = ListSymbolsRequest {
            machine: machine.clone(),
            address: Some(address),
            ..Default::default()
        };
        let answer = client.symbols.list_symbols(request).await.unwrap();
        let piece = answer.into_inner().message().await.unwrap();
        let symbol = piece.as_ref().map(|piece| &piece.symbols[0]);
        assert_eq!(symbol, expected, "{address:#x}");
    }

    let health = HealthCheckRequest {
        service: "hvprobe.v1.Machines".into(),
    };
    let health = HealthClient::new(client.channel.clone())
        .check(health)
        .await;
    let health = health.unwrap().into_inner();
    assert_eq!(health.status(), ServingStatus::Serving);

    let request = ConsoleWriteRequest {
        machine: machine.clone(),
        data: b"7\n".to_vec(),
    };
    let written = client.machines.console_write(request).await.unwrap();
    assert_eq!(written.into_inner().accepted, 2);
    let request = WaitRequest {
        machine: machine.clone(),
    };
    let ended = client.machines.wait(request).await.unwrap().into_inner();
    assert_eq!(ended.ending.unwrap().guest_status, Some(7));

    let again = client.boot(OBEDIENT, &["p vfs_read"]).await.name;
    assert_ne!(again, machine, "an ended machine keeps its name");
    client.wait_running(&again).await;
    let mut waiting = client.machines.clone();
    let request = WaitRequest {
        machine: again.clone(),
    };
    let waiting = tokio::spawn(async move { waiting.wait(request).await });
    let request = GetMachineRequest { machine: again };
    client.machines.get_machine(request).await.unwrap();
    server.stop().await;
    let ended = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(ended.ending.unwrap().reason(), EndReason::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_machine_still_reports_what_its_probes_counted() {
    if rig("api: stop").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(OBEDIENT, &["p vfs_read"]).await.name;
    client.wait_printed(&machine, "ready").await;
    let request = StopRequest {
        machine: machine.clone(),
    };
    let stopped = client.machines.stop(request).await.unwrap().into_inner();
    assert_eq!(stopped.ending.unwrap().reason(), EndReason::Stopped);
    let list = client.list(&machine).await;
    assert!(list[0].hits > 0, "{list:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_repeated_are_done_once_and_machines_report_which_they_are() {
    if rig("api: repeated requests").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let mut boot = request(OBEDIENT, &[]);
    boot.request_id = "boot-1".into();
    boot.labels = [("team".to_owned(), "kernel".to_owned())].into();
    let made = client
        .machines
        .boot(boot.clone())
        .await
        .unwrap()
        .into_inner();
    let again = client.machines.boot(boot).await.unwrap().into_inner();
    assert_eq!((&again.name, &again.uid), (&made.name, &made.uid));
    assert!(made.create_ns > 0 && made.end_ns.is_none(), "{made:?}");
    let other = client.boot(OBEDIENT, &[]).await;
    assert_ne!(other.uid, made.uid);

    let machine = made.name.clone();
    let mut plant = RegisterRequest {
        machine: machine.clone(),
        probes: specs(&["p vfs_read"]),
        request_id: "plant-1".into(),
        ..Default::default()
    };
    let first = client
        .probes
        .register(plant.clone())
        .await
        .unwrap()
        .into_inner();
    let second = client
        .probes
        .register(plant.clone())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(first, second);
    assert_eq!(client.list(&machine).await.len(), 1);
    plant.skip_refused = true;
    let error = client.probes.register(plant).await.unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::RequestIdReused);

    let mut listed = async |labels: &[(&str, &str)]| {
        let labels = labels
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        let labels = labels.collect();
        let list = client.machines.list_machines(ListMachinesRequest {
            labels,
            ..Default::default()
        });
        let machines = list.await.unwrap().into_inner().machines;
        machines
            .into_iter()
            .map(|machine| machine.uid)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        listed(&[("team", "kernel")]).await,
        std::slice::from_ref(&made.uid)
    );
    assert!(listed(&[("team", "other")]).await.is_empty());
    assert_eq!(listed(&[]).await.len(), 2);

    let delete = DeleteMachineRequest {
        machine: machine.clone(),
    };
    let error = client
        .machines
        .delete_machine(delete.clone())
        .await
        .unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::MachineRunning);
    let stop = StopRequest {
        machine: machine.clone(),
    };
    let ended = client.machines.stop(stop).await.unwrap().into_inner();
    assert_eq!((&ended.uid, &ended.labels), (&made.uid, &made.labels));
    assert!(ended.end_ns > Some(made.create_ns), "{ended:?}");
    client.machines.delete_machine(delete).await.unwrap();
    let get = GetMachineRequest { machine };
    let error = client.machines.get_machine(get).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    server.stop().await;
}
