//! Many threads calling `getpgid` at once, each on its own CPU.
//!
//! Every thread counts its own calls; the total is summed after all have ended, so the number
//! printed is exact whenever the stop request came.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::calls::Call;

/// Hammers for `seconds` in `threads` threads and prints the total.
pub(crate) fn for_seconds(seconds: u64, threads: usize) -> Result<(), Box<dyn Error>> {
    hammer(threads, || {
        thread::sleep(Duration::from_secs(seconds));
        Ok(())
    })
}

/// Hammers in `threads` threads until stdin has a line or ends, and prints the total.
pub(crate) fn until_input(threads: usize) -> Result<(), Box<dyn Error>> {
    println!("ready");
    hammer(threads, || {
        io::stdin().read_line(&mut String::new()).map(drop)
    })
}

/// The number of CPUs this process may run on.
pub(crate) fn available_cpus() -> io::Result<usize> {
    thread::available_parallelism().map(usize::from)
}

fn hammer(threads: usize, wait: impl FnOnce() -> io::Result<()>) -> Result<(), Box<dyn Error>> {
    let cpus = available_cpus()?;
    let stop = AtomicBool::new(false);
    let total = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|index| {
                let stop = &stop;
                scope.spawn(move || call_until(stop, index % cpus))
            })
            .collect();
        let waited = wait();
        stop.store(true, Ordering::Relaxed);
        let mut total = 0;
        for worker in workers {
            total += worker
                .join()
                .map_err(|_| io::Error::other("a hammering thread panicked"))??;
        }
        waited.map(|()| total)
    })?;
    println!("calls: {total}");
    Ok(())
}

/// Calls until told to stop; returns the number of calls made.
fn call_until(stop: &AtomicBool, cpu: usize) -> io::Result<u64> {
    pin_to(cpu)?;
    let mut calls = 0;
    while !stop.load(Ordering::Relaxed) {
        Call::Getpgid.make()?;
        calls += 1;
    }
    Ok(calls)
}

fn pin_to(cpu: usize) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours; CPU_SET checks the index against the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the pointer and the size describe `set`.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
