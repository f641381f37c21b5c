//! Threads that sleep in `nanosleep` while another moves them from CPU to CPU.
//!
//! `__x64_sys_nanosleep` and `hrtimer_nanosleep` are entered once per sleep, and most of these
//! sleeps end on another CPU than they began on.

use std::arch::x86_64::_rdtsc;
use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use crate::rng::Rng;
use crate::sys;

/// How long a nap is.
const NAP: u32 = 10_000_000;

/// `threads` threads sleep `count` times each.
pub(crate) fn run(threads: usize, count: u64) -> Result<(), Box<dyn Error>> {
    let (_, moves) = moved(threads, |stream| sleep(count, stream))?;
    println!("moves: {moves}");
    println!("sleeps: {}", u64::try_from(threads)? * count);
    Ok(())
}

/// `threads` threads sleep ten milliseconds `count` times each, and for no time before each. Prints
/// `nap: THREAD NS TICKS NS TICKS` for each two, in the order of its thread's, by the kernel's monotonic clock and
/// by the time stamp counter: no less than the kernel's function took, and more by the ways into it and out of it.
/// Neither can be trusted alone: where the host's counter is unstable, KVM has the guest's stand still while a
/// virtual CPU waits for a processor, and the clock that is made of it stands still after it ran ahead.
pub(crate) fn naps(threads: usize, count: usize) -> Result<(), Box<dyn Error>> {
    let timed = |ns| {
        let (at, before) = (Instant::now(), ticks());
        sys::nanosleep(ns)?;
        let ticks = ticks().wrapping_sub(before);
        Ok::<_, io::Error>((at.elapsed().as_nanos(), ticks))
    };
    let nap = || Ok((sys::thread_id(), timed(0)?, timed(NAP)?));
    let (naps, _) = moved(threads, |_| {
        (0..count).map(|_| nap()).collect::<io::Result<Vec<_>>>()
    })?;
    for (thread, none, nap) in naps.into_iter().flatten() {
        println!("nap: {thread} {} {} {} {}", none.0, none.1, nap.0, nap.1);
    }
    println!("naps: {}", threads * count);
    Ok(())
}

fn ticks() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and touches no memory.
    unsafe { _rdtsc() }
}

/// Runs `work` in as many threads, each with its number, while they are moved from CPU to CPU. Returns
/// what they return, and how often one was moved.
fn moved<T: Send>(
    threads: usize,
    work: impl Fn(u64) -> io::Result<T> + Sync,
) -> io::Result<(Vec<T>, u64)> {
    let cpus = sys::available_cpus()?;
    let left = AtomicUsize::new(threads);
    let ids: Vec<AtomicI32> = (0..threads).map(|_| AtomicI32::new(0)).collect();
    thread::scope(|scope| {
        let workers: Vec<_> = ids
            .iter()
            .zip(0..)
            .map(|(id, number)| {
                let (left, work) = (&left, &work);
                scope.spawn(move || {
                    id.store(sys::thread_id(), Ordering::Release);
                    let done = work(number);
                    left.fetch_sub(1, Ordering::Release);
                    done
                })
            })
            .collect();
        let moves = keep_moving(&ids, cpus, &left);
        let panicked = |_| io::Error::other("a sleeping thread panicked");
        let done = workers
            .into_iter()
            .map(|worker| worker.join().map_err(panicked)?);
        Ok((done.collect::<io::Result<_>>()?, moves))
    })
}

fn sleep(count: u64, stream: u64) -> io::Result<()> {
    let mut rng = Rng::new(0, stream);
    for _ in 0..count {
        sys::nanosleep(10_000 + rng.below(3_000_000))?;
    }
    Ok(())
}

/// Moves the threads round the CPUs until none is left; returns the number of moves.
fn keep_moving(threads: &[AtomicI32], cpus: usize, left: &AtomicUsize) -> u64 {
    let mut moves = 0;
    let mut cpu = 0;
    while left.load(Ordering::Acquire) > 0 {
        for thread in threads {
            cpu = (cpu + 1) % cpus;
            let id = thread.load(Ordering::Acquire);
            // One that has ended cannot be moved.
            if id != 0 && sys::pin(id, cpu).is_ok() {
                moves += 1;
            }
        }
        cpu += 1;
        sys::moment();
    }
    moves
}

#[cfg(test)]
mod tests {
    #[test]
    fn sleepers_end() {
        super::run(3, 5).unwrap();
        super::naps(2, 3).unwrap();
    }
}
