//! gRPC clients in other languages, for the tests that call a server with them.
//!
//! Their packages are fetched from PyPI and npm, into a folder of the cache for each language. The versions are
//! fixed, so that a test fails only because of changes in this repository. If the packages cannot be fetched, the
//! run fails. With `--without-clients` nothing is fetched, and the tests of the clients are skipped.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::place::{Cache, replace_if_different};
use crate::{packages, progress, tool};

/// A language and the packages that its tests need.
struct Language {
    /// Name of the language and of its folder.
    name: &'static str,
    /// Environment variable that gives tests the path of `found`.
    variable: &'static str,
    packages: &'static [&'static str],
    /// Installs the packages into a new folder.
    fetch: fn(&Path, &[&str]) -> Result<()>,
    /// Path that tests use, relative to the folder.
    found: &'static str,
}

const LANGUAGES: [Language; 2] = [
    // From PyPI, about 15 MB. `setuptools` builds the package in docs/clients/python.
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
    // From npm, about 10 MB. `@grpc/reflection` is used for the description of the interface.
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

/// Returns the environment variables that give tests the paths of the clients.
pub(crate) fn environment(cache: &Cache) -> Result<Vec<(String, OsString)>> {
    let variable = |language: Language| {
        let found = language.ready(cache).with_context(|| {
            format!(
                "cannot have gRPC of {} (--without-clients skips its tests)",
                language.name
            )
        })?;
        Ok((language.variable.to_owned(), found.into()))
    };
    LANGUAGES.into_iter().map(variable).collect()
}

impl Language {
    /// Returns the path that tests use. Fetches the packages unless exactly these versions are there.
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
            // Written last, so that a fetch that was interrupted is repeated.
            replace_if_different(&complete, wanted.as_bytes())?;
            Ok(found)
        })
    }
}

fn fetch_python(folder: &Path, names: &[&str]) -> Result<()> {
    // This package brings Python and its virtual environments, which keep the clients' packages apart from others.
    packages::ensure(&["python3-venv"])?;
    tool::run(
        Command::new("/usr/bin/python3")
            .args(["-m", "venv"])
            .arg(folder),
    )?;
    tool::run(
        Command::new(folder.join("bin/python"))
            .args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"])
            .args(names),
    )
    .map(drop)
}

fn fetch_node(folder: &Path, names: &[&str]) -> Result<()> {
    // A Node that is not Debian's has an npm of its own, which conflicts with Debian's package.
    let here = |program: &str| tool::run(Command::new(program).arg("--version")).is_ok();
    if !here("node") || !here("npm") {
        packages::ensure(&["nodejs", "npm"])?;
    }
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    tool::run(
        Command::new("npm")
            .args(["install", "--loglevel=error", "--no-audit", "--no-fund"])
            // Scripts of the packages are not run.
            .args(["--ignore-scripts", "--prefix"])
            .arg(folder)
            .args(names),
    )
    .map(drop)
}
