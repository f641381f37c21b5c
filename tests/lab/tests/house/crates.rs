//! Arrows between crates.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// For each crate the crates of the workspace that its code may name, and why it may not name others.
pub(crate) const ARROWS: [(&str, &[&str], &str); 13] = [
    ("arch", &[], "x86-64 is pure"),
    ("spec", &["arch"], "what a user asks for knows no kernel"),
    (
        "vmlinux",
        &["arch"],
        "the file of a kernel is read without its symbols, and without a machine",
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
        &["arch", "spec", "vmlinux", "proto", "sources", "server"],
        "the program talks to machines through the API",
    ),
];

/// Returns a line for each dependency that is not allowed, and for each crate that is missing.
pub(crate) fn wrong_arrows() -> Vec<String> {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(super::root())
        .output()
        .expect("cargo runs");
    let metadata: Value = serde_json::from_slice(&metadata.stdout).expect("cargo tells JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let short = |name: &Value| name.as_str()?.strip_prefix("hvprobe-").map(str::to_owned);
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for package in packages {
        let Some(name) = short(&package["name"]) else {
            continue;
        };
        let Some((_, allowed, why)) = ARROWS.iter().find(|(of, ..)| *of == name) else {
            continue;
        };
        let needed = package["dependencies"].as_array().expect("dependencies");
        // Dependencies of tests and build scripts are not restricted.
        let needed = needed.iter().filter(|needed| needed["kind"].is_null());
        for other in needed.filter_map(|needed| short(&needed["name"])) {
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
