//! Common part of the emulated rigs: packs the images, boots the machine, reads its output, and ends it.
//!
//! Each run has a work folder under the target folder, and two logs beside it, one for each serial port of the rig:
//! the first has the output of the steps and the marks, the second the messages of the rig's kernel. The folder is
//! removed at the end of the run; the logs stay if anything failed. The emulator is ended as soon as the last mark
//! is read.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result};

use super::console::Console;
use super::image;
use crate::job::{Job, Stdio};
use crate::kind::Kind;
use crate::outcome::{Finish, Listener, Outcome, stood_still};
use crate::process::{self, End, Group, Limits, Streams};
use crate::progress::{self, Waiting};
use crate::setup::Ready;
use crate::signals::Signals;
use crate::terminal::Keyboard;

/// An emulator that can boot the rig's kernel and initramfs.
pub(super) trait Emulator {
    fn kind(&self) -> Kind;

    fn default_cpus(&self) -> u32;

    /// Returns the default memory of the rig, in MiB.
    fn default_memory(&self) -> u32;

    /// Returns KVM's modules with their parameters. The modules that they depend on need not be listed.
    fn modules(&self) -> &'static [&'static str];

    /// Returns the modules of the emulator's network card with their parameters, or `None` if it has no card.
    fn network(&self) -> Option<&'static [&'static str]> {
        None
    }

    /// Starts the emulator.
    fn start(&self, plan: &Plan<'_>) -> Result<(Group, Streams)>;
}

/// Machine that an emulator boots.
pub(super) struct Plan<'a> {
    pub(super) kernel: &'a Path,
    pub(super) initrd: &'a Path,
    pub(super) cpus: u32,
    /// Memory in MiB.
    pub(super) memory: u32,
    /// TCP port of this machine that leads to the same port of the booted one.
    pub(super) forward: Option<u16>,
    /// Folder for the emulator's own files.
    pub(super) folder: &'a Path,
    /// Whether the rig needs input at its serial port.
    pub(super) input: bool,
}

impl Plan<'_> {
    /// Creates the file for the error messages of the emulator itself.
    pub(super) fn complaints(&self) -> Result<File> {
        Ok(File::create(self.folder.join(COMPLAINTS))?)
    }
}

const COMPLAINTS: &str = "stderr";

/// File in the plan's folder with the output of the second serial port: the kernel's messages.
pub(super) const MESSAGES: &str = "messages";

/// Command line of the rig's kernel. The console is the second serial port, so that messages of the kernel cannot
/// land in a step's output or inside a mark. The rate is set because Bochs is as slow as a real line of that rate.
/// Warnings and more severe messages are printed.
pub(super) const CMDLINE: &str = "console=ttyS1,115200 panic=-1 mitigations=off loglevel=5";

/// Number of lines that are shown of the kernel's messages if the rig broke or the time limit passed.
const TAIL: usize = 20;

