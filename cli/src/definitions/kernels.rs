//! Kernels by name: those that are installed on this machine, that of a build tree, or a file.
//!
//! Invariants: the words `latest` and `host` come before files, which are given with a slash if they are called so
//! (`./latest`). Files and folders come before versions. A version that is the whole name of an installed kernel
//! stands for that kernel, whichever others begin with it.

mod version;

use std::borrow::Cow;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::system::uname;

/// Maximum number of versions that an error lists.
const LISTED: usize = 5;

/// Files of a folder that may be its kernel: what the kernel's build leaves in its tree, and what distributions put
/// beside a kernel's modules.
const IN_FOLDER: [&str; 3] = ["arch/x86/boot/bzImage", "vmlinux", "vmlinuz"];

/// Words in the names of files that are no kernels of their own: rescue copies, and what package managers and
/// `make install` leave of former ones.
const LEFTOVERS: [&str; 5] = ["rescue", ".old", ".bak", ".dpkg-", ".rpm"];

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

/// Returns the name of the kernel at `path` for messages: the name of the file, with that of its folder if the file
/// is called as all others are.
pub(crate) fn shown(path: &Path) -> Cow<'_, str> {
    let file = path.file_name().unwrap_or(path.as_os_str());
    let folder = path.parent().and_then(Path::file_name);
    match folder.filter(|_| file == "vmlinuz") {
        Some(folder) => format!("{}/{}", folder.display(), file.display()).into(),
        None => file.to_string_lossy(),
    }
}

fn resolve(name: &Path, installed: &Installed) -> anyhow::Result<PathBuf> {
    match name.to_str() {
        Some("latest") => installed.newest(),
        Some("host") => installed.running(),
        _ if name.is_dir() => of_folder(name),
        Some(text) if !text.contains('/') && !name.exists() => installed.of_version(text),
        // That a file does not exist is reported when it is opened.
        _ => Ok(name.to_owned()),
    }
}

/// Returns the kernel that was built or installed in `folder`.
pub(crate) fn of_folder(folder: &Path) -> anyhow::Result<PathBuf> {
    let files = IN_FOLDER.map(|file| folder.join(file));
    let found = files.into_iter().find(|file| file.is_file());
    found.with_context(|| {
        let [image, vmlinux, installed] = IN_FOLDER;
        format!(
            "the folder {} has no kernel, neither {image} nor {vmlinux} nor {installed}: give a kernel's file, or \
             the folder in which it was built (`make bzImage`)",
            folder.display()
        )
    })
}

/// The installed kernels, the newest first.
#[derive(Debug)]
struct Installed {
    /// Versions and files.
    kernels: Vec<(String, PathBuf)>,
    /// Version of the running kernel.
    running: String,
    /// Folders that exist but cannot be read.
    unread: Vec<String>,
}

impl Installed {
    fn of_this_machine() -> Self {
        let running = uname().release().to_string_lossy().into_owned();
        Self::within(Path::new("/boot"), Path::new("/usr/lib/modules"), running)
    }

    /// Finds the kernels in `boot`, and beside their modules, which are in folders of `modules`.
    fn within(boot: &Path, modules: &Path, running: String) -> Self {
        let mut unread = Vec::new();
        let in_boot = names(boot, &mut unread).into_iter().filter_map(|name| {
            let version = name.strip_prefix("vmlinuz-")?;
            Some((version.to_owned(), boot.join(&name)))
        });
        let beside_modules = names(modules, &mut unread).into_iter().map(|version| {
            let path = modules.join(&version).join("vmlinuz");
            (version, path)
        });
        let is_leftover = |version: &str| LEFTOVERS.iter().any(|word| version.contains(word));
        let mut kernels: Vec<_> = in_boot
            .chain(beside_modules)
            .filter(|(version, path)| !is_leftover(version) && path.is_file())
            .collect();
        // Of one version, the kernel in `boot` stays first.
        kernels.sort_by(|(one, _), (other, _)| version::compare(other, one));
        Self {
            kernels,
            running,
            unread,
        }
    }

    fn newest(&self) -> anyhow::Result<PathBuf> {
        match self.first(|_| true) {
            Some(kernel) => kernel,
            None => bail!("{}", self.listed()),
        }
    }

    fn running(&self) -> anyhow::Result<PathBuf> {
        match self.first(|version| version == self.running) {
            Some(kernel) => kernel,
            None => bail!(
                "the running kernel, {}, is not installed as a file: {}",
                self.running,
                self.listed()
            ),
        }
    }

    fn of_version(&self, wanted: &str) -> anyhow::Result<PathBuf> {
        let exact = self.first(|version| version == wanted);
        let is_number = wanted.starts_with(|first: char| first.is_ascii_digit());
        let newest = || self.first(|version| is_number && version::is_of(wanted, version));
        match exact.or_else(newest) {
            Some(kernel) => kernel,
            None => bail!(
                "{wanted} is neither a file nor the version of an installed kernel: {}",
                self.listed()
            ),
        }
    }

