//! Building the workspace's programs and tests, and finding what was built.

use std::env;
use std::io::{BufRead, BufReader, IsTerminal, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::building;
use crate::process;

/// The workspace that this lab is part of.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
}

/// One program that cargo built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Executable {
    /// The target's name: the program's or the test file's.
    pub(crate) name: String,
    /// Whether it is a libtest binary.
    pub(crate) test: bool,
    /// The folder of its package.
    pub(crate) package: PathBuf,
    pub(crate) path: PathBuf,
}

/// Everything that tests and short forms of benches need.
pub(crate) const EVERYTHING: [&str; 3] = ["--bins", "--tests", "--examples"];

/// A test that builds quickly. A build that includes a test has the features that only tests ask for.
const ONE_TEST: &str = "--test=released";

/// Optional features that the lab builds programs with.
pub(crate) const FEATURES: &str = "--features=hvprobe-cli/flame";

/// The workspace's programs that are useful in a rig.
pub(crate) const PACKED: [&str; 2] = ["hvprobe", "workload"];

/// Returns a command for the cargo that started the lab, at the workspace's root.
pub(crate) fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(program());
    command.current_dir(&workspace.root);
    process::end_with_us(&mut command);
    command
}

pub(crate) fn program() -> std::ffi::OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

impl Workspace {
    /// Asks cargo where the workspace is, starting from the lab's own package.
    pub(crate) fn locate() -> Result<Self> {
        let output = Command::new(program())
            .args(["metadata", "--no-deps", "--format-version=1"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stderr(Stdio::inherit())
            .output()
            .context("cannot run cargo metadata")?;
        let value: Value = serde_json::from_slice(&output.stdout)
            .context("cargo metadata did not describe the workspace")?;
        let path = |key: &str| {
            value[key]
                .as_str()
                .map(PathBuf::from)
                .with_context(|| format!("cargo metadata names no {key}"))
        };
        Ok(Self {
            root: path("workspace_root")?,
            target: path("target_directory")?,
        })
    }

    /// Finds the programs that earlier builds left in the target folder.
    pub(crate) fn built(&self, release: bool) -> Vec<Executable> {
        let folder = self.target.join(if release { "release" } else { "debug" });
        PACKED
            .iter()
            .map(|name| Executable {
                name: (*name).to_owned(),
                test: false,
                package: self.root.clone(),
                path: folder.join(name),
            })
            .filter(|executable| executable.path.is_file())
            .collect()
    }

    /// Builds these targets, such as `--bin=hvprobe`, and returns the programs that cargo built or found up to
    /// date. A development build has the same features as a build of the whole workspace with its tests: with other
    /// features, cargo would rebuild the crates that both builds share. A release build has no features for tests.
    pub(crate) fn build(&self, targets: &[&str]) -> Result<Vec<Executable>> {
        let mut arguments = [&["--workspace", FEATURES], targets].concat();
        if !targets.contains(&"--release") && !targets.contains(&"--tests") {
            arguments.push(ONE_TEST);
        }
        self.cargo_build(&arguments)
    }

    /// Builds the programs and tests of `packages`, and their dependencies in other packages.
    pub(crate) fn build_packages(&self, packages: &[String]) -> Result<Vec<Executable>> {
        let packages: Vec<_> = packages
            .iter()
            .map(|it| format!("--package={it}"))
            .collect();
        let packages = packages.iter().map(String::as_str);
        let arguments: Vec<_> = packages.chain(["--bins", "--tests"]).collect();
        self.cargo_build(&arguments)
    }

    fn cargo_build(&self, arguments: &[&str]) -> Result<Vec<Executable>> {
        let mut command = cargo(self);
        command
            .args(["build", "--message-format=json-render-diagnostics"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if !stderr().is_terminal() {
            building::ask_for_bar(&mut command);
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn().context("cannot run cargo build")?;
        let messages = child.stdout.take().context("cargo build has no output")?;
        let bar = child.stderr.take();
        let follower = bar.map(|bar| thread::spawn(move || building::follow(bar)));
        let mut executables = Vec::new();
        for line in BufReader::new(messages).lines() {
            executables.extend(executable(&line?));
        }
        if let Some(follower) = follower {
            // The diagnostics are shown in full before the failure is reported.
            let _ = follower.join();
        }
        if !child.wait()?.success() {
            bail!("cargo build {} failed", arguments.join(" "));
        }
        Ok(executables)
    }
}

/// Returns the path of the program `name` among those built.
pub(crate) fn program_named(built: &[Executable], name: &str) -> Result<PathBuf> {
    built
        .iter()
        .find(|executable| executable.name == name && !executable.test)
        .map(|executable| executable.path.clone())
        .with_context(|| format!("cargo build made no program {name}"))
}

/// Returns the program that a line of cargo's messages announces, if it announces one.
fn executable(message: &str) -> Option<Executable> {
    let message: Value = serde_json::from_str(message).ok()?;
    Some(Executable {
        name: message["target"]["name"].as_str()?.to_owned(),
        test: message["profile"]["test"].as_bool()?,
        package: Path::new(message["manifest_path"].as_str()?)
            .parent()?
            .to_path_buf(),
        path: message["executable"].as_str()?.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifact_with_executable_is_read() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml",
            "target":{"kind":["test"],"name":"micro_host"},"profile":{"test":true},
            "executable":"/w/target/debug/deps/micro_host-1"}"#;
        assert_eq!(
            executable(message),
            Some(Executable {
                name: "micro_host".into(),
                test: true,
                package: "/w/tests".into(),
                path: "/w/target/debug/deps/micro_host-1".into(),
            })
        );
    }

    #[test]
    fn library_and_other_messages_are_passed_over() {
        assert_eq!(
            executable(r#"{"reason":"build-finished","success":true}"#),
            None
        );
        assert_eq!(
            executable(
                r#"{"manifest_path":"/w/Cargo.toml","target":{"name":"x"},
                "profile":{"test":false},"executable":null}"#
            ),
            None
        );
        assert_eq!(executable("not json"), None);
    }
}
