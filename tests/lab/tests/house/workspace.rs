//! The repository's root, and cargo's descriptions of its packages.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// Returns the repository's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns cargo's descriptions of the workspace's packages.
pub(crate) fn packages() -> Vec<Value> {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let mut metadata: Value = serde_json::from_slice(&metadata.stdout).expect("cargo prints JSON");
    match metadata["packages"].take() {
        Value::Array(packages) => packages,
        other => panic!("cargo lists no packages: {other}"),
    }
}

/// Returns the root module's file of every crate: libraries, programs, tests and examples.
pub(crate) fn crates() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = packages()
        .iter()
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter_map(|target| Some(target["src_path"].as_str()?.into()))
        .collect();
    roots.sort();
    roots
}
