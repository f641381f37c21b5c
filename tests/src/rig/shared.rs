//! Guests that the tests of one program use one after another, because booting a guest takes most of a test's
//! time.
//!
//! ```text
//!   (none) ──boot──► leased, runs a command ──give_back──► free, paused ──take──► leased
//!                       └── the test failed, or the guest is not restored ──► stopped
//! ```
//! A guest is leased to one test at a time. A free guest is paused, so it takes no processor from others. A
//! guest is freed only in the state in which it was taken: the command has ended, no probe is registered, and
//! the kernel's text has the bytes that it had after the boot, except where the kernel itself rewrites them. So
//! no test can depend on, or suffer from, an earlier one; which tests ran in the same guest before is not
//! specified.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use hvprobe_arch::Gva;
use hvprobe_machine::{Machine, MachineConfig, ProbeId, Refusals, State};
use hvprobe_spec::chain;

use super::terminal::{Terminal, boot_paused};
use crate::wait;

/// Program in the guest's image that runs commands (`tests/guest/commands`).
const COMMANDS: &str = "commands";
/// Line that [`COMMANDS`] prints when it is ready for the first command.
const READY: &str = "hvprobe-guest: takes commands";
/// Maximum length of a typed line in bytes. It is a little less than the longest line that a terminal takes
/// (`N_TTY_BUF_SIZE`).
const LONGEST: usize = 4000;

/// Number of bytes of kernel text that are read at a time.
const PIECE: usize = 64 << 10;

/// Free guests.
static FREE: Mutex<Vec<Guest>> = Mutex::new(Vec::new());

/// A guest that runs commands.
#[derive(Debug)]
struct Guest {
    machine: Arc<Machine>,
    /// Configuration with which the guest was booted.
    config: MachineConfig,
    text_at: Gva,
    /// The kernel's text after the boot.
    text: Vec<u8>,
    /// Number of commands that the guest was given.
    commands: u64,
}

/// Exclusive use of a guest, until the test ends.
#[derive(Debug)]
pub(super) struct Lease(Guest);

/// Prefix of the line that the guest prints when a command has ended.
#[derive(Debug)]
pub(super) struct Ends(String);

impl Lease {
    /// Takes a free guest that matches `config`, or boots one.
    pub(super) fn take(config: &MachineConfig) -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let like = free.iter().position(|guest| guest.is_like(config));
        let found = like.map(|at| free.swap_remove(at));
        drop(free);
        let mut guest = match found {
            Some(guest) => guest.woken(),
            None => Guest::boot(config),
        };
        guest.commands += 1;
        Self(guest)
    }

    pub(super) fn machine(&self) -> &Arc<Machine> {
        &self.0.machine
    }

    /// Plants the probes of `config` and starts its command. Returns the line that the guest prints when the
    /// command begins.
    pub(super) fn start(&self, config: &MachineConfig) -> String {
        let Guest {
            machine, commands, ..
        } = &self.0;
        if let Err(error) = machine.set_optimization(config.optimize) {
            panic!("{}", chain(&error));
        }
        if let Err(error) = machine.register_batch(&config.probes, config.refusals) {
            panic!("{}", chain(&error));
        }
        let begins = format!("hvprobe-guest: command {commands} begins");
        let command = quoted(&config.command);
        self.0
            .type_line(&format!("echo '{begins}'; {command}; over {commands} $?"));
        begins
    }

    pub(super) fn ends(&self) -> Ends {
        let commands = self.0.commands;
        Ends(format!("hvprobe-guest: command {commands} ended with "))
    }

    /// Frees the guest. `printed` is the output that the test has read.
    ///
    /// # Panics
    /// When the guest is not in the state in which it was taken, unless the test has failed already.
    pub(super) fn give_back(self, printed: &str) {
        let ends = self.ends();
        let Self(guest) = self;
        if let State::Stopped(_) = guest.machine.status().state {
            return;
        }
        if thread::panicking() {
            guest.machine.stop();
            return;
        }
        let left = match ends.status(printed) {
            Some(_) => guest.tidy_up(),
            None => Err("the test has not waited for the end of its command".to_owned()),
        };
        let left = left.and_then(|()| guest.machine.pause().map_err(|error| chain(&error)));
        if let Err(left) = left {
            guest.machine.stop();
            panic!("{left}");
        }
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(guest);
    }
}

impl Ends {
    /// Returns the status of the command, if `printed` has the line of its end.
    pub(super) fn status(&self, printed: &str) -> Option<u8> {
        let (_, rest) = printed.split_once(&self.0)?;
        rest.split_once(['\r', '\n'])?.0.parse().ok()
    }
}

