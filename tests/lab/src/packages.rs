//! Debian packages: functions that install the missing ones, and that download packages without installing them.
//!
//! Package lists are refreshed only after an action has failed without a refresh. Every failure becomes one line
//! with apt's own reason. apt verifies its downloads. For a suite other than this machine's, the lists are in a
//! folder of the lab, so the lists, preferences and installed packages of the machine's own apt do not change.

use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, str};

use anyhow::{Context, Result, anyhow, bail};

use crate::place::replace_if_different;
use crate::{progress, tool};

/// Options that limit how long apt tries, so that it fails soon on a machine without network.
const PATIENCE: [&str; 6] = [
    "-o",
    "Acquire::Retries=1",
    "-o",
    "Acquire::http::Timeout=20",
    "-o",
    "Acquire::https::Timeout=20",
];

/// Makes sure that `names` are installed.
pub(crate) fn ensure(names: &[&str]) -> Result<()> {
    let missing = missing(names)?;
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        bail!(
            "packages are missing and only root can install them: \
             apt-get install --no-install-recommends {list}"
        );
    }
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(&missing);
    progress::step(&format!("installing {list}"), || {
        let machine = Archives::of_machine();
        machine
            .with_fresh_lists(|| machine.apt_get(&arguments, None))
            .with_context(|| format!("cannot install {list}"))
    })
}

/// Source of packages that are downloaded but not installed.
#[derive(Debug)]
pub(crate) struct Archives {
    name: String,
    /// Options that say where apt has its files.
    options: Vec<OsString>,
}

impl Display for Archives {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Debian's archive.
const DEBIAN: &str = "http://deb.debian.org/debian";
/// Keys with which that archive is signed. Every Debian has this file.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

impl Archives {
    /// Returns the archives of this machine's own apt.
    pub(crate) fn of_machine() -> Self {
        Self {
            name: "this machine's archives".to_owned(),
            options: Vec::new(),
        }
    }

    /// Returns Debian's archive of `suite` only. apt's lists for it are in `folder`.
    pub(crate) fn of_suite(suite: &str, folder: &Path) -> Result<Self> {
        let sources = format!("deb [arch=amd64 signed-by={KEYRING}] {DEBIAN} {suite} main\n");
        replace_if_different(&folder.join("sources.list"), sources.as_bytes())?;
        fs::create_dir_all(folder.join("lists/partial"))?;
        fs::create_dir_all(folder.join("cache/archives/partial"))?;
        let mut options = Vec::new();
        for (name, file) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            let mut option = OsString::from(format!("{name}="));
            option.push(folder.join(file));
            options.extend(["-o".into(), option]);
        }
        for option in [
            // Ignores the machine's sources, preferences and installed packages.
            "Dir::Etc::sourceparts=/dev/null",
            "Dir::Etc::preferences=/dev/null",
            "Dir::Etc::preferencesparts=/dev/null",
            "Dir::State::status=/dev/null",
            // Ignores the release that this machine prefers, which need not be in these lists.
            "APT::Default-Release=",
            // Downloads no descriptions, which nobody reads, and makes no caches of the lists, which would be
            // larger than the lists.
            "Acquire::Languages=none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
            "Dir::Cache::pkgcache=",
            "Dir::Cache::srcpkgcache=",
        ] {
            options.extend(["-o".into(), option.into()]);
        }
        Ok(Self {
            name: format!("Debian's {suite}"),
            options,
        })
    }

    /// Returns the packages of the kernel that `metapackage` depends on at present. They contain its image and its
    /// modules.
    pub(crate) fn kernel(&self, metapackage: &str) -> Result<Vec<String>> {
        self.with_fresh_lists(|| {
            let listing = |package: &str| self.depends(package);
            let packages = kernel_packages(metapackage, listing)?;
            packages.with_context(|| format!("apt knows no package {metapackage}"))
        })
        .with_context(|| format!("cannot find what {metapackage} stands for"))
    }

    /// Returns the output of `apt-cache depends` for `package`.
    fn depends(&self, package: &str) -> Result<Vec<u8>> {
        let mut command = Command::new("apt-cache");
        command.args(&self.options);
        Ok(tool::run(command.args(["depends", "--important", package]))?.stdout)
    }