pub(super) fn run(
    emulator: &dyn Emulator,
    ready: &Ready,
    job: &Job,
    listener: &mut dyn Listener,
) -> Result<Outcome> {
    let limits = Limits {
        deadline: Instant::now() + job.timeout,
        silence: job.silence,
    };
    let kind = emulator.kind().name();
    // Take the signals before the thread of the spinner starts, which inherits the signal mask.
    let signals = Signals::take()?;

    let labs = ready.workspace.target.join("lab");
    fs::create_dir_all(&labs).with_context(|| format!("cannot create {}", labs.display()))?;
    let folder = tempfile::Builder::new()
        .prefix(&format!("{kind}-"))
        .disable_cleanup(job.keep)
        .tempdir_in(&labs)?;
    let log_path = folder.path().with_extension("log");
    let log =
        File::create(&log_path).with_context(|| format!("cannot create {}", log_path.display()))?;

    let nonce = nonce();
    let initrd = folder.path().join("initrd.cpio");
    let mut modules = emulator.modules().to_vec();
    if job.forward.is_some() {
        modules.extend(emulator.network().context("this rig has no network")?);
    }
    let bytes = image::rig(ready, job, &modules, &nonce)?;
    fs::write(&initrd, bytes).with_context(|| format!("cannot write {}", initrd.display()))?;

    let plan = Plan {
        kernel: ready.kernel.image(),
        initrd: &initrd,
        cpus: job.cpus.unwrap_or(emulator.default_cpus()),
        memory: job.memory.unwrap_or(emulator.default_memory()),
        forward: job.forward,
        folder: folder.path(),
        input: job.stdio == Stdio::Interactive,
    };
    let booting = format!(
        "booting rig {kind}: {} {}, {} MiB",
        plan.cpus,
        if plan.cpus == 1 { "CPU" } else { "CPUs" },
        plan.memory
    );
    let booting = Waiting::start(&booting);
    let mut console = Console::new(&nonce, job.steps.len(), log, listener, booting.clone());
    let (mut group, mut streams) = emulator.start(&plan)?;
    if plan.input {
        streams.keyboard = Some(Keyboard::open()?);
    }
    let end = process::watch(&mut group, &mut streams, limits, &signals, &mut console);
    booting.finish();
    // These restore the terminal and end the emulator, before anything is printed about it.
    drop(streams);
    drop(group);

    let messages = folder.path().join(MESSAGES);
    let finish = match end? {
        End::Stopped => console.finish.take().unwrap_or(Finish::Complete),
        End::TimedOut => Finish::TimedOut,
        End::Silent | End::Overdue => Finish::Broken(stood_still("the rig", job.silence)),
        End::Interrupted(signal) => Finish::Interrupted(signal),
        End::Exited(status) => Finish::Broken(post_mortem(
            &format!("the emulator ended early ({status})"),
            &read(&messages),
            &read(&folder.path().join(COMPLAINTS)),
        )),
    };
    if let Finish::Broken(_) | Finish::TimedOut = finish {
        show_last_words(&read(&messages));
    }
    let statuses = std::mem::take(&mut console.statuses);
    let good = finish == Finish::Complete && statuses.iter().all(|status| *status == Some(0));
    // Errors are ignored: the files may have been removed meanwhile, which is no failure of the job.
    if good && !job.keep {
        let _ = fs::remove_file(&log_path);
    } else {
        let _ = fs::copy(&messages, log_path.with_extension("kernel.log"));
    }
    if job.keep {
        progress::note(&format!("images kept in {}", folder.path().display()));
    }
    Ok(Outcome {
        statuses,
        finish,
        log: (!good || job.keep).then_some(log_path),
    })
}

/// Returns a string that distinguishes this run's marks from those of any other.
fn nonce() -> String {
    let time = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos());
    format!("{:x}-{time:x}", std::process::id())
}

/// Reads a log as text. A log that cannot be read counts as empty.
fn read(log: &Path) -> String {
    String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
}

/// Returns why the emulator ended: the panic of the rig's kernel if there was one, or else `default` with the
/// emulator's last error message.
fn post_mortem(default: &str, messages: &str, complaints: &str) -> String {
    if let Some(line) = messages.lines().rfind(|line| line.contains("Kernel panic")) {
        return format!("the rig's kernel panicked: {}", line.trim());
    }
    match complaints.lines().rfind(|line| !line.trim().is_empty()) {
        Some(line) => format!("{default}: {}", line.trim()),
        None => default.to_owned(),
    }
}

/// Shows the end of the kernel's messages.
fn show_last_words(messages: &str) {
    let lines: Vec<&str> = messages.lines().collect();
    let tail = &lines[lines.len().saturating_sub(TAIL)..];
    progress::note(if tail.is_empty() {
        "the rig's kernel said nothing"
    } else {
        "the rig's kernel said last:"
    });
    for line in tail {
        eprintln!("    {}", line.trim_end());
    }
}

/// Writes a file of the emulator's configuration into the plan's folder.
pub(super) fn write_config(plan: &Plan<'_>, name: &str, text: &str) -> Result<()> {
    let path = plan.folder.join(name);
    File::create(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn post_mortem_prefers_the_panic_to_the_emulators_words() {
        let complaints = "qemu: no memory\n\n";
        assert_eq!(post_mortem("ended", "", ""), "ended");
        assert_eq!(
            post_mortem("ended", "", complaints),
            "ended: qemu: no memory"
        );
        let messages = "[ 1.0] Kernel panic - not syncing: x\r\nrebooting\r\n";
        assert_eq!(
            post_mortem("ended", messages, complaints),
            "the rig's kernel panicked: [ 1.0] Kernel panic - not syncing: x"
        );
    }
}