impl Guest {
    fn boot(config: &MachineConfig) -> Self {
        let config = MachineConfig {
            command: vec![COMMANDS.to_owned()],
            probes: Vec::new(),
            refusals: Refusals::Fail,
            ..config.clone()
        };
        let machine = boot_paused(config.clone());
        let mut console = Terminal::of(&machine);
        if let Err(error) = machine.resume() {
            panic!("cannot start: {}", chain(&error));
        }
        console.wait_for(READY);
        let address = |symbol: &str| match machine.image().symbols().lookup(symbol) {
            Ok(symbol) => symbol.addr,
            Err(error) => panic!("{symbol}: {error}"),
        };
        let (text_at, end) = (address("_stext"), address("_etext"));
        let size = usize::try_from(end.0 - text_at.0).expect("text fits memory");
        let mut text = vec![0; size];
        if let Err(error) = machine.read_kernel(text_at, &mut text) {
            panic!("the kernel's text: {}", chain(&error));
        }
        Self {
            machine,
            config,
            text_at,
            text,
            commands: 0,
        }
    }

    fn woken(self) -> Self {
        if let Err(error) = self.machine.resume() {
            panic!("a free guest: {}", chain(&error));
        }
        self
    }

    fn is_like(&self, wanted: &MachineConfig) -> bool {
        let own = &self.config;
        (own.cpus, own.memory, own.bounds) == (wanted.cpus, wanted.memory, wanted.bounds)
            && own.cmdline == wanted.cmdline
            && (&own.kernel, &own.initrd) == (&wanted.kernel, &wanted.initrd)
    }

    /// Types `line` and a newline, as fast as the guest takes it.
    fn type_line(&self, line: &str) {
        assert!(
            line.len() < LONGEST,
            "{} bytes are too long for a line: the test needs a guest of its own",
            line.len()
        );
        let line = format!("{line}\n");
        let mut rest = line.as_bytes();
        wait::until(
            "room for console input",
            || {
                rest = &rest[self.machine.console_input(rest)..];
                rest.len()
            },
            |left| *left == 0,
        );
    }

    /// Unregisters the probes that the test left. Fails if anything else in the guest differs from the state in
    /// which the test took it.
    fn tidy_up(&self) -> Result<(), String> {
        let machine = &self.machine;
        if !machine.armed() {
            return Err("the test has left the global switch off".to_owned());
        }
        let ids: Vec<ProbeId> = machine.probes().iter().map(|probe| probe.id).collect();
        machine.unregister(&ids).map_err(|error| chain(&error))?;
        // The guest removes its own kprobes and tracers with a delay.
        let changed = wait::until(
            "text as it was",
            || self.changed(),
            |changed| !matches!(changed, Ok(changed) if !changed.is_empty()),
        );
        changed.map(drop)
    }

    /// Returns places where the kernel's text has changed, at most eight. Leaves out those that the kernel itself
    /// rewrites.
    fn changed(&self) -> Result<Vec<String>, String> {
        let mut changed = Vec::new();
        let mut now = vec![0; PIECE];
        let mut at = self.text_at;
        for before in self.text.chunks(PIECE) {
            let now = &mut now[..before.len()];
            let read = self.machine.read_kernel(at, now);
            read.map_err(|error| chain(&error))?;
            // Compares whole pieces first, because nearly all of them are unchanged.
            if now != before {
                let bytes = (0..).zip(now.iter().zip(before));
                let others = bytes.filter(|(_, (now, before))| now != before);
                changed.extend(others.map(|(offset, _)| at.wrapping_add(offset)));
            }
            at = at.wrapping_add(PIECE as u64);
        }
        let image = self.machine.image();
        let ours = changed.into_iter();
        let ours = ours.filter(|at| image.forbidden(*at).is_none()).take(8);
        let name = |at: Gva| match image.symbols().containing(at) {
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => at.to_string(),
        };
        Ok(ours.map(name).collect())
    }
}

/// Quotes `command` for a shell. The result is a single line, even if words contain newlines.
fn quoted(command: &[String]) -> String {
    let mut line = String::new();
    for word in command {
        line.push_str(" $'");
        for letter in word.chars() {
            match letter {
                '\'' | '\\' => line.extend(['\\', letter]),
                // A terminal would interpret it.
                letter if letter.is_control() => {
                    let _ = write!(line, "\\{:03o}", u32::from(letter));
                }
                letter => line.push(letter),
            }
        }
        line.push('\'');
    }
    line.trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_quoted_in_one_line() {
        let command = ["sh", "-c", "echo 'a\\b'\nread go\t\"$x\""].map(str::to_owned);
        let line = quoted(&command);
        assert_eq!(line, r#"$'sh' $'-c' $'echo \'a\\b\'\012read go\011"$x"'"#);
    }

    #[test]
    fn the_end_of_a_command_is_a_whole_line_with_its_number() {
        let ends = Ends("hvprobe-guest: command 2 ended with ".to_owned());
        for unfinished in [
            "",
            "hvprobe-guest: command 1 ended with 0\r\n",
            "hvprobe-guest: command 2 ended with 1",
        ] {
            assert_eq!(ends.status(unfinished), None, "{unfinished:?}");
        }
        let printed = "ready\r\nhvprobe-guest: command 2 ended with 17\r\n";
        assert_eq!(ends.status(printed), Some(17));
    }
}
