//! Resources in use by the process, which contains the server and its clients.

use std::fs;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::sessions::LONG;

/// Permitted growth of the bytes in use until the end. 8 MiB of them are events held for clients that reconnect.
const MORE_MEMORY: usize = 12 << 20;
/// Permitted growth of the number of threads until the end.
const MORE_THREADS: usize = 8;

/// Resources in use at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    bytes: usize,
    threads: usize,
}

impl Used {
    /// Returns the current use.
    pub(crate) fn now() -> Self {
        Self {
            bytes: heap(),
            threads: threads(),
        }
    }

    /// Waits until the use exceeds `self` by at most the permitted growth. The use falls by itself, because idle
    /// threads end after a while.
    pub(crate) async fn come_back(self) {
        let since = Instant::now();
        let mut now = Self::now();
        while now.threads > self.threads + MORE_THREADS || now.bytes > self.bytes + MORE_MEMORY {
            assert!(since.elapsed() < LONG, "{now:?}; before: {self:?}");
            sleep(Duration::from_millis(100)).await;
            now = Self::now();
        }
        eprintln!("{self:?}, then {now:?}");
    }
}

/// Returns the number of bytes in use on the heap, for all threads together.
fn heap() -> usize {
    // SAFETY: it only reads the allocator's own counters, and takes its locks for that.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Returns the number of threads.
pub(crate) fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}
