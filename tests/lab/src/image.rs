//! Contents of the initramfs of guests, and the parts that the rig's initramfs shares with it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::archive::Archive;
use crate::kernel::Kernel;
use crate::needed;

/// Path of busybox from the package busybox-static.
pub(crate) const BUSYBOX: &str = "/bin/busybox";

const GUEST_INIT: &[u8] = include_bytes!("../../guest/init");
/// Programs of a guest, by name, besides busybox and the workload.
const GUEST_SCRIPTS: [(&str, &[u8]); 2] = [
    ("commands", include_bytes!("../../guest/commands")),
    ("complaints", include_bytes!("../../guest/complaints")),
];

/// Mount points and folders that programs expect.
const FOLDERS: [&str; 7] = ["proc", "sys", "tmp", "run", "root", "etc", "usr/bin"];

/// Modules of the guest's kernel that its programs may load, as `/lib/modules/NAME.ko`. Loading `dummy` makes a
/// network device, which runs several functions of the module; the module also has text that runs only when it is
/// loaded or unloaded. Nothing uses `crc-itu-t`.
const GUEST_MODULES: [&str; 2] = ["dummy.ko", "crc-itu-t.ko"];

/// Builds the initramfs of the guests that hvprobe boots. It has modules only if `kernel` is given.
pub(crate) fn guest(workload: &Path, kernel: Option<&Kernel>) -> Result<Vec<u8>> {
    let mut archive = Archive::with_console()?;
    archive.file("init", 0o755, GUEST_INIT)?;
    for (name, script) in GUEST_SCRIPTS {
        archive.file(&format!("bin/{name}"), 0o755, script)?;
    }
    programs(&mut archive, [("workload", workload)])?;
    userland(&mut archive)?;
    if let Some(kernel) = kernel {
        for name in GUEST_MODULES {
            archive.file(&format!("lib/modules/{name}"), 0o644, &kernel.module(name)?)?;
        }
    }
    archive.finish()
}

/// Lists the applets of this machine's busybox, which is also packed for the rig and the guest.
pub(crate) fn applets() -> Result<Vec<String>> {
    let output = Command::new(BUSYBOX)
        .arg("--list")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {BUSYBOX}"))?;
    if !output.status.success() {
        bail!("{BUSYBOX} --list failed");
    }
    Ok(String::from_utf8(output.stdout)?
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Adds busybox with a link for each applet whose name is free, and the usual folders.
pub(crate) fn userland(archive: &mut Archive) -> Result<()> {
    for folder in FOLDERS {
        archive.folder(folder)?;
    }
    archive.copy("bin/busybox", Path::new(BUSYBOX))?;
    for applet in applets()? {
        let name = format!("bin/{applet}");
        if !archive.contains(&name) {
            archive.link(&name, "busybox")?;
        }
    }
    archive.link("sbin", "bin")?;
    Ok(())
}

/// Adds programs under `/bin`, and the shared libraries that they need.
pub(crate) fn programs<'a>(
    archive: &mut Archive,
    programs: impl IntoIterator<Item = (&'a str, &'a Path)>,
) -> Result<()> {
    let mut paths = Vec::new();
    for (name, path) in programs {
        let lean = Lean::of(path)?;
        let contents = std::fs::read(lean.path())
            .with_context(|| format!("cannot read {}", path.display()))?;
        archive.file(&format!("bin/{name}"), 0o755, &contents)?;
        paths.push(path);
    }
    for (name, source) in needed::closure(paths)? {
        let name = name.trim_start_matches('/');
        if !archive.contains(name) {
            archive.copy(name, &source)?;
        }
    }
    Ok(())
}

/// A program without its debug information. The debug information would be most of the size, and an emulated
/// machine would have to load it.
enum Lean {
    Stripped(tempfile::NamedTempFile),
    AsIs(PathBuf),
}

impl Lean {
    fn of(program: &Path) -> Result<Self> {
        let file = tempfile::NamedTempFile::new()?;
        let stripped = Command::new("strip")
            .args(["--strip-debug", "-o"])
            .arg(file.path())
            .arg(program)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        Ok(if stripped {
            Self::Stripped(file)
        } else {
            // There are no binutils, or this is a script. The program is then packed as it is: larger, but it runs.
            Self::AsIs(program.to_path_buf())
        })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Stripped(file) => file.path(),
            Self::AsIs(path) => path,
        }
    }
}
