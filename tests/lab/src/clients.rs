//! gRPC clients that are not ours, for the tests that call a server with them.
//!
//! They come from the archives of their languages, into a folder each of the cache: a fixed version, as
//! a test is to fail for what we change. Where they cannot be had, the run fails; only who says so goes on
//! without them, and has their tests skipped.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::place::{Cache, replace_if_different};
use crate::{packages, progress};

/// A language, and what tests need of it.
struct Language {
    /// What it is called, its folder too.
    name: &'static str,
    /// Where tests find it.
    variable: &'static str,
    packages: &'static [&'static str],
    /// Brings the packages into an empty folder.
    fetch: fn(&Path, &[&str]) -> Result<()>,
    /// What tests are told, below the folder.
    found: &'static str,
}

const LANGUAGES: [Language; 2] = [
    // From PyPI, about 15 MB. `setuptools` makes a package of docs/clients/python.
    Language {
        name: "python",
        variable: "HVPROBE_TEST_PYTHON",
        packages: &[
            "grpcio==1.85.1",
            "grpcio-reflection==1.85.1",
            "grpcio-status==1.85.1",
            "grpcio-tools==1.85.1",
            "setuptools==80.9.0",
        ],
        fetch: fetch_python,
        found: "bin/python",
    },
    // From npm, about 10 MB. Of `@grpc/reflection` the interface's description is used.
    Language {
        name: "node",
        variable: "HVPROBE_TEST_NODE",
        packages: &[
            "@grpc/grpc-js@1.14.7",
            "@grpc/proto-loader@0.8.1",
            "@grpc/reflection@1.0.4",
        ],
        fetch: fetch_node,
        found: "node_modules",
    },
];

/// What tests are told of them.
pub(crate) fn environment(cache: &Cache) -> Result<Vec<(String, OsString)>> {
    let told = |language: Language| {
        let found = language.ready(cache).with_context(|| {
            format!(
                "cannot have gRPC of {} (--without-clients skips its tests)",
                language.name
            )
        })?;
        Ok((language.variable.to_owned(), found.into()))
    };
    LANGUAGES.into_iter().map(told).collect()
}

impl Language {
    /// What tests are told, which is there then.
    fn ready(&self, cache: &Cache) -> Result<PathBuf> {
        let folder = cache.clients().join(self.name);
        let (found, complete) = (folder.join(self.found), folder.join("complete"));
        let wanted = self.packages.join("\n");
        if found.exists() && fs::read_to_string(&complete).is_ok_and(|have| have == wanted) {
            return Ok(found);
        }
        progress::step(&format!("fetching gRPC of {}", self.name), || {
            match fs::remove_dir_all(&folder) {
                Err(error) if folder.exists() => {
                    return Err(error)
                        .with_context(|| format!("cannot empty {}", folder.display()));
                }
                Ok(()) | Err(_) => {}
            }
            (self.fetch)(&folder, self.packages)?;
            // Last: what was interrupted is done again.
            replace_if_different(&complete, wanted.as_bytes())?;
            Ok(found)
        })
    }
}

fn fetch_python(folder: &Path, names: &[&str]) -> Result<()> {
    // What brings Python, and its own way to keep packages apart.
    packages::ensure(&["python3-venv"])?;
    run(Command::new("/usr/bin/python3")
        .args(["-m", "venv"])
        .arg(folder))?;
    run(Command::new(folder.join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"])
        .args(names))
}

fn fetch_node(folder: &Path, names: &[&str]) -> Result<()> {
    // A Node that is not Debian's comes with an npm of its own, which Debian's is in conflict with.
    let here = |program: &str| run(Command::new(program).arg("--version")).is_ok();
    if !here("node") || !here("npm") {
        packages::ensure(&["nodejs", "npm"])?;
    }
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    run(Command::new("npm")
        .args(["install", "--loglevel=error", "--no-audit", "--no-fund"])
        // Programs of the packages are not run.
        .args(["--ignore-scripts", "--prefix"])
        .arg(folder)
        .args(names))
}

fn run(command: &mut Command) -> Result<()> {
    let program = Path::new(command.get_program()).to_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    bail!("{}: {}", output.status, reason(&told))
}

/// What a program says of why it failed: pip on its last line; npm before it says where more is.
fn reason(told: &str) -> &str {
    told.lines()
        .filter(|line| !line.trim().is_empty())
        .rfind(|line| !line.starts_with("npm error") || line.contains(" reason: "))
        .unwrap_or("no reason was given")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_line_that_says_why() {
        let npm = "npm error code ECONNREFUSED\n\
                   npm error FetchError: request to http://x failed, reason: connect ECONNREFUSED\n\
                   npm error     at ClientRequest\n\
                   npm error A complete log of this run can be found in: /x\n";
        assert!(reason(npm).ends_with("reason: connect ECONNREFUSED"));
        let pip = "WARNING: retrying\nERROR: No matching distribution found for grpcio\n\n";
        let why = "ERROR: No matching distribution found for grpcio";
        assert_eq!(reason(pip), why);
        assert_eq!(reason(" \n"), "no reason was given");
    }
}
