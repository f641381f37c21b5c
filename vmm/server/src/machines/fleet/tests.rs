//! Reservations of names. Needs no KVM: no machine is booted.

use std::path::Path;
use std::time::Duration;

use hvprobe_arch::Regs;
use hvprobe_engine::Refusals;
use hvprobe_hit::event::{Captured, Event, EventKind};
use hvprobe_machine::{Bounds, Listen as _};
use hvprobe_proto::v1::{self, RegisterResponse};
use hvprobe_spec::{ProbeId, RegisterSet};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::events::wanted::Wanted;
use crate::machines::handle::Remains;
use crate::status::tests::{detail, info};

const NAME: &str = "web";

/// Returns a request with this id.
fn made_by(request_id: &str) -> Asked {
    Asked {
        request_id: request_id.to_owned(),
        ..Asked::default()
    }
}

/// Adds an ended machine with this console output.
pub(crate) fn add_ended(fleet: &Fleet, name: &str, request_id: &str, console: &[u8]) -> Handle {
    add_ended_with(fleet, name, request_id, console, Vec::new())
}

/// Like [`add_ended`], with these probes.
pub(crate) fn add_ended_with(
    fleet: &Fleet,
    name: &str,
    request_id: &str,
    console: &[u8],
    probes: Vec<v1::Probe>,
) -> Handle {
    let machine = v1::Machine {
        name: name.into(),
        state: v1::MachineState::Stopped.into(),
        ..Default::default()
    };
    // The first entry of the request was refused.
    let registered = RegisterResponse {
        ids: probes.iter().map(|probe| probe.id).collect(),
        entries: (1..).take(probes.len()).collect(),
        ..Default::default()
    };
    let remains = Remains::new(machine, probes, registered, console.to_vec());
    let shared = &fleet.shared;
    let number = fleet.slots().reserve(name, &Asked::default());
    let place = Place {
        name: name.into(),
        number,
        identity: Identity::new(made_by(request_id)).unwrap(),
        changes: shared.changes.clone(),
        owners: shared.owners.clone(),
        events: Broadcast::default(),
    };
    let handle = Handle::of_ended(place, remains);
    fleet.slots().settle(name, Some(&handle));
    handle.touch();
    fleet.forget_oldest();
    handle
}

/// Returns a fleet with one ended machine.
fn fleet() -> Fleet {
    fleet_with(Limits::default())
}

fn fleet_with(limits: Limits) -> Fleet {
    let fleet = Fleet::new(limits);
    add_ended(&fleet, NAME, "first", b"Kernel panic");
    fleet
}

/// Reserves `name` for a boot.
fn reserve(fleet: &Fleet, name: &str, request_id: &str) -> Result<Reservation, Status> {
    let mut config = config(Path::new("/nowhere"));
    name.clone_into(&mut config.name);
    fleet.reserve(&mut config, &made_by(request_id))
}

pub(crate) fn config(kernel: &Path) -> MachineConfig {
    MachineConfig {
        name: NAME.into(),
        kernel: kernel.into(),
        initrd: None,
        cmdline: String::new(),
        cpus: 1,
        memory: 64 << 20,
        command: Vec::new(),
        probes: Vec::new(),
        refusals: Refusals::default(),
        paused: false,
        optimize: true,
        bounds: Bounds::default(),
    }
}

fn console(fleet: &Fleet) -> Vec<u8> {
    let remains = fleet.get(NAME).unwrap().remains().unwrap();
    remains.console.clone()
}

#[test]
fn each_machine_may_have_what_the_server_says() {
    let each = Bounds {
        probes: 3,
        console: 5 << 10,
    };
    let fleet = Fleet::new(Limits {
        each,
        ..Limits::default()
    });
    let mut config = config(Path::new("/nowhere"));
    let _reserved = fleet.reserve(&mut config, &Asked::default()).unwrap();
    assert_eq!(config.bounds, each);
}

#[tokio::test]
async fn a_boot_that_fails_leaves_what_had_ended_under_its_name() {
    let fleet = fleet();
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    for (kernel, why) in [
        (folder.path().join("vmlinux"), "No such file"),
        (fifo, "not a regular file"),
    ] {
        // Long enough for the check of the host, which runs while the files are read.
        let booting = tokio::time::timeout(
            Duration::from_mins(1),
            fleet.boot(config(&kernel), Asked::default()),
        );
        let error = booting.await.expect("it waits").unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(why), "{error:?}");
        assert_eq!(console(&fleet), b"Kernel panic");
    }
}

