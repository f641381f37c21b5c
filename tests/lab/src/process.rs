//! Child processes that end with the lab.
//!
//! A [`Group`] is a child, usually in a process group of its own. Dropping a [`Group`] kills its processes. While a
//! group is watched, SIGINT, SIGTERM and SIGHUP do not end the lab but are events. If the lab itself is killed, the
//! kernel kills the child. The kernel also kills the child when the thread that started it ends, so a group has to
//! be dropped before that.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::signals::{self, Signals};
use crate::terminal::Keyboard;

/// Maximum time for a program to end after it has been asked to.
const GRACE: Duration = Duration::from_secs(10);

/// Returns the number of processors that the lab may use.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Makes the kernel kill the process of `command` when the thread that starts it ends.
pub(crate) fn end_with_us(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec the closure makes only async-signal-safe calls, prctl and getppid, and an error
    // from a number or a constant.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call of prctl.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(ErrorKind::BrokenPipe.into());
            }
            Ok(())
        });
    }
}

/// How a child is set apart from the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Apart {
    /// A process group of its own.
    Group,
    /// The lab's own group, so that the child may use the lab's terminal. Then only the child itself ends with the
    /// lab, and not the processes that it started.
    No,
}

/// A child and the processes that it started.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    apart: Apart,
    reaped: bool,
}

impl Group {
    pub(crate) fn start(command: &mut Command, apart: Apart) -> Result<Self> {
        end_with_us(command);
        // SAFETY: signal, sigemptyset and sigprocmask are async-signal-safe and touch a local set.
        unsafe {
            command.pre_exec(signals::reset);
        }
        match apart {
            Apart::Group => {
                command.process_group(0);
            }
            Apart::No => {}
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        Ok(Self {
            child,
            apart,
            reaped: false,
        })
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns the id of the group, which is that of the child.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends `signal` to the group.
    fn signal(&self, signal: i32) {
        let Ok(process) = i32::try_from(self.child.id()) else {
            return;
        };
        let target = match self.apart {
            Apart::No => process,
            Apart::Group => -process,
        };
        // SAFETY: kill touches no memory, and the number is the child's as long as it is not reaped, which
        // callers ensure.
        unsafe { libc::kill(target, signal) };
    }

    /// Kills what is left of the group and collects the child's status.
    fn end(&mut self) -> io::Result<ExitStatus> {
        if !self.reaped && self.apart != Apart::No {
            self.signal(libc::SIGKILL);
        }
        self.reaped = true;
        self.child.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.reaped {
            self.signal(libc::SIGKILL);
            let _ = self.end();
        }
    }
}

/// How watching a group ended. Unless the child exited, the group may still run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The child exited.
    Exited(ExitStatus),
    /// The audience wants no more output.
    Stopped,
    /// The deadline passed.
    TimedOut,
    /// The group printed nothing for the maximum time that it may be silent.
    Silent,
    /// The audience's own deadline passed.
    Overdue,
    /// The lab received this signal.
    Interrupted(i32),
}

/// Limits for watching a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) deadline: Instant,
    /// Maximum time without output; `None` for no limit.
    pub(crate) silence: Option<Duration>,
}

/// Receiver of a group's output.
pub(crate) trait Audience {
    /// Takes bytes of the output. `Break` ends the watch.
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>>;

    /// Returns the audience's own deadline, if it has one. The deadline may change with each output.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Returns whether the group is ready for input. While it is not, no input is read.
    fn wants_input(&self) -> bool {
        true
    }
}

/// Streams of a group that are watched.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Output for the audience.
    pub(crate) output: Option<File>,
    /// Output that is read and dropped, so that its writer does not block.
    pub(crate) discard: Option<File>,
    /// Input for the child's stdin.
    pub(crate) keyboard: Option<Keyboard>,
}

