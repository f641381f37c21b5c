//! Stock Linux guests in a rig.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use hvprobe_vmm::definition;
use hvprobe_vmm::machine::{
    DEFAULT_CMDLINE, EndReason, Ending, Event, Machine, MachineConfig, ProbeSpec, State,
    Subscription,
};

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

/// A stock guest with `cpus` CPUs that runs `command`.
#[must_use]
pub fn guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        name: "test".to_owned(),
        kernel: guest_file("kernel"),
        initrd: Some(guest_file("initrd.cpio")),
        cmdline: format!("{DEFAULT_CMDLINE} mitigations=off"),
        cpus,
        memory: 256 << 20,
        command: command.iter().map(|&word| word.to_owned()).collect(),
        probes: Vec::new(),
        paused: false,
    }
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
    events: Subscription,
    console: tokio::sync::mpsc::Receiver<Vec<u8>>,
    printed: Vec<u8>,
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
        let events = machine.subscribe(Vec::new(), 1 << 16);
        let (printed, console) = machine.console_subscribe();
        if let Err(error) = machine.resume() {
            panic!("cannot start: {}", chain(&error));
        }
        Self {
            machine,
            events,
            console,
            printed,
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

    /// Waits for `count` more events.
    ///
    /// # Panics
    /// When the guest ends before.
    pub fn wait_for_events(&mut self, count: usize) {
        let mut seen = 0;
        while seen < count {
            match self.events.blocking_next() {
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
        loop {
            let printed = String::from_utf8_lossy(&self.printed).into_owned();
            if printed.contains(text) {
                return printed;
            }
            match self.console.blocking_recv() {
                Some(more) => self.printed.extend(more),
                None => panic!("the guest ended before it printed {text:?}:\n{printed}"),
            }
        }
    }

    /// Waits for the guest to end by itself, whatever became of its events. Returns how it ended
    /// and what it printed.
    #[must_use]
    pub fn end(mut self) -> (Ending, String) {
        while let Some(more) = self.console.blocking_recv() {
            self.printed.extend(more);
        }
        let printed = String::from_utf8_lossy(&self.printed).into_owned();
        (self.machine.wait(), printed)
    }

    /// Waits for the guest to end by itself. Returns how it ended, every event, and what it
    /// printed.
    ///
    /// # Panics
    /// When an event was lost.
    #[must_use]
    pub fn finish(mut self) -> (Ending, Vec<Event>, String) {
        let mut events = Vec::new();
        while let Some(delivery) = self.events.blocking_next() {
            assert_eq!(delivery.dropped, 0, "events were lost");
            events.extend(delivery.events);
        }
        let (ending, printed) = self.end();
        (ending, events, printed)
    }
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
        "WARNING:",
        "BUG:",
        "Oops",
        "rcu_sched",
        "soft lockup",
        "Call Trace",
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
