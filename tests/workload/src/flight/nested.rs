//! A kernel function that calls itself: `ep_loop_check_proc`.
//!
//! When an epoll instance is to watch another one, the kernel follows the chain of instances that the other one
//! already watches, one recursion for each (`fs/eventpoll.c`, `ep_loop_check`). It allows at most five instances in
//! a chain.

use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};

use crate::sys;

/// Number of instances in the longest chain in front of which another instance may be put.
const LONGEST: usize = 4;

/// Builds a chain of `depth` instances, and puts another instance in front of it `count` times. Prints how often
/// the kernel entered `ep_loop_check_proc`.
pub(crate) fn run(depth: usize, count: u64) -> Result<(), Box<dyn Error>> {
    if !(1..=LONGEST).contains(&depth) {
        return Err(format!("a chain is 1 to {LONGEST} instances long").into());
    }
    let mut entries = 0;
    let mut chain: Vec<OwnedFd> = Vec::new();
    for length in 0..depth {
        let front = sys::epoll()?;
        if let Some(next) = chain.last() {
            sys::epoll_add(front.as_fd(), next.as_fd(), libc::EPOLLIN)?;
        }
        entries += u64::try_from(length)?;
        chain.push(front);
    }
    let next = chain.last().ok_or("no chain")?;
    for _ in 0..count {
        let front = sys::epoll()?;
        sys::epoll_add(front.as_fd(), next.as_fd(), libc::EPOLLIN)?;
        entries += u64::try_from(depth)?;
    }
    println!("ep_loop_check_proc: {entries}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_chain_is_allowed_and_no_longer_one() {
        run(LONGEST, 3).unwrap();
        assert!(run(LONGEST + 1, 1).is_err());
    }
}
