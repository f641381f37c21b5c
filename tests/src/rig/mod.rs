//! Stock Linux guests in a rig.

use std::env;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use hvprobe_arch::Gva;
use hvprobe_arch::insn::instruction_len;
use hvprobe_machine::{
    Bounds, Console, DEFAULT_CMDLINE, Delivery, EndReason, Ending, Event, Machine, MachineConfig,
    ProbeId, ProbeInfo, ProbeSpec, Refusals, State, Subscription,
};
use hvprobe_spec::definition;

use crate::wait;

/// The rig the test runs in; `None`, and a line that says so, where there is none.
#[must_use]
pub fn rig(test: &str) -> Option<String> {
    let rig = env::var("HVPROBE_RIG").ok();
    if rig.is_none() {
        eprintln!("skipped: {test} needs a rig (cargo lab test)");
    }
    rig
}

/// How many CPUs the rig has.
#[must_use]
pub fn rig_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn guest_file(name: &str) -> PathBuf {
    let cache = env::var_os("HVPROBE_CACHE").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    cache.join("guest").join(name)
}

/// A command line that makes a boot short in an emulated machine, by what none of the tests is about: the kernel
/// does not test its ciphers, goes without IPv6 and without keys of its own, and on a machine of one CPU does
/// not take the lock prefixes out of its text one by one. About its processor's faults it does what it does by
/// default.
#[must_use]
pub fn mitigated() -> String {
    format!(
        "{DEFAULT_CMDLINE} cryptomgr.notests noreplace-smp ipv6.disable=1 \
         initcall_blacklist=crypto_kdf108_init,cubictcp_register,init_encrypted,init_ima,\
         apparmor_nf_ip_init"
    )
}

/// The same, and nothing is done about the processor's faults.
#[must_use]
pub fn short() -> String {
    mitigated() + " mitigations=off"
}

/// A stock guest with `cpus` CPUs that runs `command`, and in which every probe is a breakpoint.
#[must_use]
pub fn guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        name: "test".to_owned(),
        kernel: guest_file("kernel"),
        initrd: Some(guest_file("initrd.cpio")),
        cmdline: short(),
        cpus,
        memory: 256 << 20,
        command: command.iter().map(|&word| word.to_owned()).collect(),
        probes: Vec::new(),
        refusals: Refusals::Fail,
        paused: false,
        optimize: false,
        bounds: Bounds::default(),
    }
}

/// The same, with jumps where they can be.
#[must_use]
pub fn optimizing_guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        optimize: true,
        ..guest(cpus, command)
    }
}

/// A script that runs `command`, which NMIs may come into that nobody expects, and then prints how many each
/// CPU has had, and what the kernel has logged beside what it always says of such an NMI. The console is not
/// told meanwhile: that takes longer than the NMI.
#[must_use]
pub fn amid_nmis(command: &str) -> String {
    format!(
        "echo -1 >/proc/sys/kernel/printk; dmesg -c >/dev/null; {command}; \
         grep NMI: /proc/interrupts; echo 'log:'; \
         dmesg | grep -vE '\\] (Uhhuh\\. NMI received for unknown reason [0-9a-f]{{2}} on CPU [0-9]+\\.\
         |Do you have a strange power saving mode enabled\\?\
         |Dazed and confused, but trying to continue\
         |INFO: NMI handler .* took too long to run: .*\
         |hrtimer: interrupt took [0-9]+ ns)$'; \
         echo 'end of log'; read line"
    )
}

/// An enabled probe.
///
/// # Panics
/// When `definition` is none.
#[must_use]
pub fn probe(definition: &str) -> ProbeSpec {
    match definition::parse(definition) {
        Ok(definition) => definition.into(),
        Err(error) => panic!("{}: {error}", error.render(definition)),
    }
}

/// A machine that runs, and what it printed.
#[derive(Debug)]
pub struct Running {
    /// The machine.
    pub machine: Arc<Machine>,
    events: Option<Subscription>,
    seen: Vec<Event>,
    console: Console,
    printed: Text,
}

impl Running {
    /// Boots `config`.
    ///
    /// # Panics
    /// When it cannot be booted.
    #[must_use]
    pub fn boot(config: MachineConfig) -> Self {
        // Nothing that happens before there is somebody to hear of it.
        let config = MachineConfig {
            paused: true,
            ..config
        };
        let machine = match Machine::boot(config) {
            Ok(machine) => machine,
            Err(error) => panic!("cannot boot: {}", chain(&error)),
        };
        let events = Some(machine.subscribe(Vec::new(), 1 << 20));
        let console = machine.console();
        if let Err(error) = machine.resume() {
            panic!("cannot start: {}", chain(&error));
        }
        Self {
            machine,
            events,
            seen: Vec::new(),
            console,
            printed: Text::default(),
        }
    }

