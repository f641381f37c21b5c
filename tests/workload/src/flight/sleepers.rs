//! Threads that sleep in `nanosleep` while another thread moves them from CPU to CPU.
//!
//! `__x64_sys_nanosleep` and `hrtimer_nanosleep` are entered once per sleep, and most of these
//! sleeps end on another CPU than they began on.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::own_calls::OwnCalls;
use crate::pit::{self, Pit};
use crate::rng::Rng;
use crate::sys;

/// Duration of a nap in nanoseconds.
const NAP: u32 = 10_000_000;
/// The function that the system call runs just before `hrtimer_nanosleep`.
const BEFORE: &str = "get_timespec64";
/// The function in which `hrtimer_nanosleep` sleeps, and which does little else.
const SLEEP: &str = "do_nanosleep";

/// Runs `threads` threads that sleep `count` times each.
pub(crate) fn run(threads: usize, count: u64) -> Result<(), Box<dyn Error>> {
    let (_, moves) = moved(threads, |stream| sleep(count, stream))?;
    println!("moves: {moves}");
    println!("sleeps: {}", u64::try_from(threads)? * count);
    Ok(())
}

/// Runs `rounds` rounds, each of which begins when a line arrives on stdin. In a round, `threads` threads take
/// `count` naps of ten milliseconds each, and before each of them one of zero length. For each such pair, in
/// the order of its thread's naps, prints `nap: THREAD NS PIT SLEPT NS PIT SLEPT`.
///
/// `NS` is a duration by the kernel's monotonic clock, and `PIT` one by the interval timer. `PIT` is no less than
/// the time that the kernel's function took, because it includes the time before and after that function. `SLEPT`
/// is the time that the kernel's own probes measured, from just before that function to the end of the sleep in it.
///
/// The threads have a real-time priority, so no other thread takes the processor from a thread that woke. Otherwise
/// these durations could not be compared: kernels that can be preempted anywhere (7.0 and later, by default) would
/// let another thread run on the way out of the function.
///
/// The clock alone cannot be trusted. Where the host's counter is unstable, KVM stops the guest's counter while a
/// virtual CPU waits for a processor. The clock, which is derived from the guest's counter, stops too, and stands
/// still after it has run ahead.
pub(crate) fn naps(threads: usize, count: usize, rounds: usize) -> Result<(), Box<dyn Error>> {
    let (calls, pit) = (OwnCalls::trace(BEFORE, SLEEP)?, Pit::start()?);
    for round in 0..rounds {
        println!("ready: {round}");
        io::stdin().read_line(&mut String::new())?;
        let naps = timed_naps(threads, count, sys::keep_processor, || pit.count())?;
        let mut slept = calls.take()?;
        for Nap {
            thread,
            none: [none, none_pit],
            nap: [nap, nap_pit],
        } in naps
        {
            let mut slept = || slept.get_mut(&thread)?.pop_front();
            let (Some(none_slept), Some(slept)) = (slept(), slept()) else {
                return Err(format!("the kernel's trace lacks sleeps of thread {thread}").into());
            };
            let durations = [none, none_pit, none_slept, nap, nap_pit, slept];
            let durations = durations.map(|duration| format!(" {}", duration.as_nanos()));
            println!("nap: {thread}{}", durations.concat());
        }
        println!("over: {round}");
    }
    Ok(())
}

/// Durations of two calls of a thread, each by the clock and by the interval timer.
struct Nap {
    thread: i32,
    none: [Duration; 2],
    nap: [Duration; 2],
}

fn timed_naps(
    threads: usize,
    count: usize,
    begin: impl Fn() -> io::Result<()> + Sync,
    timer: impl Fn() -> u16 + Sync,
) -> io::Result<Vec<Nap>> {
    let timed = |ns| {
        let (since, before) = (Instant::now(), timer());
        sys::nanosleep(ns)?;
        Ok::<_, io::Error>([since.elapsed(), pit::between(before, timer())])
    };
    let nap = || {
        Ok(Nap {
            thread: sys::thread_id(),
            none: timed(0)?,
            nap: timed(NAP)?,
        })
    };
    let (naps, _) = moved(threads, |_| {
        begin()?;
        (0..count).map(|_| nap()).collect::<io::Result<Vec<_>>>()
    })?;
    Ok(naps.into_iter().flatten().collect())
}

/// Runs `work` in `threads` threads, with the number of each as its argument, while they are moved from CPU to CPU.
/// Returns the results, and the number of moves.
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

/// Moves the threads from CPU to CPU until all have ended; returns the number of moves.
fn keep_moving(threads: &[AtomicI32], cpus: usize, left: &AtomicUsize) -> u64 {
    let mut moves = 0;
    let mut cpu = 0;
    while left.load(Ordering::Acquire) > 0 {
        for thread in threads {
            cpu = (cpu + 1) % cpus;
            let id = thread.load(Ordering::Acquire);
            // A thread that has ended cannot be moved.
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
        assert_eq!(super::timed_naps(2, 3, || Ok(()), || 0).unwrap().len(), 6);
    }
}
