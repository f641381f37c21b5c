//! Resources in use by the process, which contains the server and its clients.

use std::fs;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::sessions::LONG;

/// Permitted growth until the end: bytes in use, of which 8 MiB are events held for clients that reconnect, and
/// threads.
const MORE_MEMORY: usize = 12 << 20;
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

    /// Waits until use has fallen to at most the permitted growth above `self`: idle threads end after a while.
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

/// Returns the bytes in use of the heap, of all threads together.
fn heap() -> usize {
    // SAFETY: it only reads the allocator's own counters, and takes its locks for that.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Returns the number of threads.
pub(crate) fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}
