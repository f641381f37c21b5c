//! What becomes of a name. Needs no KVM: no machine is booted.

use std::path::Path;
use std::time::Duration;

use hvprobe_engine::Refusals;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

const NAME: &str = "web";

/// What a request of this id asks for.
fn made_by(request_id: &str) -> Asked {
    Asked {
        request_id: request_id.to_owned(),
        ..Asked::default()
    }
}

/// A fleet in which a machine has ended.
fn fleet() -> Fleet {
    let fleet = Fleet::default();
    let remains = Remains {
        machine: v1::Machine {
            name: NAME.into(),
            ..Default::default()
        },
        probes: Vec::new(),
        console: b"Kernel panic".to_vec(),
    };
    let handle = Handle {
        name: NAME.into(),
        number: 1,
        identity: Arc::new(Identity::new(made_by("first")).unwrap()),
        requests: Arc::default(),
        life: Arc::new(watch::Sender::new(Life::Ended(Arc::new(remains)))),
        owners: Owners::default(),
        events: Broadcast::default(),
        stopping: Arc::default(),
    };
    let slot = Slot::Taken(handle);
    fleet.slots().named.insert(NAME.into(), slot);
    fleet
}

fn config(kernel: &Path) -> MachineConfig {
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
    }
}

fn console(fleet: &Fleet) -> Vec<u8> {
    let remains = fleet.get(NAME).unwrap().remains().unwrap();
    remains.console.clone()
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
        // As long as it takes to open a file, and to run the checks of the host beside that.
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
    fleet.reserve(&mut NAME.into(), "second").unwrap();
    assert_eq!(fleet.get(NAME).unwrap_err().code(), Code::Unavailable);
    let error = fleet.reserve(&mut NAME.into(), "").unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    // What had ended is there for whoever lists all.
    assert_eq!(fleet.all().len(), 1);
    assert!(fleet.live().is_empty());
    fleet.settle(NAME, None);
    assert_eq!(console(&fleet), b"Kernel panic");

    let mut other = "db".to_owned();
    fleet.reserve(&mut other, "").unwrap();
    fleet.settle(&other, None);
    assert_eq!(fleet.get(&other).unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_request_that_is_repeated_makes_no_other_machine() {
    let fleet = fleet();
    let kernel = Path::new("/nowhere");
    let made = fleet.boot(config(kernel), made_by("first")).await.unwrap();
    assert_eq!(made.name(), NAME);
    fleet.reserve(&mut "db".to_owned(), "second").unwrap();
    let error = fleet.boot(config(kernel), made_by("second")).await;
    assert_eq!(error.unwrap_err().code(), Code::Unavailable);
    // Requests without a number are all their own.
    let error = fleet.boot(config(kernel), made_by("")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[test]
fn only_what_has_ended_is_forgotten() {
    let fleet = fleet();
    fleet.reserve(&mut "db".to_owned(), "").unwrap();
    for (name, code) in [("db", Code::FailedPrecondition), ("nobody", Code::NotFound)] {
        assert_eq!(fleet.forget(name).unwrap_err().code(), code, "{name}");
    }
    fleet.forget(NAME).unwrap();
    assert!(fleet.all().is_empty());
}