    /// Returns the newest kernel whose version `is_wanted`, and that can be read; `None` if no version is wanted.
    ///
    /// # Errors
    /// When none of those can be read.
    fn first(&self, is_wanted: impl Fn(&str) -> bool) -> Option<anyhow::Result<PathBuf>> {
        let wanted = || {
            self.kernels
                .iter()
                .filter(|(version, _)| is_wanted(version))
        };
        let (_, first) = wanted().next()?;
        let readable = wanted().find(|(_, path)| File::open(path).is_ok());
        Some(match readable {
            Some((_, path)) => Ok(path.clone()),
            None => Err(anyhow::anyhow!(
                "{} cannot be read: try as root, or give the file of another kernel",
                first.display()
            )),
        })
    }

    /// Returns which versions there are, for errors.
    fn listed(&self) -> String {
        let mut versions: Vec<&str> = self.kernels.iter().map(|(it, _)| it.as_str()).collect();
        versions.dedup();
        let more = if versions.len() > LISTED { ", …" } else { "" };
        versions.truncate(LISTED);
        match &versions[..] {
            [] if !self.unread.is_empty() => self.unread.join("; "),
            [] => "no kernel is installed in /boot or /usr/lib/modules; give the file of one"
                .to_owned(),
            [one] => format!("there is only {one}"),
            some => format!("there are {}{more}", some.join(", ")),
        }
    }
}

/// Returns the names in `folder`. Adds the reason to `unread` if there is a folder that cannot be read.
fn names(folder: &Path, unread: &mut Vec<String>) -> Vec<String> {
    match fs::read_dir(folder) {
        Ok(entries) => {
            let names = entries
                .flatten()
                .map(|entry| entry.file_name().into_string());
            names.filter_map(Result::ok).collect()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            unread.push(format!("cannot look into {}: {error}", folder.display()));
            Vec::new()
        }
    }
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

    const FILES: [&str; 14] = [
        "boot/vmlinuz-6.1.0-9-amd64",
        "boot/vmlinuz-6.12.1",
        "boot/vmlinuz-6.12.1.old",
        "boot/vmlinuz-6.12.1-debug",
        "boot/vmlinuz-6.12.1.dpkg-new",
        "boot/vmlinuz-8.0-rescue-99ffff",
        "boot/vmlinuz-linux",
        "boot/vmlinuz-9.9/file",
        "boot/vmlinuz",
        "boot/initrd.img-7.0",
        "modules/7.2.13+deb14-amd64/vmlinuz",
        "modules/7.2.13~rc1+deb14-amd64/vmlinuz",
        "modules/6.1.0-9-amd64/vmlinuz",
        "modules/9.9/modules.dep",
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
        check("6", Ok("boot/vmlinuz-6.12.1-debug"));
        check("6.12.1", Ok("boot/vmlinuz-6.12.1"));
        check("linux", Ok("boot/vmlinuz-linux"));
        check(
            "7.2.13+deb14-amd64",
            Ok("modules/7.2.13+deb14-amd64/vmlinuz"),
        );
        check(
            "6.2",
            Err(
                "6.2 is neither a file nor the version of an installed kernel: there are 7.2.13+deb14-amd64, \
                 7.2.13~rc1+deb14-amd64, 6.12.1-debug, 6.12.1, 6.1.0-9-amd64, …",
            ),
        );
        let lates = "lates is neither a file nor the version of an installed kernel: there are ";
        let installed = installed(&FILES).1;
        let error = resolve(Path::new("lates"), &installed).unwrap_err();
        assert!(error.to_string().starts_with(lates), "{error}");
        // Files, whether they exist or not.
        for file in ["./latest", "./vmlinuz", "/nowhere/6.1", "/proc/version"] {
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
        let nowhere = "no kernel is installed in /boot or /usr/lib/modules; give the file of one";
        assert_eq!(error("latest"), nowhere);
        assert_eq!(
            error("host"),
            format!("the running kernel, 6.1.0-9-amd64, is not installed as a file: {nowhere}")
        );
        assert_eq!(
            error("6.1"),
            format!("6.1 is neither a file nor the version of an installed kernel: {nowhere}")
        );
        // Even root cannot list a file as a folder.
        let (folder, _) = installed(&["boot"]);
        let boot = folder.path().join("boot");
        let unread = Installed::within(&boot, &folder.path().join("modules"), String::new());
        let error = resolve(Path::new("latest"), &unread)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("cannot look into {}", boot.display())),
            "{error}"
        );
    }

    #[test]
    fn kernels_beside_their_modules_are_shown_with_their_version() {
        for (path, name) in [
            ("/usr/lib/modules/6.1/vmlinuz", "6.1/vmlinuz"),
            ("/boot/vmlinuz-6.1", "vmlinuz-6.1"),
            ("/src/linux/arch/x86/boot/bzImage", "bzImage"),
        ] {
            assert_eq!(shown(Path::new(path)), name);
        }
    }
}
