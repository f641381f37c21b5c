//! Threads that sleep in `nanosleep` while another moves them from CPU to CPU.
//!
//! `__x64_sys_nanosleep` and `hrtimer_nanosleep` are entered once per sleep, and most of these
//! sleeps end on another CPU than they began on.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;

use crate::rng::Rng;
use crate::sys;

/// `threads` threads sleep `count` times each.
pub(crate) fn run(threads: usize, count: u64) -> Result<(), Box<dyn Error>> {
    let cpus = sys::available_cpus()?;
    let left = AtomicUsize::new(threads);
    let ids: Vec<AtomicI32> = (0..threads).map(|_| AtomicI32::new(0)).collect();
    let moves = thread::scope(|scope| {
        let sleepers: Vec<_> = ids
            .iter()
            .zip(0..)
            .map(|(id, stream)| {
                let left = &left;
                scope.spawn(move || {
                    id.store(sys::thread_id(), Ordering::Release);
                    let slept = sleep(count, stream);
                    left.fetch_sub(1, Ordering::Release);
                    slept
                })
            })
            .collect();
        let moves = keep_moving(&ids, cpus, &left);
        for sleeper in sleepers {
            sleeper
                .join()
                .map_err(|_| io::Error::other("a sleeping thread panicked"))??;
        }
        io::Result::Ok(moves)
    })?;
    println!("moves: {moves}");
    println!("sleeps: {}", u64::try_from(threads)? * count);
    Ok(())
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
    }
}
