//! Makes the same calls for kprobe events of the guest's own kernel and for probes from outside.

use std::error::Error;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, Read as _, Seek as _, Write as _};

use crate::{console, files};

const EVENTS: &str = "/sys/kernel/tracing/kprobe_events";
const ENABLE: &str = "/sys/kernel/tracing/events/kprobes/enable";
const TRACE: &str = "/sys/kernel/tracing/trace";
/// The file that the calls read.
const FILE: &str = "/tmp/fetched";
const TEXT: &[u8] = b"what the file says\0 and what is behind it in the file\n";

/// Adds the definitions in `file` as kprobe events of the guest's kernel, `group` lines at a time, and makes the
/// calls. Prints the kernel's trace lines (`K LINE`) and, for each definition that the kernel refuses, its line
/// number (`R LINE`). Then makes the same calls once for each group in each of `rounds` rounds. Each time, first
/// waits for a line on stdin, so that probes from outside can be planted.
pub(crate) fn run(file: &str, group: usize, rounds: usize) -> Result<(), Box<dyn Error>> {
    let definitions = files::read(file)?;
    let definitions: Vec<&str> = definitions.lines().collect();
    let pid = std::process::id();
    println!("pid: {pid}");
    let mut calls = Calls::new()?;
    let groups = definitions.chunks(group.max(1));
    for (number, lines) in groups.clone().enumerate() {
        let mut report = String::new();
        for (line, definition) in lines.iter().enumerate() {
            let mut events = OpenOptions::new()
                .append(true)
                .open(EVENTS)
                .map_err(|error| files::named(EVENTS, &error))?;
            if events.write_all(definition.as_bytes()).is_err() {
                writeln!(report, "R {}", number * group + line)?;
            }
        }
        files::write(ENABLE, "1")?;
        calls.make()?;
        files::write(ENABLE, "0")?;
        let traced = fs::read(TRACE).map_err(|error| files::named(TRACE, &error))?;
        let own = format!("-{pid} ");
        for line in traced.split(|byte| *byte == b'\n') {
            let line = line.escape_ascii().to_string();
            if line.contains(&own) {
                writeln!(report, "K {line}")?;
            }
        }
        files::write(TRACE, "\n")?;
        files::write(EVENTS, "\n")?;
        writeln!(report, "kernel: {number}")?;
        console::print(&report)?;
    }
    let mut input = io::stdin().lock();
    for number in 0..rounds * groups.len() {
        println!("ready: {number}");
        io::stdout().flush()?;
        input.read_line(&mut String::new())?;
        calls.make()?;
        println!("called: {number}");
    }
    Ok(())
}

/// Calls that are the same each time. The file stays open, and the buffer stays at its address. The memory around
/// the buffer stays unchanged, as far as definitions read it.
struct Calls {
    file: File,
    around: Box<[u8]>,
}

/// Number of bytes before and after the buffer that stay unchanged.
const AROUND: usize = 1 << 16;

impl Calls {
    fn new() -> io::Result<Self> {
        fs::write(FILE, TEXT)?;
        Ok(Self {
            file: File::open(FILE)?,
            around: vec![b'.'; 3 * AROUND].into(),
        })
    }

    fn make(&mut self) -> io::Result<()> {
        let into = &mut self.around[AROUND..2 * AROUND];
        into.fill(b'.');
        into[..10].copy_from_slice(b"user text\0");
        self.file.rewind()?;
        self.file.read_exact(&mut into[..TEXT.len()])
    }
}
