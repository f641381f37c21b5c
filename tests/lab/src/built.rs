//! Kernels that the lab builds for guests from Debian's source, because no package contains such a kernel.
//!
//! If a folder `NAME-HASH` exists under the cache's `kernel`, it is complete. The hash is of suite, source and
//! configuration, so another configuration gives another kernel.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::packages::{self, Archives};
use crate::place::Cache;
use crate::process;
use crate::progress;

/// A kernel that the lab builds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Built {
    pub(crate) name: &'static str,
    suite: &'static str,
    /// Debian's package with the source.
    source: &'static str,
    /// Options that are set on top of `make tinyconfig`.
    config: &'static str,
}

/// All kernels that the lab builds.
pub(crate) const BUILT: [Built; 1] = [Built {
    name: "6.1-stripped",
    suite: "bookworm",
    source: "linux-source-6.1",
    config: include_str!("../kernels/6.1-stripped.config"),
}];

/// Debian packages that building a kernel needs.
const TOOLS: [&str; 9] = [
    "bc",
    "bison",
    "flex",
    "gcc",
    "libc6-dev",
    "libelf-dev",
    "lz4",
    "make",
    "xz-utils",
];

impl Built {
    /// Returns the path of the `bzImage`. Builds the kernel if it is not in the cache.
    pub(crate) fn image(&self, cache: &Cache) -> Result<PathBuf> {
        let folder = cache.kernels().join(self.folder_name());
        let image = folder.join("vmlinuz");
        if image.is_file() {
            return Ok(image);
        }
        packages::ensure(&TOOLS)?;
        fs::create_dir_all(cache.kernels())?;
        // apt downloads as a user of its own, which must be able to use the folder. So the folder is not a private
        // temporary one.
        let work = tempfile::Builder::new()
            .prefix(".build-")
            .tempdir_in(cache.kernels())?;
        let source = self.unpack(cache, work.path())?;
        let made = progress::step(&format!("building kernel {}", self.name), || {
            self.make(&source, work.path())
        })?;
        let complete = work.path().join("complete");
        fs::create_dir(&complete)?;
        fs::copy(&made, complete.join("vmlinuz")).context("cannot keep the kernel")?;
        fs::rename(&complete, &folder).context("cannot keep the kernel")?;
        Ok(image)
    }

    fn folder_name(&self) -> String {
        let mut hasher = DefaultHasher::new();
        (self.suite, self.source, self.config).hash(&mut hasher);
        format!("{}-{:016x}", self.name, hasher.finish())
    }

    /// Unpacks the source under `work` and returns its folder.
    fn unpack(&self, cache: &Cache, work: &Path) -> Result<PathBuf> {
        let archives = Archives::of_suite(self.suite, &cache.suite(self.suite))?;
        let name = self.source.to_owned();
        let files = progress::step(&format!("downloading {name} from {archives}"), || {
            archives.download(&[name], work)
        })?;
        let package = files.first().context("no package file")?;
        let source = work.join("source");
        fs::create_dir(&source)?;
        progress::step(&format!("unpacking {}", self.source), || {
            let unpacked = work.join("unpacked");
            packages::unpack(package, &unpacked)?;
            let archive = unpacked.join(format!("usr/src/{}.tar.xz", self.source));
            let mut tar = Command::new("tar");
            tar.arg("-xf").arg(archive).arg("--strip-components=1");
            run(tar.arg("-C").arg(&source), &work.join("log"))
        })?;
        Ok(source)
    }

    /// Builds the kernel in `source` and returns the path of its image there.
    fn make(&self, source: &Path, work: &Path) -> Result<PathBuf> {
        let log = work.join("log");
        let make = |target: &str| {
            let jobs = process::processors();
            let mut make = Command::new("nice");
            make.args(["-n", "19", "make", "-s", &format!("-j{jobs}"), target]);
            // These variables make the build reproducible on every machine.
            make.env("KBUILD_BUILD_USER", "lab")
                .env("KBUILD_BUILD_HOST", "lab")
                .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01");
            run(make.current_dir(source), &log)
        };
        let config = source.join(".config");
        make("tinyconfig")?;
        let tiny = fs::read_to_string(&config)?;
        fs::write(&config, format!("{tiny}\n{}", self.config))?;
        make("olddefconfig")?;
        let missing = missing(self.config, &fs::read_to_string(&config)?);
        if !missing.is_empty() {
            bail!("{} cannot have {}", self.name, missing.join(", "));
        }
        make("bzImage")?;
        Ok(source.join("arch/x86/boot/bzImage"))
    }
}

/// Returns the lines of `wanted` that `config` does not fulfil.
fn missing<'a>(wanted: &'a str, config: &str) -> Vec<&'a str> {
    let is_set = |line: &&str| line.starts_with("CONFIG_") || line.ends_with(" is not set");
    let has = |wanted: &dyn Fn(&str) -> bool| config.lines().any(wanted);
    let is_missing = |line: &&str| {
        let off = line.strip_prefix("# ");
        match off.and_then(|line| line.strip_suffix(" is not set")) {
            // An option that does not exist counts as not set.
            Some(name) => has(&|other| other.split('=').next() == Some(name)),
            None => !has(&|other| other == *line),
        }
    };
    wanted.lines().filter(is_set).filter(is_missing).collect()
}

/// Runs a tool to its end, with its output in `log`. If the tool fails, the error contains the last lines of `log`.
fn run(command: &mut Command, log: &Path) -> Result<()> {
    const LINES: usize = 10;
    let program = command.get_program().to_string_lossy().into_owned();
    let output = File::create(log)?;
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    process::end_with_us(command);
    let status = command
        .status()
        .with_context(|| format!("{program} does not start"))?;
    if status.success() {
        return Ok(());
    }
    let printed = fs::read(log).unwrap_or_default();
    let printed = String::from_utf8_lossy(&printed);
    let lines: Vec<&str> = printed.lines().rev().take(LINES).collect();
    let lines: Vec<&str> = lines.into_iter().rev().collect();
    bail!("{program} failed:\n{}", lines.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_source_has_not_is_reported() {
        let wanted = "# A kernel.\nCONFIG_A=y\nCONFIG_B=8\nCONFIG_C=y\n# CONFIG_D is not set\n# CONFIG_E is not set\n";
        let config = "CONFIG_A=y\nCONFIG_B=64\n# CONFIG_C is not set\nCONFIG_D=y\nCONFIG_EXTRA=y\n";
        let expected = ["CONFIG_B=8", "CONFIG_C=y", "# CONFIG_D is not set"];
        assert_eq!(missing(wanted, config), expected);
    }

    #[test]
    fn another_configuration_is_another_kernel() {
        let [built] = &BUILT;
        let other = Built {
            config: "CONFIG_64BIT=y\n",
            ..*built
        };
        assert_ne!(built.folder_name(), other.folder_name());
        assert!(built.folder_name().starts_with("6.1-stripped-"));
    }
}
