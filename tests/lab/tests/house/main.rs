//! The house rules: the directions in which crates and files may depend on one another, and a few further rules.
//!
//! Rules (the test of each names what breaks the rule):
//! - a crate depends only on those that [`crates::ARROWS`] allows it;
//! - a client links no code for KVM: neither the crate with the messages and the connection, nor that with the
//!   answers from a kernel's files, nor the program without its default features;
//! - the files of a crate have no cyclic dependencies;
//! - its folders have none either, at any depth, so that a crate can be read from one end to the other; and if the
//!   door of a folder (its own module file) needs files in the folder, these files do not need the door;
//! - a file takes a name from the file of its folder that defines it, not from the door of the folder, so that the
//!   imports show the order of the files;
//! - tasks of the server are started with `panics::spawn`, so that the stream of a task that panics does not look
//!   complete;
//! - the journeys in `docs/architecture.md` name files that exist in the named crates;
//! - the table in `docs/hosts.md` of what was verified where is as the lab writes it.
//!
//! A file needs another one if it names something that is defined there. If it reaches the name through re-exports,
//! only the file that defines the name counts. Test crates are checked. Unit tests are not, because they may name
//! everything.

mod circles;
mod crates;
mod journeys;
mod modules;
mod names;
mod seen;
mod spawns;
mod workspace;

use std::sync::LazyLock;

use circles::{Door, Needs};
use hvprobe_lab::documented;
use hvprobe_lab::verified::Table;
use names::Tree;
use workspace::root;

/// Needs of the files of each crate.
static NEEDS: LazyLock<Vec<Needs>> = LazyLock::new(|| trees().map(|it| it.needs()).collect());

/// Returns the modules of each crate.
fn trees() -> impl Iterator<Item = Tree> {
    let crates = workspace::crates().into_iter();
    crates.map(|of| Tree::read(&root(), &of))
}

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
    let wrong: Vec<_> = NEEDS.iter().flat_map(circles::report).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_folders_of_a_crate_need_one_another_in_a_circle() {
    let mut wrong = Vec::new();
    for needs in &*NEEDS {
        for door in [Door::Inside, Door::Beside] {
            wrong.extend(circles::report(&circles::of_folders(needs, door)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_file_takes_from_its_own_door_what_a_neighbour_defines() {
    let wrong: Vec<_> = trees().flat_map(|it| it.through_own_doors()).collect();
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

#[test]
fn table_of_what_was_verified_is_as_the_lab_writes_it() {
    let page = documented::page(documented::HOSTS).expect("the page");
    let table = Table::of_page(&page).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(table.written_into(&page).expect("the page"), page);
}