    /// Downloads `packages` and unpacks them together into a folder in `parent`, unless the folder exists. Runs
    /// none of their scripts. Returns the folder, whose name is that of the first package file, with its version.
    pub(crate) fn unpacked(&self, packages: &[String], parent: &Path) -> Result<PathBuf> {
        fs::create_dir_all(parent)?;
        // apt downloads as a user of its own, which must be able to use the folder. So the folder is not a private
        // temporary one.
        let work = tempfile::Builder::new()
            .prefix(".fetch-")
            .tempdir_in(parent)?;
        let names = packages.join(", ");
        let files = progress::step(&format!("downloading {names}"), || {
            self.download(packages, work.path())
        })?;
        let first = files.first().and_then(|file| file.file_stem());
        let folder = parent.join(first.context("no package file")?);
        if !folder.exists() {
            let unpacked = work.path().join("unpacked");
            progress::step(&format!("unpacking {names}"), || {
                files.iter().try_for_each(|file| unpack(file, &unpacked))
            })?;
            fs::rename(&unpacked, &folder)?;
        }
        Ok(folder)
    }

    /// Downloads `packages` into the empty folder `folder`. Returns the files in the order of `packages`.
    pub(crate) fn download(&self, packages: &[String], folder: &Path) -> Result<Vec<PathBuf>> {
        let mut arguments = vec!["download"];
        arguments.extend(packages.iter().map(String::as_str));
        self.with_fresh_lists(|| self.apt_get(&arguments, Some(folder)))
            .with_context(|| format!("cannot download {}", packages.join(", ")))?;
        let file = |package: &String| {
            let begin = format!("{package}_");
            fs::read_dir(folder)?
                .filter_map(|entry| Some(entry.ok()?.path()))
                .find(|path| {
                    let name = path.file_name().and_then(|name| name.to_str());
                    name.is_some_and(|name| name.starts_with(&begin) && name.ends_with(".deb"))
                })
                .with_context(|| format!("apt-get download left no file for {package}"))
        };
        packages.iter().map(file).collect()
    }

    /// Runs `action`. If it fails, refreshes the package lists and runs it once more.
    fn with_fresh_lists<T>(&self, action: impl Fn() -> Result<T>) -> Result<T> {
        action().or_else(|_| {
            // An error of the refresh is reported only if the second try fails: a list that cannot be fetched, or
            // that only root may fetch, need not be one that `action` needs.
            let refreshed = self.apt_get(&["update"], None);
            action().map_err(|error| match refreshed {
                Ok(()) => error,
                Err(why) => anyhow!("{error:#}; {self} could not be asked for news: {why:#}"),
            })
        })
    }

    fn apt_get(&self, arguments: &[&str], folder: Option<&Path>) -> Result<()> {
        let mut command = Command::new("apt-get");
        command
            .arg("-q")
            .args(PATIENCE)
            .args(&self.options)
            .args(arguments);
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        tool::run(command.env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
    }
}

/// Unpacks a package file into `folder`. Runs none of its scripts.
pub(crate) fn unpack(file: &Path, folder: &Path) -> Result<()> {
    tool::run(Command::new("dpkg").arg("-x").arg(file).arg(folder))
        .map(drop)
        .with_context(|| format!("cannot unpack {}", file.display()))
}

fn missing<'a>(names: &[&'a str]) -> Result<Vec<&'a str>> {
    // dpkg-query fails if it does not know a name, but still lists the others.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${db:Status-Status} ${Package}\n"])
        .args(names)
        .env("LC_ALL", "C")
        .output()
        .map_err(|error| tool::not_started("dpkg-query", &error))?;
    let installed = str::from_utf8(&output.stdout)?;
    Ok(names
        .iter()
        .copied()
        .filter(|name| {
            !installed
                .lines()
                .any(|line| line == format!("installed {name}"))
        })
        .collect())
}

/// Returns the packages of the kernel on which `metapackage` depends, with its `linux-image-` package first.
/// Returns `None` if there is no such kernel. `listing` returns what `apt-cache depends` prints for a package.
fn kernel_packages(
    metapackage: &str,
    listing: impl Fn(&str) -> Result<Vec<u8>>,
) -> Result<Option<Vec<String>>> {
    let images = dependencies(&listing(metapackage)?, &["linux-image-"]);
    let Some(image) = images.into_iter().next() else {
        return Ok(None);
    };
    // Since 7.1 the image package is empty and depends on others.
    let parts = dependencies(&listing(&image)?, &["linux-binary-", "linux-modules-"]);
    Ok(Some([vec![image], parts].concat()))
}

