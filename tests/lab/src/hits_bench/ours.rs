//! hvprobe's side of the comparison: one machine, in which the mechanisms are measured one after another.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hvprobe_lab::measure::running::Running;
use hvprobe_lab::measure::stream::Lines;

use crate::exits::{Counter, Counts};
use crate::guest::{Console, Ticks};

const MACHINE: &str = "hits";
const CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 pci=off mitigations=off nokaslr";
/// Time limit for two waits: until the server listens, and until a jump becomes possible.
const PATIENCE: Duration = Duration::from_secs(60);
/// Text in the error of a jump that is refused only for now, because the guest's kernel is changing its own
/// kprobes.
const CHANGES: &str = "changing its own kprobes";

/// A probe that reads memory or filters, and the guest's own event with the same definition. Both are named as
/// their rows.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) name: &'static str,
    pub(crate) own: &'static str,
    /// Arguments and filter, as written after the function in the definition.
    pub(crate) words: &'static str,
}

/// Work that a program in the guest repeats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Name of the call in `workload help`.
    pub(crate) call: &'static str,
    pub(crate) calls: u32,
    /// The function that is probed.
    pub(crate) function: &'static str,
    /// Arguments to record, as written after the function in the definition. If empty, the default ones are
    /// recorded.
    pub(crate) recorded: &'static str,
}

/// A mechanism: its name in the table, the kind of hit whose instructions are counted for it (if any), and the
/// arguments of `hvprobe probe add`. In the arguments, `{}` stands for the function and the arguments to record.
#[derive(Debug)]
pub(crate) struct Mechanism {
    pub(crate) name: &'static str,
    pub(crate) counted_as: Option<&'static str>,
    add: &'static [&'static str],
}

pub(crate) const EMULATED: Mechanism = Mechanism {
    name: "kprobe, emulated",
    counted_as: Some("emulated"),
    add: &["--mechanism", "emulated", "p {}"],
};

pub(crate) const OPTIMIZED: Mechanism = Mechanism {
    name: "kprobe, optimized",
    counted_as: None,
    add: &["--mechanism", "optimized", "p {}"],
};

pub(crate) const WITH_STACK: Mechanism = Mechanism {
    name: "kprobe, optimized, with the stack",
    counted_as: None,
    add: &["--mechanism", "optimized", "--stack", "p {}"],
};

pub(crate) const MECHANISMS: [Mechanism; 12] = [
    EMULATED,
    Mechanism {
        name: "kprobe, boosted",
        counted_as: Some("boosted"),
        add: &["--mechanism", "boosted", "p {}"],
    },
    Mechanism {
        name: "kprobe, stepped",
        counted_as: None,
        add: &["--mechanism", "stepped", "p {}"],
    },
    Mechanism {
        name: "kprobe with post-handler, emulated",
        counted_as: Some("emulated-post"),
        add: &["--mechanism", "emulated", "--post", "p {}"],
    },
    Mechanism {
        name: "kprobe with post-handler, stepped",
        counted_as: Some("stepped"),
        add: &["--mechanism", "stepped", "--post", "p {}"],
    },
    Mechanism {
        name: "return probe",
        counted_as: Some("followed"),
        add: &["--mechanism", "emulated", "r {}"],
    },
    Mechanism {
        name: "kprobe + return probe",
        counted_as: None,
        add: &["--mechanism", "emulated", "p {}", "r {}"],
    },
    // With `auto` the number of this probe's instances grows. Stubs, which the other return probes have, do not
    // allow that, so this probe exits at the return.
    Mechanism {
        name: "return probe, exit at the return",
        counted_as: Some("returned"),
        add: &["--mechanism", "emulated", "--maxactive", "auto", "r {}"],
    },
    OPTIMIZED,
    WITH_STACK,
    Mechanism {
        name: "return probe, optimized",
        counted_as: None,
        add: &["--mechanism", "optimized", "r {}"],
    },
    Mechanism {
        name: "kprobe + return probe, optimized",
        counted_as: None,
        add: &["--mechanism", "optimized", "p {}", "r {}"],
    },
];

/// Ticks of a loop, and its counts if counting was on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loop {
    pub(crate) ticks: Ticks,
    pub(crate) counts: Counts,
}

/// A machine with a shell on its console. Its server has no other machine.
#[derive(Debug)]
pub(crate) struct Machine {
    console: Console,
    server: Server,
    /// Present while exits and ioctls are counted.
    counter: Option<Counter>,
}

impl Machine {
    /// Boots the guest in the folder `guest`. `patience` is the time limit for each answer of its shell.
    pub(crate) fn boot(guest: &Path, patience: Duration) -> Result<Self> {
        let server = Server::start()?;
        let (kernel, initrd) = (guest.join("kernel"), guest.join("initrd.cpio"));
        server.ask([
            OsStr::new("vm"),
            OsStr::new("boot"),
            OsStr::new("--name"),
            OsStr::new(MACHINE),
            OsStr::new("--cmdline"),
            OsStr::new(CMDLINE),
            OsStr::new("--kernel"),
            kernel.as_os_str(),
            OsStr::new("--initrd"),
            initrd.as_os_str(),
        ])?;
        let mut console = server.command();
        let console = Console::open(console.args(["vm", "console", MACHINE]), patience)
            .map_err(|error| anyhow!("{error:#}\n{}", server.standing()))?;
        Ok(Self {
            console,
            server,
            counter: None,
        })
    }

