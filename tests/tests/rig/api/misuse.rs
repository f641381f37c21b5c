//! Tests malicious clients of a machine whose guest runs: the guest must continue as if they had made no call. Also
//! tests clients that abandon long calls: such a call is either done or not done, and leaves nothing behind.

use std::env;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

use hvprobe_fixtures::calls::{AnswerCounts, Call};
use hvprobe_fixtures::messages::Messages;
use hvprobe_fixtures::panics::count_panics;
use hvprobe_proto::FILE_DESCRIPTOR_SET;
use hvprobe_proto::v1::host_client::HostClient;
use hvprobe_proto::v1::{
    ConsoleWriteRequest, DeleteMachineRequest, EndReason, GetMachineRequest, ListProbesRequest,
    ListSymbolsRequest, ReadKernelRequest, ReportRequest, ResumeRequest, StopRequest, Symbol,
    UnregisterRequest, WaitRequest,
};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::rig::{rig, rounds};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::client::{Client, OBEDIENT, Running, request};
use super::sessions::LONG;
use super::used::Used;

/// Number of calls.
const CALLS: u64 = 500;
/// Maximum number of concurrent calls.
const AT_ONCE: usize = 8;
/// Methods that are not called, because they would end the guest, wait for its end, or concern another machine.
/// Another test calls most of them, and abandons the calls.
const LEFT_OUT: [&str; 6] = [
    "/hvprobe.v1.Host/Report",
    "/hvprobe.v1.Machines/Boot",
    "/hvprobe.v1.Machines/ConsoleWrite",
    "/hvprobe.v1.Machines/InjectNmi",
    "/hvprobe.v1.Machines/Stop",
    "/hvprobe.v1.Machines/Wait",
];
/// Number of boots that are abandoned.
const BOOTS: u64 = 10;
/// Number of boots before the used resources are measured for reference.
const FIRST: u64 = 2;
/// Maximum time in milliseconds until a boot is abandoned.
const BOOT_LEFT_AFTER: u64 = 2000;
/// Maximum time in milliseconds until other calls are abandoned.
const LEFT_AFTER: u64 = 20;
/// Pattern of functions that the guest does not call, so that no action is ever taken at a hit.
const FUNCTIONS: &str = "__x64_sys_getp[gp]id";
const DEFINITIONS: [&str; 9] = [
    "p __x64_sys_getpgid",
    "r:b __x64_sys_getppid",
    "p:b __x64_sys_getpgid+4",
    "p __x64_sys_getpgid+1",
    "r18446744073709551615 __x64_sys_getpgid",
    "p __x64_sys_getp[gp]id",
    "p __x64_sys_getpgid a=+0(+0($arg1)):ustring b=regs->di if a ~ \"*\"",
    "p __x64_sys_getpgid a=$comm b=@0xffffffffffffffff:b64@63/64",
    "p nowhere",
];

/// Returns the functions that match [`FUNCTIONS`], with their text in the guest's memory.
async fn text(client: &mut Client, machine: &str) -> Vec<(Symbol, Vec<u8>)> {
    let request = ListSymbolsRequest {
        machine: machine.to_owned(),
        pattern: FUNCTIONS.to_owned(),
        ..Default::default()
    };
    let pieces = client.symbols.list_symbols(request).await;
    let mut pieces = pieces.unwrap().into_inner();
    let mut text = Vec::new();
    while let Some(piece) = pieces.message().await.unwrap() {
        for symbol in piece.symbols {
            let request = ReadKernelRequest {
                machine: machine.to_owned(),
                address: symbol.address,
                length: symbol.size.try_into().unwrap(),
            };
            let read = client.machines.read_kernel(request).await.unwrap();
            text.push((symbol, read.into_inner().data));
        }
    }
    text
}