    /// Waits until probes can be planted.
    ///
    /// # Panics
    /// When the guest ends before.
    pub fn wait_live(&self) {
        let status = self.machine.wait_live();
        assert!(
            !matches!(status.state, State::Stopped(_)),
            "ended while booting: {status:?}"
        );
    }

    /// Wants to hear of no more events: where there are many, and nobody waits for one, to hand them on is
    /// what most of the time would go into.
    pub fn hear_no_more(&mut self) {
        self.events = None;
    }

    fn next_events(&mut self) -> Option<Delivery> {
        let events = self.events.as_mut();
        events.expect("somebody who hears").blocking_next()
    }

    /// Waits for `count` more events.
    ///
    /// # Panics
    /// When the guest ends before, or after [`Running::hear_no_more`].
    pub fn wait_for_events(&mut self, count: usize) {
        let _quiet = Quiet::watch(&self.machine);
        let mut seen = 0;
        while seen < count {
            match self.next_events() {
                Some(delivery) => seen += delivery.events.len(),
                None => panic!("the guest ended after {seen} of {count} events"),
            }
        }
    }

    /// Waits until the guest has printed `text`; returns everything it printed.
    ///
    /// # Panics
    /// When the guest ends before.
    pub fn wait_for(&mut self, text: &str) -> String {
        self.wait_printed(|printed| printed.contains(text))
    }

    /// Waits until what the guest has printed is `enough`; returns it.
    ///
    /// # Panics
    /// When the guest ends before.
    pub fn wait_printed(&mut self, enough: impl Fn(&str) -> bool) -> String {
        let _quiet = Quiet::watch(&self.machine);
        while !enough(&self.printed.whole) {
            match self.console.blocking_next() {
                Some(more) => self.printed.extend(more.bytes),
                None => panic!(
                    "the guest ended too early: {:?}\n{}",
                    self.machine.wait(),
                    self.printed.whole
                ),
            }
        }
        self.printed.whole.clone()
    }

    /// Waits until the events since the start are `enough`; returns them.
    ///
    /// # Panics
    /// When the guest ends before, an event was lost, or after [`Running::hear_no_more`].
    pub fn wait_events(&mut self, enough: impl Fn(&[Event]) -> bool) -> &[Event] {
        let _quiet = Quiet::watch(&self.machine);
        while !enough(&self.seen) {
            let Some(delivery) = self.next_events() else {
                panic!("the guest ended after {} events", self.seen.len());
            };
            assert_eq!(delivery.dropped, 0, "events were lost");
            self.seen.extend(delivery.events);
        }
        &self.seen
    }

    /// Waits until `enough` says so of the machine, which it has to be asked again and again.
    ///
    /// # Panics
    /// When the guest ends before, or after [`wait::LIMIT`].
    pub fn wait_while_running(&mut self, enough: impl Fn(&Machine) -> bool) {
        let since = Instant::now();
        while !enough(&self.machine) {
            let status = self.machine.status();
            if let State::Stopped(_) = status.state {
                let printed = self.wait_printed(|_| false);
                panic!("{printed}");
            }
            assert!(
                since.elapsed() < wait::LIMIT,
                "not within {:?}: {status:?}, {:#?}",
                wait::LIMIT,
                self.machine.probes()
            );
            thread::sleep(wait::PAUSE);
        }
    }

    /// Registers one probe.
    ///
    /// # Panics
    /// When it is refused.
    pub fn register(&self, spec: ProbeSpec) -> ProbeId {
        match self.machine.register(&[spec]) {
            Ok(ids) => ids[0],
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    /// Where `symbol` is.
    ///
    /// # Panics
    /// When the kernel has none or several of that name.
    #[must_use]
    pub fn address(&self, symbol: &str) -> Gva {
        match self.machine.image().symbols().lookup(symbol) {
            Ok(symbol) => symbol.addr,
            Err(error) => panic!("{symbol}: {error}"),
        }
    }

    /// The function named `symbol` as the guest has it now.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn text(&self, symbol: &str) -> Vec<u8> {
        let found = self.machine.image().symbols().lookup(symbol);
        let found = found.unwrap_or_else(|error| panic!("{symbol}: {error}"));
        let mut text = vec![0; usize::try_from(found.size).expect("a function's size")];
        match self.machine.read_kernel(found.addr, &mut text) {
            Ok(()) => text,
            Err(error) => panic!("{symbol}: {}", chain(&error)),
        }
    }

    /// Where the instructions of `symbol` begin, as offsets, as the guest has it now.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn instructions(&self, symbol: &str) -> Vec<u64> {
        let (at, text) = (self.address(symbol), self.text(symbol));
        let mut offsets = vec![0];
        let mut offset = 0;
        while let Some(len) = text.get(offset..).and_then(|code| {
            let here = at.wrapping_add(offset as u64);
            instruction_len(code, here)
        }) {
            offset += len;
            offsets.push(offset as u64);
        }
        offsets
    }

