//! Bochs with VMX: the slow rig. In it a guest's int3 causes an exit, as on real hardware.
//!
//! Bochs has no way to load a kernel, so the rig boots from a CD with GRUB on it. Bochs starts in its debugger,
//! which reads commands from a file and then from its stdin. Its stdin is empty, for two reasons: the debugger then
//! ends Bochs if it comes up again, and an idle machine does not wait a millisecond for stdin each time it polls.
//! The screen's contents go to a pseudo-terminal that Bochs makes and names on its stderr. The lab must read this
//! pseudo-terminal, because Bochs blocks once it is full.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::emulated::{CMDLINE, Emulator, MESSAGES, Plan, write_config};
use crate::kind::Kind;
use crate::process::{self, Apart, Group, Streams};
use crate::{progress, terminal, tool};

pub(super) struct Bochs;

impl Emulator for Bochs {
    fn kind(&self) -> Kind {
        Kind::Bochs
    }

    fn default_cpus(&self) -> u32 {
        1
    }

    fn default_memory(&self) -> u32 {
        2048
    }

    fn modules(&self) -> &'static [&'static str] {
        &["kvm-intel.ko"]
    }

    fn start(&self, plan: &Plan<'_>) -> Result<(Group, Streams)> {
        if plan.input {
            bail!("rig bochs has no input: its serial port only writes; use tcg");
        }
        progress::step("making the boot CD", || make_cd(plan))?;
        let serial = make_fifo(&plan.folder.join("serial"))?;
        write_config(plan, "bochsrc", &configuration(plan))?;
        write_config(plan, "bochs.rc", "c\n")?;

        let mut command = Command::new("bochs");
        command
            .args(["-q", "-f", "bochsrc", "-rc", "bochs.rc"])
            .current_dir(plan.folder)
            .env("TERM", "linux")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut group = Group::start(&mut command, Apart::Group)?;
        let words = group.child().stderr.take().context("Bochs has no stderr")?;
        let streams = Streams {
            output: Some(serial),
            discard: screen(words, plan.complaints()?),
            keyboard: None,
        };
        Ok((group, streams))
    }
}

/// Maximum time until Bochs names its screen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a thread that copies Bochs' stderr, `words`, into `file` until Bochs ends. Returns Bochs' screen, or
/// `None` if Bochs did not name one in time.
fn screen(words: ChildStderr, mut file: File) -> Option<File> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(words).lines().map_while(Result::ok) {
            if let Some(path) = screen_named(&line) {
                // The receiver is gone if this took too long.
                let _ = sender.send(terminal::screen(Path::new(path)));
            }
            let _ = writeln!(file, "{line}");
        }
    });
    receiver.recv_timeout(PATIENCE).ok()?.ok()
}

/// Returns the path in `Bochs connected to screen "PATH"`.
fn screen_named(line: &str) -> Option<&str> {
    line.strip_prefix("Bochs connected to screen \"")?
        .strip_suffix('"')
}

/// Options for the kernel's timer ticks. The kernel assumes a processor's frequency by its model, which is wrong
/// here: 70 seconds of the timers count as one. With this error, a one-shot timer expires so early that it is set
/// again a hundred times. A periodic timer, which these options select, only ticks too often.
const TICKS: &str = "highres=off nohz=off";

fn configuration(plan: &Plan<'_>) -> String {
    let Plan { cpus, memory, .. } = plan;
    format!(
        "display_library: term\n\
         cpu: model=corei7_skylake_x, count={cpus}, ips=50000000, reset_on_triple_fault=0, \
         ignore_bad_msrs=1\n\
         memory: guest={memory}, host={memory}\n\
         romimage: file=/usr/share/bochs/BIOS-bochs-latest\n\
         vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest\n\
         ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
         ata0-master: type=cdrom, path=cd.iso, status=inserted\n\
         boot: cdrom\n\
         com1: enabled=1, mode=file, dev=serial\n\
         com2: enabled=1, mode=file, dev={MESSAGES}\n\
         log: bochs.log\n\
         panic: action=fatal\n\
         error: action=ignore\n\
         clock: sync=none, time0=local\n"
    )
}

/// Makes `cd.iso` from the plan's kernel and initramfs.
fn make_cd(plan: &Plan<'_>) -> Result<()> {
    let boot = plan.folder.join("cd/boot");
    fs::create_dir_all(boot.join("grub"))?;
    fs::copy(plan.kernel, boot.join("vmlinuz")).context("cannot copy the kernel")?;
    fs::hard_link(plan.initrd, boot.join("initrd"))?;
    let menu = format!(
        "set timeout=0\n\
         menuentry lab {{\n\
         linux /boot/vmlinuz {CMDLINE} nokaslr {TICKS}\n\
         initrd /boot/initrd\n\
         }}\n"
    );
    fs::write(boot.join("grub/grub.cfg"), menu)?;

    let mut command = Command::new("grub-mkrescue");
    process::end_with_us(&mut command);
    command
        .arg("-o")
        .arg(plan.folder.join("cd.iso"))
        .arg(plan.folder.join("cd"));
    tool::run(&mut command).map(drop)
}

/// Creates a named pipe, to which Bochs writes the output of the serial port as to a file, so that it arrives
/// without delay. The pipe is opened for reading and writing, so that opening does not block and the pipe does not
/// end.
fn make_fifo(path: &Path) -> Result<File> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the pointer is to a string that ends with NUL.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        return Err(io::Error::last_os_error())
            .with_context(|| format!("cannot make the pipe {}", path.display()));
    }
    Ok(OpenOptions::new().read(true).write(true).open(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn screen_is_read_from_what_bochs_says() {
        let line = "Bochs connected to screen \"/dev/pts/7\"";
        assert_eq!(screen_named(line), Some("/dev/pts/7"));
        assert_eq!(screen_named("00000000000i[      ] BXSHARE not set."), None);
    }
}
