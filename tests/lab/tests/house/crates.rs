//! Check of the arrows (dependencies) between crates.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::workspace::packages;

/// For each crate: the crates of the workspace that its code may depend on, and why not on others.
pub(crate) const ARROWS: [(&str, &[&str], &str); 14] = [
    ("arch", &[], "x86-64 is pure"),
    ("spec", &["arch"], "what a user asks for knows no kernel"),
    (
        "vmlinux",
        &["arch"],
        "the file of a kernel is read without its symbols, and without a machine",
    ),
    (
        "storage",
        &["vmlinux"],
        "an image is read without its kernel's symbols, and without a machine",
    ),
    (
        "linux",
        &["arch", "spec"],
        "what a kernel tells knows no probes",
    ),
    (
        "hit",
        &["arch", "spec", "linux"],
        "the data plane knows nothing of how probes are registered",
    ),
    (
        "engine",
        &["arch", "spec", "linux", "hit"],
        "the control plane runs without KVM and without gRPC",
    ),
    ("devices", &["arch"], "a device knows its registers only"),
    (
        "vm",
        &["arch", "devices", "vmlinux"],
        "the machine below knows neither probes nor Linux",
    ),
    (
        "machine",
        &[
            "arch", "spec", "vmlinux", "linux", "hit", "engine", "devices", "vm",
        ],
        "a machine knows nothing of its clients",
    ),
    (
        "proto",
        &["arch", "spec"],
        "what both ends need knows no kernel and no machine",
    ),
    (
        "sources",
        &["arch", "spec", "vmlinux", "linux", "engine", "proto"],
        "files are read, and definitions explained, without a machine",
    ),
    (
        "server",
        &[
            "arch", "spec", "linux", "hit", "engine", "machine", "proto", "sources",
        ],
        "the service talks to machines, not to KVM",
    ),
    (
        "cli",
        &[
            "arch", "spec", "vmlinux", "storage", "proto", "sources", "server",
        ],
        "the program talks to machines through the API, and to its own only if it is built with them",
    ),
];

/// Crates that clients use. They may not need KVM, except `cli` with its default features.
const CLIENTS: [&str; 3] = ["hvprobe-proto", "hvprobe-sources", "hvprobe-cli"];

/// Crates that link KVM, or need one that does.
const MACHINES: [&str; 5] = [
    "hvprobe-machine",
    "hvprobe-server",
    "hvprobe-vm",
    "kvm-bindings",
    "kvm-ioctls",
];

/// Returns the packages on which the code of `package` depends. Dependencies of tests and build scripts do not
/// count.
fn needed(package: &Value) -> impl Iterator<Item = &Value> {
    let all = package["dependencies"].as_array().expect("dependencies");
    all.iter().filter(|needed| needed["kind"].is_null())
}

/// Returns a line for each chain of dependencies from a client's crate to one that links KVM. Optional dependencies
/// do not count.
pub(crate) fn clients_with_kvm() -> Vec<String> {
    let packages = packages();
    let name = |value: &Value| value["name"].as_str().expect("a name").to_owned();
    let needs = packages.iter().map(|package| {
        let needed = needed(package).filter(|needed| needed["optional"] == false);
        (name(package), needed.map(name).collect())
    });
    let needs: BTreeMap<String, Vec<String>> = needs.collect();
    let mut wrong = Vec::new();
    for client in CLIENTS {
        assert!(needs.contains_key(client), "there is no crate {client}");
        let mut ways = vec![vec![client.to_owned()]];
        let mut seen = BTreeSet::new();
        while let Some(way) = ways.pop() {
            let last = &way[way.len() - 1];
            if MACHINES.contains(&last.as_str()) {
                wrong.push(format!("{} links KVM: clients do without", way.join(" → ")));
            } else if seen.insert(last.clone()) {
                // Crates from outside the workspace are assumed not to need KVM, except those in `MACHINES`.
                let next = needs.get(last).into_iter().flatten();
                ways.extend(next.map(|next| [&way[..], std::slice::from_ref(next)].concat()));
            }
        }
    }
    wrong
}

/// Returns a line for each dependency that is not allowed, and for each crate that is missing.
pub(crate) fn wrong_arrows() -> Vec<String> {
    let short = |name: &Value| name.as_str()?.strip_prefix("hvprobe-").map(str::to_owned);
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for package in &packages() {
        let Some(name) = short(&package["name"]) else {
            continue;
        };
        let Some((_, allowed, why)) = ARROWS.iter().find(|(of, ..)| *of == name) else {
            continue;
        };
        for other in needed(package).filter_map(|needed| short(&needed["name"])) {
            if !allowed.contains(&other.as_str()) {
                wrong.push(format!("hvprobe-{name} depends on hvprobe-{other}: {why}"));
            }
        }
        seen.insert(name);
    }
    let missing = ARROWS.iter().filter(|(of, ..)| !seen.contains(*of));
    wrong.extend(missing.map(|(of, ..)| format!("there is no crate hvprobe-{of}")));
    wrong
}