fn seed() -> u64 {
    let seed = env::var("HVPROBE_FUZZ_SEED").ok();
    let seed = seed.and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| RandomState::new().hash_one("a seed") >> 32);
    eprintln!("again with: HVPROBE_FUZZ_SEED={seed}");
    seed
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_about_a_machine_leaves_its_guest_as_it_was() {
    if rig("api: misuse").is_none() {
        return;
    }
    let seed = seed();
    let panics = count_panics();
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(OBEDIENT, &[]).await.name;
    client.wait_printed(&machine, "ready").await;
    let before = text(&mut client, &machine).await;
    assert_eq!(before.len(), 2, "{before:?}");

    let mut messages = Messages::new(FILE_DESCRIPTOR_SET, seed);
    messages.prefer("machine", &[&machine]);
    messages.prefer("definition", &DEFINITIONS);
    messages.prefer("pattern", &[FUNCTIONS, "*sys_ge*"]);
    messages.prefer("names", &["vfs_read", "struct file", "nowhere"]);
    let mut methods = messages.methods();
    methods.retain(|method| !LEFT_OUT.contains(&method.path.as_str()));
    let mut answers = AnswerCounts::default();
    let mut open = JoinSet::new();
    for _ in 0..CALLS {
        let method = &methods[messages.index(methods.len())];
        let call = Call::of(method, &mut messages);
        let channel = client.channel.clone();
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
    assert_eq!(panics(), 0, "panics, which are printed above");
    let unclear = answers.unclear();
    assert!(unclear.is_empty(), "{unclear:#?}");
    for code in [Code::Ok, Code::NotFound, Code::InvalidArgument] {
        assert!(answers.with(code) > CALLS / 100, "{answers:#?}");
    }

    let resume = ResumeRequest {
        machine: machine.clone(),
    };
    client.machines.resume(resume).await.unwrap();
    loop {
        let request = ListProbesRequest {
            machine: machine.clone(),
            ..Default::default()
        };
        let page = client.probes.list_probes(request).await.unwrap();
        let probes = page.into_inner().probes;
        if probes.is_empty() {
            break;
        }
        let request = UnregisterRequest {
            machine: machine.clone(),
            ids: probes.iter().map(|probe| probe.id).collect(),
        };
        client.probes.unregister(request).await.unwrap();
    }
    assert_eq!(text(&mut client, &machine).await, before);
    let request = ConsoleWriteRequest {
        machine: machine.clone(),
        data: b"7\n".to_vec(),
    };
    client.machines.console_write(request).await.unwrap();
    let request = WaitRequest {
        machine: machine.clone(),
    };
    let ended = client.machines.wait(request).await.unwrap().into_inner();
    assert_eq!(ended.ending.unwrap().guest_status, Some(7));
    server.stop().await;
}

/// Boots a machine called `name`, unless the abandoned boot has taken the name. Waits until a machine of that name
/// is listed.
async fn listed(client: &mut Client, name: &str) {
    let mut again = request(OBEDIENT, &[]);
    again.name = name.to_owned();
    let booted = timeout(LONG, client.machines.boot(again)).await;
    if let Err(error) = booted.expect("an answer") {
        assert_eq!(error.code(), Code::AlreadyExists, "{error:?}");
    }
    let since = Instant::now();
    loop {
        let request = GetMachineRequest {
            machine: name.to_owned(),
        };
        match client.machines.get_machine(request).await {
            Ok(_) => return,
            // The machine is still booting.
            Err(error) => assert_eq!(error.code(), Code::Unavailable, "{error:?}"),
        }
        assert!(since.elapsed() < LONG, "neither free nor listed: {name}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Makes calls that take long or change something, and abandons them. No NMI is among them, because a kernel that
/// has no handlers yet dies of an NMI, as on any machine.
async fn leave_off(client: &mut Client, machine: &str, random: &mut Random) {
    let mut host = HostClient::new(client.channel.clone());
    let machine = || machine.to_owned();
    let wait = WaitRequest { machine: machine() };
    let write = ConsoleWriteRequest {
        machine: machine(),
        data: b"nobody reads this".to_vec(),
    };
    let mut soon = || Duration::from_millis(random.below(LEFT_AFTER));
    let _left = timeout(soon(), client.machines.wait(wait)).await;
    let _left = timeout(soon(), client.machines.console_write(write)).await;
    let _left = timeout(soon(), host.report(ReportRequest {})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_is_left_off_has_made_a_machine_or_left_its_name() {
    if rig("api: boots that are left off").is_none() {
        return;
    }
    let mut random = Random::new(&[seed()]);
    let panics = count_panics();
    let server = Running::start();
    let mut client = server.client().await;
    let mut used = Used::now();
    for number in 0..rounds(BOOTS) {
        if number == FIRST {
            used = Used::now();
        }
        let name = format!("left-{number}");
        let mut boot = request(OBEDIENT, &[]);
        boot.name.clone_from(&name);
        let life = Duration::from_millis(random.below(BOOT_LEFT_AFTER));
        let _left = timeout(life, client.machines.boot(boot)).await;
        listed(&mut client, &name).await;
        leave_off(&mut client, &name, &mut random).await;
        let machine = StopRequest {
            machine: name.clone(),
        };
        let stopped = timeout(LONG, client.machines.stop(machine)).await;
        let ending = stopped.expect("an end").unwrap().into_inner().ending;
        assert_eq!(ending.unwrap().reason(), EndReason::Stopped);
        let machine = DeleteMachineRequest { machine: name };
        client.machines.delete_machine(machine).await.unwrap();
    }
    assert_eq!(panics(), 0, "panics, which are printed above");
    used.come_back().await;
    server.stop().await;
}