/// Passes output and input on. Returns when the child exits, the audience ends the watch, one of the `limits` or
/// the audience's deadline is reached, a signal arrives, or the user leaves.
pub(crate) fn watch(
    group: &mut Group,
    streams: &mut Streams,
    limits: Limits,
    signals: &Signals,
    audience: &mut dyn Audience,
) -> Result<End> {
    let exit = exit_event(&group.child)?;
    let mut stdin = group.child.stdin.take();
    let mut buffer = vec![0; 64 << 10];
    let mut heard = Instant::now();
    loop {
        let left = limits.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(End::TimedOut);
        }
        let patience = limits
            .silence
            .map_or(left, |silence| silence.saturating_sub(heard.elapsed()));
        let patience = audience.deadline().map_or(patience, |deadline| {
            patience.min(deadline.saturating_duration_since(Instant::now()))
        });
        let keyboard = streams
            .keyboard
            .as_ref()
            .filter(|_| audience.wants_input())
            .map(|keyboard| keyboard.as_fd().as_raw_fd());
        let [
            output_ready,
            discard_ready,
            exit_ready,
            signal_ready,
            keyboard_ready,
        ] = poll(
            [
                streams.output.as_ref().map(AsRawFd::as_raw_fd),
                streams.discard.as_ref().map(AsRawFd::as_raw_fd),
                Some(exit.as_raw_fd()),
                Some(signals.as_fd().as_raw_fd()),
                keyboard,
            ],
            left.min(patience),
        )?;
        if signal_ready {
            return Ok(End::Interrupted(signals.next()?));
        }
        if discard_ready && take(&mut streams.discard, &mut buffer)? == 0 {
            streams.discard = None;
        }
        if output_ready {
            heard = Instant::now();
            let length = take(&mut streams.output, &mut buffer)?;
            if length == 0 {
                streams.output = None;
            } else if audience.output(&buffer[..length])?.is_break() {
                return Ok(End::Stopped);
            }
        }
        if keyboard_ready && let Some(keyboard) = &mut streams.keyboard {
            match keyboard.read(&mut buffer)? {
                Some(bytes) => {
                    if let Some(stdin) = &mut stdin {
                        stdin.write_all(bytes)?;
                    }
                    if keyboard.ended() {
                        streams.keyboard = None;
                    }
                }
                None => return Ok(End::Interrupted(libc::SIGINT)),
            }
        }
        // First pass on the output that was written before the exit.
        if exit_ready && !output_ready {
            return Ok(End::Exited(group.end()?));
        }
        // Check these limits after the streams: if the lab itself was stopped for a while, output may be waiting.
        let late = |deadline| Instant::now() >= deadline;
        if !output_ready && audience.deadline().is_some_and(late) {
            return Ok(End::Overdue);
        }
        if limits
            .silence
            .is_some_and(|silence| heard.elapsed() >= silence)
        {
            return Ok(End::Silent);
        }
    }
}

/// Runs `command` without input until it exits, or until one of the `limits` or a signal ends it. The audience gets
/// the stdout of the command and, if `both`, its stderr.
pub(crate) fn run(
    command: &mut Command,
    both: bool,
    limits: Limits,
    audience: &mut dyn Audience,
) -> Result<End> {
    let signals = Signals::take()?;
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null());
    if both {
        command.stderr(writer.try_clone()?);
    }
    command.stdout(writer);
    let mut group = Group::start(command, Apart::Group)?;
    // Close the copies of the pipe's write end that `command` holds, so that the pipe ends with its writers.
    command.stdout(Stdio::null());
    if both {
        command.stderr(Stdio::null());
    }
    let mut streams = Streams {
        output: Some(File::from(OwnedFd::from(reader))),
        discard: None,
        keyboard: None,
    };
    let end = watch(&mut group, &mut streams, limits, &signals, audience)?;
    let signal = match end {
        End::TimedOut => libc::SIGTERM,
        End::Interrupted(signal) => signal,
        _ => return Ok(end),
    };
    wind_down(&mut group, signal, &mut streams, &signals, audience)?;
    Ok(end)
}

/// Sends `signal` to the group, and waits up to [`GRACE`] until the group ends. Passes its last output on. Another
/// signal to the lab ends the wait at once.
pub(crate) fn wind_down(
    group: &mut Group,
    signal: i32,
    streams: &mut Streams,
    signals: &Signals,
    audience: &mut dyn Audience,
) -> Result<End> {
    group.signal(signal);
    let limits = Limits {
        deadline: Instant::now() + GRACE,
        silence: None,
    };
    watch(group, streams, limits, signals, audience)
}

/// Reads what is available. Returns 0 if the stream has ended, which is so when all its writers are gone.
fn take(stream: &mut Option<File>, buffer: &mut [u8]) -> io::Result<usize> {
    let Some(stream) = stream else {
        return Ok(0);
    };
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Reading a pseudo-terminal returns EIO once its other side is closed.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(0),
            result => return result,
        }
    }
}

