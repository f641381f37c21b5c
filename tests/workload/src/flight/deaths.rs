//! Tasks that die with calls in flight.
//!
//! In each round a process has several threads, all blocked in `pipe_read`. In even rounds it is
//! killed; in odd ones one of its threads ends the whole process by `exit_group`. A killed thread
//! comes back out of `pipe_read` and dies in `get_signal`, which never returns; the thread that
//! ends its process dies in `__x64_sys_exit_group`.

use std::error::Error;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::{fs, thread};

use libc::c_int;

use crate::child::{Child, End};
use crate::sys;

const STATUS: c_int = 3;

/// Runs `rounds` rounds of a process with `threads` threads besides its first one. Prints the number of tasks that
/// died in `get_signal`, of tasks that called `exit_group`, and of reads that were begun on pipes.
pub(crate) fn run(rounds: u64, threads: usize) -> Result<(), Box<dyn Error>> {
    if threads == 0 {
        return Err("a process to die needs a thread beside its first".into());
    }
    let (mut killed, mut exited, mut reads) = (0, 0, 0);
    for round in 0..rounds {
        let by_exit = round % 2 == 1;
        // Nothing is written to the first pipe. Each thread writes to the second one just before it blocks. A
        // byte in the third one asks one thread to exit.
        let (never, (mut ready, announce), (asked, mut ask)) =
            (io::pipe()?, io::pipe()?, io::pipe()?);
        let child = Child::start(|| live(threads, &never.0, &announce, &asked))?;
        drop((announce, asked));
        for _ in 0..=threads {
            ready.read_exact(&mut [0])?;
        }
        wait_asleep(&child, threads + 1)?;
        // For each task, this process reads one byte, and the task itself begins one read.
        let tasks = u64::try_from(threads)? + 1;
        reads += 2 * tasks;
        let expected = if by_exit {
            ask.write_all(&[0])?;
            killed += tasks - 1;
            exited += 1;
            End::Exited(STATUS)
        } else {
            child.kill()?;
            killed += tasks;
            End::Killed(libc::SIGKILL)
        };
        let end = child.end()?;
        if end != expected {
            return Err(format!("round {round}: {end:?}, not {expected:?}").into());
        }
    }
    println!("killed: {killed}");
    println!("exited: {exited}");
    println!("pipe_read: {reads}");
    Ok(())
}

/// Runs all threads of the process that is going to die.
fn live(
    threads: usize,
    never: &PipeReader,
    announce: &PipeWriter,
    asked: &PipeReader,
) -> io::Result<()> {
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| block(announce, never));
        }
        scope.spawn(|| {
            if block(announce, asked).is_ok() {
                sys::exit(STATUS);
            }
        });
        block(announce, never)
    })
}

fn block(mut announce: &PipeWriter, mut pipe: &PipeReader) -> io::Result<()> {
    announce.write_all(&[1])?;
    pipe.read_exact(&mut [0])
}

/// Waits until all `tasks` threads of `child` sleep. They have written their bytes, so they can sleep only in their
/// reads.
fn wait_asleep(child: &Child, tasks: usize) -> io::Result<()> {
    loop {
        let mut asleep = 0;
        for task in fs::read_dir(format!("/proc/{}/task", child.pid()))? {
            let stat = fs::read_to_string(task?.path().join("stat"))?;
            asleep += usize::from(state(&stat) == Some('S'));
        }
        if asleep == tasks {
            return Ok(());
        }
        sys::moment();
    }
}

/// Returns the state in a line of `/proc/PID/stat`. The name before the state may contain any characters.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_found_behind_any_name() {
        assert_eq!(state("12 (a) R b) S 1 12"), Some('S'));
        assert_eq!(state("12 cut off"), None);
    }

    #[test]
    fn processes_die_as_planned() {
        run(2, 3).unwrap();
    }
}
