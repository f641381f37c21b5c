//! Pairs of processes that pass a byte back and forth through two pipes.
//!
//! Nearly every read blocks until the other process has written. `pipe_read` and `pipe_write` are
//! entered once per read and write; the processes move to another CPU now and then.

use std::error::Error;
use std::io::{self, PipeReader, PipeWriter, Read, Write};

use crate::child::Child;
use crate::sys;

/// Number of rounds between two moves of a process.
const STAY: u64 = 16;

/// Runs `pairs` pairs of processes. Each pair exchanges a byte `count` times, there and back.
pub(crate) fn run(pairs: usize, count: u64) -> Result<(), Box<dyn Error>> {
    let cpus = sys::available_cpus()?;
    let mut children = Vec::new();
    for pair in 0..pairs {
        let (there, here) = (io::pipe()?, io::pipe()?);
        for first in [true, false] {
            let (from, to) = if first {
                (&here.0, &there.1)
            } else {
                (&there.0, &here.1)
            };
            children.push(Child::start(|| {
                let start = pair + usize::from(first);
                play(from, to, first, count, start, cpus)
            })?);
        }
    }
    for child in children {
        child.end()?.succeeded()?;
    }
    let crossings = 2 * count * u64::try_from(pairs)?;
    println!("reads: {crossings}");
    println!("writes: {crossings}");
    Ok(())
}

fn play(
    mut from: &PipeReader,
    mut to: &PipeWriter,
    first: bool,
    count: u64,
    mut cpu: usize,
    cpus: usize,
) -> io::Result<()> {
    for round in 0..count {
        if round % STAY == 0 {
            cpu += 1;
            sys::pin(0, cpu % cpus)?;
        }
        let ball = round.to_le_bytes()[0];
        if first {
            to.write_all(&[ball])?;
        }
        let mut byte = [!ball];
        from.read_exact(&mut byte)?;
        if byte != [ball] {
            return Err(io::Error::other("another byte came back"));
        }
        if !first {
            to.write_all(&[ball])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn pairs_end() {
        super::run(2, 40).unwrap();
    }
}