/// Returns a descriptor that becomes readable when the child exits.
fn exit_event(child: &Child) -> Result<OwnedFd> {
    let process = libc::c_long::from(child.id());
    // SAFETY: pidfd_open takes two integers and touches no memory.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error()).context("cannot watch a child process");
    }
    let descriptor = i32::try_from(descriptor).context("descriptor out of range")?;
    // SAFETY: the descriptor is new and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Waits up to `limit` until one of the descriptors has something to read, or its other side is gone. Returns for
/// each descriptor whether that is so.
fn poll<const N: usize>(descriptors: [Option<i32>; N], limit: Duration) -> Result<[bool; N]> {
    // poll ignores negative descriptors.
    let mut entries = descriptors.map(|descriptor| libc::pollfd {
        fd: descriptor.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    });
    // Rounded up, so that the deadline has passed when the wait ends.
    let milliseconds = i32::try_from(limit.as_millis() + 1).unwrap_or(i32::MAX);
    let count = libc::nfds_t::try_from(N)?;
    // SAFETY: the pointer and the count describe `entries`.
    let result = unsafe { libc::poll(entries.as_mut_ptr(), count, milliseconds) };
    if result < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error).context("cannot wait for a child process");
        }
        return Ok([false; N]);
    }
    Ok(entries.map(|entry| entry.revents != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Stdio;

    /// Collects output and stops at a NUL.
    #[derive(Default)]
    struct Collect(Vec<u8>);

    impl Audience for Collect {
        fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
            self.0.extend_from_slice(bytes);
            Ok(if bytes.contains(&0) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            })
        }
    }

    fn run(script: &str, limit: Duration) -> (End, String, Group) {
        let limits = Limits {
            deadline: Instant::now() + limit,
            silence: None,
        };
        run_within(script, limits)
    }

    fn run_within(script: &str, limits: Limits) -> (End, String, Group) {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command.stdout(Stdio::piped());
        let mut group = Group::start(&mut command, Apart::Group).unwrap();
        let mut streams = Streams {
            output: Some(File::from(OwnedFd::from(
                group.child().stdout.take().unwrap(),
            ))),
            discard: None,
            keyboard: None,
        };
        let mut collect = Collect::default();
        let signals = Signals::take().unwrap();
        let end = watch(&mut group, &mut streams, limits, &signals, &mut collect).unwrap();
        (end, String::from_utf8(collect.0).unwrap(), group)
    }

    fn alive(process: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{}/stat", process.trim()))
            .is_ok_and(|stat| !stat.contains(") Z "))
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn exit_status_comes_after_all_output() {
        let (end, output, _group) = run("seq 100000; exit 7", LONG);
        let End::Exited(status) = end else {
            panic!("{end:?}");
        };
        assert_eq!(status.code(), Some(7));
        assert!(output.ends_with("\n99999\n100000\n"));
    }

    #[test]
    fn deadline_ends_the_watch_and_dropping_kills_grandchildren() {
        let (end, output, group) = run("sleep 1000 & echo $!; wait", Duration::from_millis(500));
        assert_eq!(end, End::TimedOut);
        assert!(alive(&output));
        drop(group);
        // The kernel has sent the signal; the process may take a moment to go.
        let limit = Instant::now() + Duration::from_secs(10);
        while alive(&output) && Instant::now() < limit {
            std::thread::yield_now();
        }
        assert!(!alive(&output));
    }

    #[test]
    fn silence_ends_the_watch_and_output_puts_it_off() {
        let limits = Limits {
            deadline: Instant::now() + LONG,
            // Longer than one pause, even on a busy machine, and shorter than all pauses together.
            silence: Some(Duration::from_secs(4)),
        };
        let script = "for i in 1 2 3 4 5; do echo $i; sleep 1; done; exec sleep 1000";
        let (end, output, _group) = run_within(script, limits);
        assert_eq!((end, output.as_str()), (End::Silent, "1\n2\n3\n4\n5\n"));
    }

    #[test]
    fn audience_can_stop_the_watch() {
        let (end, output, _group) = run(r"printf 'a\000'; sleep 1000", LONG);
        assert_eq!((end, output.as_str()), (End::Stopped, "a\0"));
    }

    #[test]
    fn child_starts_with_no_signal_blocked() {
        let _signals = Signals::take().unwrap();
        let (_, output, _group) = run("grep SigBlk /proc/self/status", LONG);
        assert_eq!(output, "SigBlk:\t0000000000000000\n");
    }

    #[test]
    fn missing_program_is_named() {
        let error = Group::start(&mut Command::new("no-such-program"), Apart::Group).unwrap_err();
        assert_eq!(error.to_string(), "cannot start no-such-program");
    }
}