    /// Turns the counting of exits and ioctls on or off. Counting slows the loops. Turn it on only once: the kernel
    /// of an emulated rig does not survive frequent patching of its text.
    pub(crate) fn count(&mut self, on: bool) -> Result<()> {
        self.counter = on.then(Counter::start).transpose()?;
        Ok(())
    }

    /// Measures a loop that does nothing but leave and re-enter the guest, `calls` times.
    pub(crate) fn exit(&mut self, calls: u32) -> Result<Loop> {
        self.measure(&format!("out {calls}"))
    }

    /// Measures the loop without hvprobe's probes. If `own` names probes of the guest's kernel (see `workload
    /// help`), measures it with these.
    pub(crate) fn bare(&mut self, work: &Work, own: Option<&str>) -> Result<Loop> {
        let Work { call, calls, .. } = work;
        self.measure(&match own {
            Some(probes) => format!("{call} {calls} {probes}"),
            None => format!("{call} {calls}"),
        })
    }

    /// Checks that a probe can be added at `place`: adds a disabled one and removes it.
    pub(crate) fn try_probe(&self, place: &str) -> Result<()> {
        let definition = format!("p {place}");
        let add = ["probe", "add", "--vm", MACHINE, "--disabled", &definition];
        self.server.ask(add)?;
        self.server
            .ask(["probe", "remove", "--vm", MACHINE, "--all"])
    }

    /// Measures the loop with hvprobe's probes at its function.
    pub(crate) fn probed(&mut self, work: &Work, mechanism: &Mechanism) -> Result<Loop> {
        let definition = format!("{} {}", work.function, work.recorded);
        let words = mechanism.add.iter();
        let words: Vec<String> = words
            .map(|word| word.replace("{}", definition.trim_end()))
            .collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.with_probes(work, &words)
    }

    /// Measures the loop with the probes that `hvprobe probe add` adds, with `words` as its arguments. Then removes
    /// the probes.
    fn with_probes(&mut self, work: &Work, words: &[&str]) -> Result<Loop> {
        let mut add = vec!["probe", "add", "--vm", MACHINE];
        add.extend(words);
        // After the removal of its own probes, the guest's kernel still changes its text for a while. Only another
        // try shows whether it has finished.
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.server.ask(&add) {
            if !error.to_string().contains(CHANGES) || Instant::now() >= deadline {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(100));
        }
        let measured = self.bare(work, None);
        self.server
            .ask(["probe", "remove", "--vm", MACHINE, "--all"])?;
        measured
    }

    /// Measures the loop with an optimized probe at its function. `words` follow the function in the definition.
    pub(crate) fn fetched(&mut self, work: &Work, words: &str) -> Result<Loop> {
        let definition = format!("p {} {words}", work.function);
        self.with_probes(work, &["--mechanism", "optimized", &definition])
    }

    fn measure(&mut self, words: &str) -> Result<Loop> {
        let read = |counter: &Option<Counter>| counter.as_ref().map(Counter::read).transpose();
        let before = read(&self.counter)?.unwrap_or_default();
        let ticks = self.console.tsc_loop(words).map_err(|error| {
            let standing = self.server.standing();
            anyhow!("workload tsc-loop {words}: {error:#}\n{standing}")
        })?;
        let counts = read(&self.counter)?.unwrap_or_default().since(before);
        Ok(Loop { ticks, counts })
    }
}

/// A running `hvprobe serve`, which is killed when this is dropped.
#[derive(Debug)]
struct Server {
    _program: Running,
    socket: PathBuf,
    _folder: tempfile::TempDir,
    words: Lines,
}

impl Server {
    fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("socket");
        let mut program = Command::new("hvprobe")
            .arg("serve")
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start hvprobe")?;
        let words = Lines::of(program.stderr.take().context("no stderr")?);
        let listens = words.wait_for("listening on", PATIENCE);
        let server = Self {
            _program: Running(program),
            socket,
            _folder: folder,
            words,
        };
        listens.context("hvprobe serve does not listen")?;
        Ok(server)
    }

    /// Returns a command of `hvprobe` as a client of this server.
    fn command(&self) -> Command {
        let mut command = Command::new("hvprobe");
        command.env("HVPROBE_SOCKET", &self.socket);
        command
    }

    fn ask(&self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<()> {
        let output = self.command().args(words).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            bail!("{}\n{}", words.trim(), self.standing());
        }
        Ok(())
    }

    /// Describes the state of the machine, or how it ended, and the server's last lines.
    fn standing(&self) -> String {
        let list = self.command().args(["vm", "list"]).output();
        let list = list.map_or_else(
            |error| format!("its state cannot be read: {error}"),
            |list| String::from_utf8_lossy(&list.stdout).trim().to_owned(),
        );
        let said = self.words.tail().join("\n  ");
        format!("the machine:\n  {list}\nthe server said:\n  {said}\n")
    }
}
