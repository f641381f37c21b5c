//! A guest's console as text. A wait for text that the guest prints has a deadline.

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use hvprobe_machine::{Console, KernelFile, Machine, MachineConfig};
use hvprobe_spec::chain;
use hvprobe_vm::loader::{LoadError, Room};
use hvprobe_vm::memory::GuestRam;

use crate::progress;

/// The kernels from which guests were booted, with their paths.
static KERNELS: Mutex<Vec<(PathBuf, Arc<KernelFile>)>> = Mutex::new(Vec::new());

/// Memory for which the kernels in [`KERNELS`] are placed, in bytes.
const MEMORY: u64 = 256 << 20;
/// Memory that is left free after them for an initramfs, in bytes.
const FOR_INITRD: usize = 64 << 20;

/// Opens the kernel at `path`, and places it at random in memory as all guests have it that use it.
fn open(path: &Path) -> Result<KernelFile, LoadError> {
    let ram = GuestRam::new(MEMORY).expect("memory for a guest");
    let room = Room {
        ram: &ram,
        initrd: &[&vec![0; FOR_INITRD]],
        cmdline: "",
    };
    let kernel = KernelFile::open(path)?.randomize(room)?;
    // For a failure that depends on it.
    progress::print(format_args!(
        "kernel offset {:#x}",
        kernel.offset().unwrap_or(0)
    ));
    Ok(kernel)
}

/// Returns the kernel at `path`, which has the same random place in all guests of this program: it is read only
/// once.
fn kernel(path: &Path) -> Arc<KernelFile> {
    let mut known = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, file)) = known.iter().find(|(known, _)| known == path) {
        return Arc::clone(file);
    }
    match open(path) {
        Ok(file) => {
            let file = Arc::new(file);
            known.push((path.to_owned(), Arc::clone(&file)));
            file
        }
        Err(error) => panic!("cannot read {}: {}", path.display(), chain(&error)),
    }
}

/// Boots `config`, paused, so that nothing happens before there is a subscriber.
///
/// # Panics
/// When it cannot be booted.
pub(super) fn boot_paused(config: MachineConfig) -> Arc<Machine> {
    let config = MachineConfig {
        paused: true,
        ..config
    };
    let is_placed = !config.cmdline.contains("nokaslr") && config.memory >= MEMORY;
    let booted = match is_placed.then(|| kernel(&config.kernel)) {
        Some(kernel) => Machine::boot_from(config, kernel),
        None => Machine::boot(config),
    };
    match booted {
        Ok(machine) => machine,
        Err(error) => panic!("cannot boot: {}", chain(&error)),
    }
}

/// A guest's console, and what was read from it.
#[derive(Debug)]
pub(super) struct Terminal {
    machine: Arc<Machine>,
    console: Console,
    printed: Text,
}

impl Terminal {
    pub(super) fn of(machine: &Arc<Machine>) -> Self {
        Self {
            machine: Arc::clone(machine),
            console: machine.console(),
            printed: Text::default(),
        }
    }

    /// Returns what was read so far.
    pub(super) fn printed(&self) -> &str {
        &self.printed.whole
    }

    /// Waits until the guest has printed `text`; returns everything it printed.
    ///
    /// # Panics
    /// When the guest ends first.
    pub(super) fn wait_for(&mut self, text: &str) -> String {
        // Start of the text that was not searched yet: a long output must not be searched again for every piece
        // that arrives.
        let mut searched = 0;
        self.wait_printed(|printed| {
            let found = printed[searched..].contains(text);
            searched = printed.floor_char_boundary(printed.len().saturating_sub(text.len()));
            found
        })
    }

    /// Waits until `enough` accepts the guest's output; returns that output.
    ///
    /// # Panics
    /// When the guest ends first.
    pub(super) fn wait_printed(&mut self, mut enough: impl FnMut(&str) -> bool) -> String {
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

    /// Reads until the guest ends.
    pub(super) fn read_to_end(&mut self) {
        while let Some(more) = self.console.blocking_next() {
            self.printed.extend(more.bytes);
        }
    }

    /// Removes the text up to the end of `mark`.
    pub(super) fn forget_before(&mut self, mark: &str) {
        self.printed.forget_before(mark);
    }
}

/// Output of the guest as text; invalid UTF-8 is replaced.
#[derive(Debug, Default)]
struct Text {
    whole: String,
    /// Bytes at the end of the output that may begin a character.
    rest: Vec<u8>,
}

impl Text {
    /// Removes the text up to the end of `mark`.
    fn forget_before(&mut self, mark: &str) {
        if let Some(at) = self.whole.find(mark) {
            self.whole.drain(..at + mark.len());
        }
    }

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

/// Time limit of a wait for a guest. When it is reached, the state of the virtual CPUs is printed and the guest is
/// stopped, so that the test fails. Less than the time that `cargo lab test` allows without output.
const LONG: Duration = Duration::from_secs(80);

/// Prints the state of the virtual CPUs and stops the guest, unless dropped within [`LONG`].
pub(super) struct Quiet(#[expect(dead_code, reason = "ends the watch when dropped")] Sender<()>);

impl Quiet {
    pub(super) fn watch(machine: &Arc<Machine>) -> Self {
        let (over, watched) = channel();
        let machine = Arc::clone(machine);
        thread::spawn(move || {
            if watched.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
                print_standings(&machine);
                machine.stop();
            }
        });
        Self(over)
    }
}

fn print_standings(machine: &Machine) {
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
