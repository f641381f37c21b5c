//! The house: which way arrows run, between crates and between files.
//!
//! Rules, each named by what fails:
//! - a crate depends only on those that [`crates::ARROWS`] allows it;
//! - a client links no KVM: neither the messages and the connection, nor the answers from a kernel's files, nor the
//!   program without its default features;
//! - no file of a crate needs, through others, a file that needs it;
//! - no folder of a crate does either, so that a crate can be read from one end to the other;
//! - tasks of the server are begun with `panics::spawn`, so that the stream of a task that panics does not end
//!   as if it were complete;
//! - the journeys in `docs/architecture.md` name files that exist, in the crates they are said to be in.
//!
//! A file needs another if it names something that is defined there. Doors (`mod.rs`, `lib.rs`), which only
//! hand names on, are followed to the file that defines the name. Tests do not count: they may name everything.

mod circles;
mod crates;
mod files;
mod journeys;
mod names;
mod spawns;

use std::path::PathBuf;

/// The repository's root.
fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Folders of the crates whose files are checked. Crates that only test are not.
const ROOMS: [&str; 13] = [
    "arch",
    "introspect/spec",
    "introspect/vmlinux",
    "introspect/linux",
    "introspect/hit",
    "introspect/engine",
    "introspect/sources",
    "vmm/devices",
    "vmm/vm",
    "vmm/machine",
    "vmm/server",
    "proto",
    "cli",
];

#[test]
fn crates_depend_on_those_below_them_only() {
    let wrong = crates::wrong_arrows();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn clients_do_without_kvm() {
    let wrong = crates::clients_with_kvm();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_files_need_one_another_in_a_circle() {
    let mut wrong = Vec::new();
    for room in ROOMS {
        let needs = files::needs(&root().join(room).join("src"));
        wrong.extend(circles::report(room, &needs));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_folders_of_a_crate_need_one_another_in_a_circle() {
    let mut wrong = Vec::new();
    for room in ROOMS {
        let needs = files::needs(&root().join(room).join("src"));
        wrong.extend(circles::report(room, &circles::of_folders(&needs)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn journeys_name_files_where_they_are() {
    let wrong = journeys::wrong_steps();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn tasks_of_the_server_are_begun_where_their_panics_are_reported() {
    let wrong = spawns::wrong();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
