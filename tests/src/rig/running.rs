//! A guest that runs a test's command, with its events and output.
//!
//! ```text
//!   Running::boot ───► a guest of its own, which ends with the command
//!   Running::shared ─► a command in a guest that the tests of this program share ([`super::shared`])
//! ```
//! Both are used alike: the events and the output are those since the command began.

use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::instruction_len;
use hvprobe_machine::{
    Delivery, EndReason, Ending, Event, Machine, MachineConfig, ProbeId, ProbeSpec, State,
    Subscription,
};
use hvprobe_spec::chain;

use super::shared::Lease;
use super::terminal::{Quiet, Terminal, boot_paused};
use crate::wait;

/// A running machine, with its events and output.
#[derive(Debug)]
pub struct Running {
    /// The machine.
    pub machine: Arc<Machine>,
    events: Option<Subscription>,
    seen: Vec<Event>,
    console: Terminal,
    /// Lease of a guest that other tests also use; `None` if the guest is this test's own.
    lease: Option<Lease>,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Reason for the guest's end; `None` if the guest is shared and keeps running.
    pub reason: Option<EndReason>,
    /// The exit status of the command, if the guest reported it.
    pub guest_status: Option<u8>,
}

impl From<Ending> for Ended {
    fn from(ending: Ending) -> Self {
        Self {
            reason: Some(ending.reason),
            guest_status: ending.guest_status,
        }
    }
}

impl Running {
    /// Boots `config`.
    ///
    /// # Panics
    /// When it cannot be booted.
    #[must_use]
    pub fn boot(config: MachineConfig) -> Self {
        let machine = boot_paused(config);
        let events = Some(machine.subscribe(Vec::new(), 1 << 20));
        let console = Terminal::of(&machine);
        if let Err(error) = machine.resume() {
            panic!("cannot start: {}", chain(&error));
        }
        Self {
            machine,
            events,
            seen: Vec::new(),
            console,
            lease: None,
        }
    }

    /// Runs the command of `config` in a shared guest that matches `config`. The probes of `config` are planted
    /// before the command starts. When the returned value is dropped, the guest must be in the state in which it
    /// was taken, apart from probes that are still registered.
    ///
    /// # Panics
    /// When no such guest is free and none can be booted, a probe is refused, or the command is too long for a
    /// line of a terminal.
    #[must_use]
    pub fn shared(config: &MachineConfig) -> Self {
        let lease = Lease::take(config);
        let machine = Arc::clone(lease.machine());
        let mut running = Self {
            events: Some(machine.subscribe(Vec::new(), 1 << 20)),
            seen: Vec::new(),
            console: Terminal::of(&machine),
            machine,
            lease: None,
        };
        // The console replays the output of earlier commands as well.
        let begins = lease.start(config);
        running.wait_for(&begins);
        running.console.forget_before(&begins);
        running.lease = Some(lease);
        running
    }

    /// Waits until probes can be planted.
    ///
    /// # Panics
    /// When the guest ends first.
    pub fn wait_live(&self) {
        let status = self.machine.wait_live();
        assert!(
            !matches!(status.state, State::Stopped(_)),
            "ended while booting: {status:?}"
        );
    }

    /// Ends the subscription to events. Meant for tests that cause many events but wait for none: delivering the
    /// events would take most of their time.
    pub fn hear_no_more(&mut self) {
        self.events = None;
    }

    /// Discards the events that have arrived, so that they never fill the memory of a long test.
    ///
    /// # Panics
    /// When an event was lost, or after [`Running::hear_no_more`].
    pub fn forget_events(&mut self) {
        self.seen.clear();
        let events = self.events.as_mut().expect("somebody who hears");
        while let Some(delivery) = events.try_next() {
            assert_eq!(delivery.dropped, 0, "events were lost");
        }
    }

    fn next_events(&mut self) -> Option<Delivery> {
        let events = self.events.as_mut();
        events.expect("somebody who hears").blocking_next()
    }

    /// Waits for `count` more events, and discards them.
    ///
    /// # Panics
    /// When the guest ends first, or after [`Running::hear_no_more`].
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
    /// When the guest ends first.
    pub fn wait_for(&mut self, text: &str) -> String {
        self.console.wait_for(text)
    }

    /// Waits until `enough` accepts the guest's output; returns that output.
    ///
    /// # Panics
    /// When the guest ends first.
    pub fn wait_printed(&mut self, enough: impl FnMut(&str) -> bool) -> String {
        self.console.wait_printed(enough)
    }

    /// Waits until `enough` accepts the events since the start, except discarded ones; returns these events.
    ///
    /// # Panics
    /// When the guest ends first, an event was lost, or after [`Running::hear_no_more`].
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

    /// Polls the machine until `enough` accepts it.
    ///
    /// # Panics
    /// When the guest ends first, or after [`wait::LIMIT`].
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
    /// When the probe is refused.
    pub fn register(&self, spec: ProbeSpec) -> ProbeId {
        match self.machine.register(&[spec]) {
            Ok(ids) => ids[0],
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    /// Returns the address of `symbol`.
    ///
    /// # Panics
    /// When the kernel has no symbol of that name, or several.
    #[must_use]
    pub fn address(&self, symbol: &str) -> Gva {
        match self.machine.image().symbols().lookup(symbol) {
            Ok(symbol) => symbol.addr,
            Err(error) => panic!("{symbol}: {error}"),
        }
    }

    /// Returns the current text of the function `symbol` in the guest.
    ///
    /// # Panics
    /// When the text cannot be read.
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

    /// Returns the offsets of the instructions of `symbol` in its current text, followed by the offset after
    /// the last one.
    ///
    /// # Panics
    /// When the text cannot be read.
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

    /// Waits until the command has ended and, if the guest is not shared, until the guest has ended. Ignores lost
    /// events. Returns how the command ended, and the guest's output.
    ///
    /// # Panics
    /// When a shared guest ends.
    #[must_use]
    pub fn end(&mut self) -> (Ended, String) {
        let ended = match &self.lease {
            Some(lease) => {
                let ends = lease.ends();
                let printed = self.wait_printed(|printed| ends.status(printed).is_some());
                Ended {
                    reason: None,
                    guest_status: ends.status(&printed),
                }
            }
            None => {
                self.console.read_to_end();
                self.machine.wait().into()
            }
        };
        (ended, self.console.printed().to_owned())
    }

    /// Does the same as [`Running::end`] and also returns the events since the start, except discarded ones.
    ///
    /// # Panics
    /// When an event was lost, a shared guest ends, or after [`Running::hear_no_more`].
    #[must_use]
    pub fn finish(&mut self) -> (Ended, Vec<Event>, String) {
        let mut events = mem::take(&mut self.seen);
        let mut keep = |delivery: Delivery| {
            assert_eq!(delivery.dropped, 0, "events were lost");
            events.extend(delivery.events);
        };
        if self.lease.is_none() {
            while let Some(delivery) = self.next_events() {
                keep(delivery);
            }
        }
        let (ended, printed) = self.end();
        if self.lease.is_some() {
            assert!(self.machine.flush_events(), "events are not handed on");
            let waiting = self.events.as_mut().expect("somebody who hears");
            while let Some(delivery) = waiting.try_next() {
                keep(delivery);
            }
        }
        (ended, events, printed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back(self.console.printed());
        }
    }
}