    /// Waits for the guest to end by itself, whatever became of its events. Returns how it ended
    /// and what it printed.
    #[must_use]
    pub fn end(mut self) -> (Ending, String) {
        while let Some(more) = self.console.blocking_next() {
            self.printed.extend(more.bytes);
        }
        (self.machine.wait(), self.printed.whole)
    }

    /// Waits for the guest to end by itself. Returns how it ended, every event, and what it
    /// printed.
    ///
    /// # Panics
    /// When an event was lost.
    #[must_use]
    pub fn finish(mut self) -> (Ending, Vec<Event>, String) {
        let mut events = mem::take(&mut self.seen);
        while let Some(delivery) = self.next_events() {
            assert_eq!(delivery.dropped, 0, "events were lost");
            events.extend(delivery.events);
        }
        let (ending, printed) = self.end();
        (ending, events, printed)
    }
}

/// What was printed, as far as it is text.
#[derive(Debug, Default)]
struct Text {
    whole: String,
    /// What may be the beginning of a character.
    rest: Vec<u8>,
}

impl Text {
    fn extend(&mut self, bytes: Vec<u8>) {
        self.rest.extend(bytes);
        let bytes = mem::take(&mut self.rest);
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.whole.push_str(chunk.valid());
            match chunk.invalid() {
                [] => {}
                rest if chunks.peek().is_none() => self.rest = rest.to_vec(),
                _ => self.whole.push(char::REPLACEMENT_CHARACTER),
            }
        }
    }
}

/// How long a guest is waited for until the log is told where it stands, and it is ended, and the test
/// with it: less than what `cargo lab test` lets pass in silence.
const LONG: Duration = Duration::from_secs(80);

/// Tells the log where the guest stands, and ends it, if this is not dropped for long.
struct Quiet(#[expect(dead_code, reason = "ends the watch when dropped")] Sender<()>);

impl Quiet {
    fn watch(machine: &Arc<Machine>) -> Self {
        let (over, watched) = channel();
        let machine = Arc::clone(machine);
        thread::spawn(move || {
            if watched.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
                tell_standings(&machine);
                machine.stop();
            }
        });
        Self(over)
    }
}

fn tell_standings(machine: &Machine) {
    eprintln!("waited in vain for the guest; {:?}", machine.status());
    match machine.standings() {
        Ok(all) => all.iter().for_each(|cpu| {
            let place = machine.image().symbols().containing(cpu.rip());
            let place = place.map(|(symbol, offset)| format!("{}+{offset:#x}", symbol.name));
            let place = place.unwrap_or_else(|| "outside of the kernel".to_owned());
            eprintln!("rip {} ({place}), rsp {}", cpu.rip(), cpu.rsp());
        }),
        Err(error) => eprintln!("{}", chain(&error)),
    }
}

/// What probe `id` of `machine` is and has counted.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn info(machine: &Machine, id: ProbeId) -> ProbeInfo {
    let found = machine.probes().into_iter().find(|probe| probe.id == id);
    found.unwrap_or_else(|| panic!("no probe {id}"))
}

/// The same of several, at one time and in their order. Each time that the probes are asked for, everything that
/// was recorded by then is handed on first.
///
/// # Panics
/// When there is one that is none.
#[must_use]
pub fn infos(machine: &Machine, ids: &[ProbeId]) -> Vec<ProbeInfo> {
    let all = machine.probes();
    let of = |id: &ProbeId| all.iter().find(|probe| probe.id == *id).cloned();
    let found = ids
        .iter()
        .map(|id| of(id).unwrap_or_else(|| panic!("no probe {id}")));
    found.collect()
}

/// Every `key: value` that was printed with this key, in lines that have come to their end.
///
/// # Panics
/// When a value is not a number.
#[must_use]
pub fn values(printed: &str, key: &str) -> Vec<i64> {
    let values = printed
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
    let number = |value: &str| value.split(' ').next()?.parse().ok();
    values
        .map(|value| number(value).unwrap_or_else(|| panic!("{key}: {value} is no number")))
        .collect()
}

/// Asserts that the guest ran its command with this status and powered off by itself, and that its
/// kernel had nothing to complain about.
///
/// # Panics
/// When it did not.
pub fn assert_clean(ending: &Ending, printed: &str, status: u8) {
    assert_eq!(
        (&ending.reason, ending.guest_status),
        (&EndReason::Shutdown, Some(status)),
        "the guest printed:\n{printed}"
    );
    for complaint in [
        // Not what a driver calls so behind its own name.
        "] WARNING:",
        "BUG:",
        "Oops",
        "stall",
        "soft lockup",
        "Call Trace",
        // What the guest's init says about a log that a quiet console does not show.
        "hvprobe-guest: the kernel complains",
    ] {
        assert!(
            !printed.contains(complaint),
            "the guest printed:\n{printed}"
        );
    }
}

/// An error with its sources, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Tells how far a long test is, past the test runner, which keeps what tests print: one that tells nothing is
/// ended.
pub fn progress(what: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{what}");
}