/// Returns the packages after `Depends:` in the output of `apt-cache depends` whose names begin with one of
/// `prefixes`. A dependency with alternatives has another format (` |Depends:`) and is left out.
fn dependencies(listing: &[u8], prefixes: &[&str]) -> Vec<String> {
    String::from_utf8_lossy(listing)
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::trim)
        .filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_listing() {
        let listing = b"linux-image-7.2.1-amd64\n  PreDepends: linux-base\n |Depends: dracut\n  \
            Depends: <linux-initramfs-tool>\n    dracut\n  Depends: linux-base-7.2.1-amd64\n  \
            Depends: linux-binary-7.2.1-amd64\n  Depends: linux-modules-7.2.1-amd64\n";
        assert_eq!(
            dependencies(listing, &["linux-binary-", "linux-modules-"]),
            ["linux-binary-7.2.1-amd64", "linux-modules-7.2.1-amd64"]
        );
    }

    #[test]
    fn kernel_of_debian_12_13_and_unstable_is_found_in_its_packages() {
        const IMAGE_12: &str = "linux-image-6.1.0-48-cloud-amd64";
        const IMAGE_13: &str = "linux-image-6.12.107+deb13-cloud-amd64";
        const IMAGE: &str = "linux-image-7.2.13+deb14-cloud-amd64";
        const BINARY: &str = "linux-binary-7.2.13+deb14-cloud-amd64";
        const MODULES: &str = "linux-modules-7.2.13+deb14-cloud-amd64";
        let initramfs = " |Depends: dracut\n |Depends: initramfs-tools\n  Depends: \
            <linux-initramfs-tool>\n    dracut\n    tiny-initramfs\n";
        let depends = |on: &[&str]| {
            let lines = on.iter().map(|name| format!("  Depends: {name}\n"));
            lines.collect::<String>()
        };
        for (meta, image, expected) in [
            (depends(&[IMAGE_12]), initramfs.to_owned(), vec![IMAGE_12]),
            (
                depends(&[IMAGE_13]),
                format!(
                    "  PreDepends: linux-base\n{}{initramfs}",
                    depends(&["kmod"])
                ),
                vec![IMAGE_13],
            ),
            (
                depends(&["linux-base-cloud-amd64", IMAGE]),
                initramfs.to_owned()
                    + &depends(&["linux-base-7.2.13+deb14-cloud-amd64", BINARY, MODULES]),
                vec![IMAGE, BINARY, MODULES],
            ),
        ] {
            let listing = |package: &str| {
                let body = if package == "meta" { &meta } else { &image };
                Ok(format!("{package}\n{body}").into_bytes())
            };
            let packages = kernel_packages("meta", listing).unwrap().unwrap();
            assert_eq!(packages, expected);
        }
        let nothing = |package: &str| Ok(package.as_bytes().to_vec());
        assert_eq!(kernel_packages("meta", nothing).unwrap(), None);
    }

    #[test]
    fn listing_without_dependencies_has_none() {
        assert!(dependencies(b"busybox-static\n", &["linux-image-"]).is_empty());
    }

    #[test]
    fn archives_of_a_suite_leave_the_machines_alone() {
        let folder = tempfile::tempdir().unwrap();
        let archives = Archives::of_suite("trixie", folder.path()).unwrap();
        let sources = fs::read_to_string(folder.path().join("sources.list")).unwrap();
        assert!(sources.contains(" trixie main") && sources.contains("signed-by="));
        let output = tool::run(
            Command::new("apt-config")
                .args(&archives.options)
                .arg("dump"),
        );
        let Ok(output) = output else {
            return; // No apt here.
        };
        let dump = String::from_utf8_lossy(&output.stdout).into_owned();
        let folder = folder.path().display();
        for line in [
            format!("Dir::Etc::sourcelist \"{folder}/sources.list\";"),
            "Dir::Etc::sourceparts \"/dev/null\";".to_owned(),
            format!("Dir::State::lists \"{folder}/lists\";"),
            format!("Dir::Cache \"{folder}/cache\";"),
        ] {
            assert!(dump.lines().any(|dumped| dumped == line), "{line}: {dump}");
        }
    }
}
