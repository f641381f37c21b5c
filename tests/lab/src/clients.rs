//! gRPC clients that are not ours, for the tests that call a server with them.
//!
//! They come from the archives of their languages, into a folder of the cache: a fixed version, as a
//! test is to fail for what we change. Without network, or a Python, those tests are skipped, with
//! the reason.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::place::{Cache, replace_if_different};
use crate::{packages, progress};

/// Where tests find a Python with [`PACKAGES`].
const PYTHON: &str = "HVPROBE_TEST_PYTHON";
/// What brings Python, and its own way to keep packages apart.
const DEBIAN: [&str; 1] = ["python3-venv"];
/// From PyPI, about 10 MB.
const PACKAGES: [&str; 2] = ["grpcio==1.85.1", "grpcio-reflection==1.85.1"];

/// What tests are told of them.
pub(crate) fn environment(cache: &Cache) -> Vec<(String, OsString)> {
    match python(cache) {
        Ok(python) => vec![(PYTHON.to_owned(), python.into())],
        Err(error) => {
            progress::note(&format!(
                "tests with Python's gRPC are skipped: there is none: {error:#}"
            ));
            Vec::new()
        }
    }
}

fn python(cache: &Cache) -> Result<PathBuf> {
    let folder = cache.clients().join("python");
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    let wanted = PACKAGES.join("\n");
    if python.exists() && fs::read_to_string(&complete).is_ok_and(|have| have == wanted) {
        return Ok(python);
    }
    packages::ensure(&DEBIAN)?;
    progress::step("fetching Python's gRPC", || {
        match fs::remove_dir_all(&folder) {
            Err(error) if folder.exists() => {
                return Err(error).with_context(|| format!("cannot empty {}", folder.display()));
            }
            Ok(()) | Err(_) => {}
        }
        run(Command::new("/usr/bin/python3")
            .args(["-m", "venv"])
            .arg(&folder))?;
        run(Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"])
            .args(PACKAGES))?;
        // Last: what was interrupted is done again.
        replace_if_different(&complete, wanted.as_bytes())?;
        Ok(python)
    })
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().context("cannot start Python")?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    let why = told.lines().rfind(|line| !line.trim().is_empty());
    bail!(
        "{}: {}",
        output.status,
        why.unwrap_or("no reason was given")
    )
}
