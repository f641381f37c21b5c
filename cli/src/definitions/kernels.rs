//! Kernels by name: those that are installed on this machine, that of a build tree, or a file.
//!
//! Invariant: a name that is a file or a folder stands for that, except for the words `latest` and `host`. A file of
//! such a name is given with a slash, as in `./latest`.

mod version;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::system::uname;

/// Maximum number of versions that an error lists.
const LISTED: usize = 5;

/// Files of a folder that may be its kernel: what the kernel's build leaves in its tree, and what distributions put
/// beside a kernel's modules.
const IN_FOLDER: [&str; 3] = ["arch/x86/boot/bzImage", "vmlinux", "vmlinuz"];

/// Returns the kernel that `name` stands for.
///
/// # Errors
/// When there is none, with the names that there are.
pub(crate) fn named(name: &Path) -> anyhow::Result<PathBuf> {
    resolve(name, &Installed::of_this_machine())
}

/// Returns the newest installed kernel that can be read.
///
/// # Errors
/// When there is none.
pub(crate) fn newest() -> anyhow::Result<PathBuf> {
    Installed::of_this_machine().newest()
}

fn resolve(name: &Path, installed: &Installed) -> anyhow::Result<PathBuf> {
    match name.to_str() {
        Some("latest") => return installed.newest(),
        Some("host") => return installed.running(),
        _ => {}
    }
    if name.is_dir() {
        return of_folder(name);
    }
    let is_version = |text: &&str| text.starts_with(|first: char| first.is_ascii_digit());
    match name.to_str().filter(is_version) {
        Some(version) if !name.exists() => installed.of_version(version),
        // That a file does not exist is said where it is opened.
        _ => Ok(name.to_owned()),
    }
}

fn of_folder(folder: &Path) -> anyhow::Result<PathBuf> {
    let files = IN_FOLDER.map(|file| folder.join(file));
    let found = files.into_iter().find(|file| file.is_file());
    found.with_context(|| {
        let [image, vmlinux, installed] = IN_FOLDER;
        format!(
            "{} has no kernel, neither {image} nor {vmlinux} nor {installed}: build it with `make bzImage`, or give a file",
            folder.display()
        )
    })
}

/// The installed kernels, the newest first, each with its version.
#[derive(Debug)]
struct Installed {
    kernels: Vec<(String, PathBuf)>,
    /// Version of the running kernel.
    running: String,
}

impl Installed {
    fn of_this_machine() -> Self {
        let running = uname().release().to_string_lossy().into_owned();
        Self::within(Path::new("/boot"), Path::new("/usr/lib/modules"), running)
    }

    /// Finds the kernels in `boot`, and beside their modules, which are in folders of `modules`.
    fn within(boot: &Path, modules: &Path, running: String) -> Self {
        let in_boot = names(boot).filter_map(|name| {
            let version = name.strip_prefix("vmlinuz-")?;
            // Fedora's rescue kernel is a copy of another kernel.
            let is_rescue = version.contains("rescue");
            (!is_rescue).then(|| (version.to_owned(), boot.join(&name)))
        });
        let beside_modules = names(modules).map(|version| {
            let path = modules.join(&version).join("vmlinuz");
            (version, path)
        });
        let mut kernels: Vec<_> = in_boot
            .chain(beside_modules)
            .filter(|(_, path)| path.is_file())
            .collect();
        // Of one version, that of /boot stays first.
        kernels.sort_by(|(one, _), (other, _)| version::compare(other, one));
        Self { kernels, running }
    }

    fn newest(&self) -> anyhow::Result<PathBuf> {
        let readable = self
            .kernels
            .iter()
            .find(|(_, path)| File::open(path).is_ok());
        match readable {
            Some((_, path)) => Ok(path.clone()),
            None if self.kernels.is_empty() => {
                bail!("no kernel is installed in /boot or /usr/lib/modules; give one with --kernel")
            }
            None => bail!(
                "none of the installed kernels can be read; try as root, or give one with --kernel"
            ),
        }
    }

    fn running(&self) -> anyhow::Result<PathBuf> {
        let running = self
            .kernels
            .iter()
            .find(|(version, _)| *version == self.running);
        let Some((_, path)) = running else {
            bail!(
                "the running kernel, {}, is not installed as a file: {}",
                self.running,
                self.listed()
            );
        };
        Ok(path.clone())
    }

    fn of_version(&self, wanted: &str) -> anyhow::Result<PathBuf> {
        let mut kernels = self.kernels.iter();
        let found = kernels.find(|(version, _)| version::is_of(wanted, version));
        found.map(|(_, path)| path.clone()).with_context(|| {
            format!(
                "{wanted} is neither a file nor the version of an installed kernel: {}",
                self.listed()
            )
        })
    }

