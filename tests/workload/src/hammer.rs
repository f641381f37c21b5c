//! Many threads that call `getpgid` at once, each pinned to a CPU.
//!
//! Every thread counts its own calls, and the total is computed after all threads have ended. So the printed number
//! is exact.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::calls::Call;
use crate::sys;

/// Makes calls in `threads` threads for `seconds` seconds, and prints the total.
pub(crate) fn for_seconds(seconds: u64, threads: usize) -> Result<(), Box<dyn Error>> {
    hammer(threads, || {
        thread::sleep(Duration::from_secs(seconds));
        Ok(())
    })
}

/// Makes calls in `threads` threads until stdin has a line or ends, and prints the total.
pub(crate) fn until_input(threads: usize) -> Result<(), Box<dyn Error>> {
    println!("ready");
    hammer(threads, || {
        io::stdin().read_line(&mut String::new()).map(drop)
    })
}

/// Makes calls in `threads` threads while `wait` waits, and prints the total.
pub(crate) fn hammer(
    threads: usize,
    wait: impl FnOnce() -> io::Result<()>,
) -> Result<(), Box<dyn Error>> {
    let cpus = sys::available_cpus()?;
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

/// Makes calls until `stop` is set; returns the number of calls made.
fn call_until(stop: &AtomicBool, cpu: usize) -> io::Result<u64> {
    sys::pin(0, cpu)?;
    let mut calls = 0;
    while !stop.load(Ordering::Relaxed) {
        Call::Getpgid.make()?;
        calls += 1;
    }
    Ok(calls)
}