#[tokio::test]
async fn a_name_whose_machine_boots_is_taken_but_not_there_yet() {
    let fleet = fleet();
    let reserved = reserve(&fleet, NAME, "second").unwrap();
    assert_eq!(fleet.get(NAME).unwrap_err().code(), Code::Unavailable);
    let error = reserve(&fleet, NAME, "").unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    // The ended machine is still in the list.
    assert_eq!(fleet.all().len(), 1);
    assert!(fleet.live().is_empty());
    drop(reserved);
    assert_eq!(console(&fleet), b"Kernel panic");

    drop(reserve(&fleet, "db", "").unwrap());
    assert_eq!(fleet.get("db").unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_request_that_is_repeated_makes_no_other_machine() {
    let fleet = fleet();
    let kernel = Path::new("/nowhere");
    let made = fleet.boot(config(kernel), made_by("first")).await.unwrap();
    assert_eq!(made.name(), NAME);
    let booting = reserve(&fleet, "db", "second").unwrap();
    let mut again = std::pin::pin!(fleet.boot(config(kernel), made_by("second")));
    let soon = Duration::from_millis(20);
    tokio::time::timeout(soon, &mut again).await.unwrap_err();
    // A request that differs in anything is another request, whether the first one has created its machine or
    // is still under way.
    for request_id in ["first", "second"] {
        let relabelled = Asked {
            labels: [("a".to_owned(), "b".to_owned())].into(),
            ..made_by(request_id)
        };
        let reworded = Asked {
            hash: 1,
            ..made_by(request_id)
        };
        for other in [relabelled, reworded] {
            let error = fleet.boot(config(kernel), other).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{request_id}");
            assert_eq!(detail(&error).kind(), ErrorKind::RequestIdReused);
        }
    }
    // If the request under way fails, the repeated request takes its place.
    drop(booting);
    assert_eq!(again.await.unwrap_err().code(), Code::InvalidArgument);
    // Requests without an id are never the same.
    let error = fleet.boot(config(kernel), made_by("")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn the_probes_of_a_boot_are_known_after_the_machine_has_ended() {
    let fleet = fleet();
    let probes = [7, 9].map(|id| v1::Probe {
        id,
        ..Default::default()
    });
    add_ended_with(&fleet, "db", "second", b"", probes.into());
    let kernel = Path::new("/nowhere");
    let made = fleet.boot(config(kernel), made_by("second")).await.unwrap();
    let registered = made.registered();
    assert_eq!(
        (registered.ids, registered.entries),
        (vec![7, 9], vec![1, 2])
    );
}

#[tokio::test]
async fn a_boot_that_stands_in_the_host_keeps_nobody_from_anything_else() {
    /// Time limit for each call, on a busy machine.
    const SOON: Duration = Duration::from_secs(30);
    let fleet = fleet();
    let (began, has_begun) = tokio::sync::oneshot::channel();
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let mut slow = config(Path::new("/nowhere"));
    slow.name = "slow".to_owned();
    let booting = tokio::spawn({
        let fleet = fleet.clone();
        async move {
            let boot = move |config| {
                began.send(()).unwrap();
                // Blocks like a disk that does not answer, until the test ends.
                let _gone = may_go.recv();
                Machine::boot(config)
            };
            fleet.boot_by(slow, Asked::default(), boot).await
        }
    });
    let begun = tokio::time::timeout(SOON, has_begun).await;
    begun.expect("it begins").unwrap();

    assert_eq!(fleet.get("slow").unwrap_err().code(), Code::Unavailable);
    assert_eq!(fleet.all().len(), 1);
    assert_eq!(console(&fleet), b"Kernel panic");
    let mut other = config(Path::new("/nowhere"));
    other.name = "other".to_owned();
    let other = tokio::time::timeout(SOON, fleet.boot(other, Asked::default())).await;
    let error = other.expect("another boot waits").unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    tokio::time::pause();
    let since = Instant::now();
    fleet.close().await;
    assert!(since.elapsed() < 2 * ENDS);
    tokio::time::resume();
    assert!(!booting.is_finished());
    drop(go);
    let booted = tokio::time::timeout(SOON, booting).await;
    let error = booted.expect("it ends").unwrap().unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
}

#[test]
fn only_what_has_ended_is_forgotten() {
    let fleet = fleet();
    let _booting = reserve(&fleet, "db", "").unwrap();
    for (name, code) in [("db", Code::FailedPrecondition), ("nobody", Code::NotFound)] {
        assert_eq!(fleet.forget(name).unwrap_err().code(), code, "{name}");
    }
    fleet.forget(NAME).unwrap();
    assert!(fleet.all().is_empty());
}

#[tokio::test]
async fn what_all_guests_may_have_is_taken_before_a_boot_and_given_back_if_it_fails() {
    let memory = 64 << 20;
    let fleet = fleet_with(Limits {
        memory: 2 * memory,
        cpus: 2,
        machines: 3,
        ..Limits::default()
    });
    let refused = |kind: ErrorKind| {
        let error = reserve(&fleet, "c", "").unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert_eq!(detail(&error).kind(), kind);
    };
    // A boot that fails releases its resources: the next one finds the same resources.
    for _ in 0..5 {
        let error = fleet.boot(config(Path::new("/nowhere")), Asked::default());
        assert_eq!(error.await.unwrap_err().code(), Code::InvalidArgument);
    }
    let first = reserve(&fleet, "a", "").unwrap();
    let second = reserve(&fleet, "b", "").unwrap();
    refused(ErrorKind::TooMuchMemory);
    drop(first);
    let first = reserve(&fleet, "a", "").unwrap();
    drop((first, second));

    let fleet = fleet_with(Limits {
        machines: 1,
        ..Limits::default()
    });
    let _only = reserve(&fleet, "a", "").unwrap();
    let error = reserve(&fleet, "c", "").unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::TooManyMachines);
    assert_eq!(info(&error).metadata["limit"], "machines");
}

#[test]
fn ended_machines_are_forgotten_the_oldest_first_and_never_the_last() {
    let fleet = Fleet::new(Limits {
        ended_machines: 3,
        ended_bytes: 1000,
        ..Limits::default()
    });
    let names = || {
        let all = fleet.all();
        let names = all.iter().map(|handle| handle.name().to_owned());
        names.collect::<Vec<_>>()
    };
    for name in ["d", "c", "b", "a"] {
        add_ended(&fleet, name, "", b"");
    }
    assert_eq!(names(), ["a", "b", "c"]);
    add_ended(&fleet, "e", "", &[0; 990]);
    assert_eq!(names(), ["a", "e"]);
    add_ended(&fleet, "f", "", &[0; 5000]);
    assert_eq!(names(), ["f"]);
    add_ended(&fleet, "g", "", b"");
    assert_eq!(names(), ["g"]);
}

#[test]
fn what_ended_machines_keep_is_the_events_they_hold_too() {
    let names_after = |add: fn(&Fleet) -> Handle| {
        let fleet = Fleet::new(Limits {
            ended_bytes: 1000,
            ..Limits::default()
        });
        let first = add(&fleet);
        add_ended(&fleet, "last", "", b"");
        let bytes = first.kept_bytes().unwrap();
        let all = fleet.all();
        let names: Vec<_> = all.iter().map(|handle| handle.name().to_owned()).collect();
        (names, bytes)
    };
    let (names, bytes) = names_after(|fleet| add_ended(fleet, NAME, "", b""));
    assert!(bytes < 100, "{bytes}");
    assert_eq!(names, ["last", NAME]);

    let (names, bytes) = names_after(|fleet| {
        let handle = add_ended(fleet, NAME, "", b"");
        let _client = handle.events().subscribe(Wanted::default(), None);
        let mut listener = handle.events().listener();
        listener.hear(&[event()], 0);
        let after_one = handle.kept_bytes().unwrap();
        let many: Vec<_> = (1..100).map(|seq| Event { seq, ..event() }).collect();
        listener.hear(&many, 0);
        assert!(handle.kept_bytes().unwrap() > after_one);
        handle
    });
    assert!(bytes > 1000, "{bytes}");
    assert_eq!(names, ["last"]);
}

fn event() -> Event {
    Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(0),
        vcpu: 0,
        host_ns: 1,
        guest_tsc: 1,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 0,
    }
}

#[tokio::test]
async fn machines_are_stopped_all_at_once() {
    const MACHINES: usize = 64;
    // No call ends before all have begun: one after another they would never end.
    let together = Arc::new(tokio::sync::Barrier::new(MACHINES));
    let stopping = at_once(0..MACHINES, |_| {
        let together = Arc::clone(&together);
        async move {
            together.wait().await;
        }
    });
    let stopped = tokio::time::timeout(Duration::from_mins(1), stopping).await;
    stopped.expect("they wait for each other");
}

#[tokio::test]
async fn one_that_cannot_be_stopped_does_not_keep_the_others() {
    let stopped = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    at_once(0..3, |number| {
        let stopped = Arc::clone(&stopped);
        async move {
            assert_ne!(number, 1, "as the test wants");
            stopped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    })
    .await;
    assert_eq!(stopped.load(std::sync::atomic::Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stops_boots_nothing_and_waits_for_a_boot_no_longer_than_it_says() {
    let fleet = fleet();
    let hangs = reserve(&fleet, "db", "").unwrap();
    let began = Instant::now();
    fleet.close().await;
    assert!(began.elapsed() >= ENDS && began.elapsed() < 2 * ENDS);
    let error = reserve(&fleet, "new", "").unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert_eq!(detail(&error).kind(), ErrorKind::ServerStopping);
    // The hanging boot is not waited for again.
    let began = Instant::now();
    fleet.close().await;
    assert!(began.elapsed() < ENDS);
    drop(hangs);
}