    /// Returns which versions there are, for errors.
    fn listed(&self) -> String {
        if self.kernels.is_empty() {
            return "there is none in /boot or /usr/lib/modules".to_owned();
        }
        let versions = self.kernels.iter().take(LISTED);
        let mut listed: Vec<&str> = versions.map(|(version, _)| version.as_str()).collect();
        listed.dedup();
        let more = if self.kernels.len() > LISTED {
            ", …"
        } else {
            ""
        };
        format!("there are {}{more}", listed.join(", "))
    }
}

/// Returns the names in `folder`; none if it cannot be read.
fn names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes folders with `files`, and finds the kernels in them.
    fn installed(files: &[&str]) -> (tempfile::TempDir, Installed) {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, b"").unwrap();
        }
        let [boot, modules] = ["boot", "modules"].map(|it| folder.path().join(it));
        let installed = Installed::within(&boot, &modules, "6.1.0-9-amd64".to_owned());
        (folder, installed)
    }

    const FILES: [&str; 7] = [
        "boot/vmlinuz-6.1.0-9-amd64",
        "boot/vmlinuz-6.12.1",
        "boot/vmlinuz-0-rescue-99ffff",
        "boot/vmlinuz",
        "boot/initrd.img-7.0",
        "modules/7.2.13+deb14-amd64/vmlinuz",
        "modules/6.1.0-9-amd64/vmlinuz",
    ];

    fn check(name: &str, expected: Result<&str, &str>) {
        let (folder, installed) = installed(&FILES);
        let found = resolve(Path::new(name), &installed);
        let found = found.map(|path| path.strip_prefix(folder.path()).unwrap_or(&path).to_owned());
        match (found, expected) {
            (Ok(path), Ok(expected)) => assert_eq!(path, Path::new(expected), "{name}"),
            (Err(error), Err(expected)) => assert_eq!(error.to_string(), expected, "{name}"),
            (found, expected) => panic!("{name}: {found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn names_stand_for_installed_kernels() {
        check("latest", Ok("modules/7.2.13+deb14-amd64/vmlinuz"));
        check("host", Ok("boot/vmlinuz-6.1.0-9-amd64"));
        check("6.1", Ok("boot/vmlinuz-6.1.0-9-amd64"));
        check("6", Ok("boot/vmlinuz-6.12.1"));
        check(
            "7.2.13+deb14-amd64",
            Ok("modules/7.2.13+deb14-amd64/vmlinuz"),
        );
        check(
            "6.2",
            Err(
                "6.2 is neither a file nor the version of an installed kernel: there are 7.2.13+deb14-amd64, 6.12.1, \
                 6.1.0-9-amd64",
            ),
        );
        // Files, whether they exist or not.
        for file in ["./latest", "vmlinuz", "/nowhere/6.1", "/proc/version"] {
            check(file, Ok(file));
        }
    }

    #[test]
    fn folders_stand_for_the_kernel_that_was_built_there() {
        let (folder, none) = installed(&[
            "both/arch/x86/boot/bzImage",
            "both/vmlinux",
            "one/vmlinux",
            "modules/6.1/vmlinuz",
            "other/vmlinuz/file",
        ]);
        let resolved = |name: &str| resolve(&folder.path().join(name), &none);
        for (name, file) in [
            ("both", "arch/x86/boot/bzImage"),
            ("one", "vmlinux"),
            ("modules/6.1", "vmlinuz"),
        ] {
            assert_eq!(resolved(name).unwrap(), folder.path().join(name).join(file));
        }
        let error = resolved("other").unwrap_err().to_string();
        assert!(error.contains("make bzImage"), "{error}");
    }

    #[test]
    fn machines_without_kernels_say_so() {
        let (_folder, none) = installed(&["boot/initrd.img-7.0"]);
        let error = |name: &str| resolve(Path::new(name), &none).unwrap_err().to_string();
        let nowhere = "there is none in /boot or /usr/lib/modules";
        assert_eq!(
            error("latest"),
            "no kernel is installed in /boot or /usr/lib/modules; give one with --kernel"
        );
        assert_eq!(
            error("host"),
            format!("the running kernel, 6.1.0-9-amd64, is not installed as a file: {nowhere}")
        );
        assert_eq!(
            error("6.1"),
            format!("6.1 is neither a file nor the version of an installed kernel: {nowhere}")
        );
    }
}
