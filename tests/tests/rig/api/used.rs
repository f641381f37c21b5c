//! What the process has in use, in which the server and its clients are.

use std::fs;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::sessions::LONG;

/// What the process may have more of at the end: bytes in use, of which 8 MiB are events that are held for
/// clients that come back, and threads.
const MORE_MEMORY: usize = 12 << 20;
const MORE_THREADS: usize = 8;

/// What is in use at a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    bytes: usize,
    threads: usize,
}

impl Used {
    /// At this moment.
    pub(crate) fn now() -> Self {
        Self {
            bytes: heap(),
            threads: threads(),
        }
    }

    /// Waits until not much more is in use: threads that have nothing to do end after a while.
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

/// Bytes in use of the heap, all threads together.
fn heap() -> usize {
    // SAFETY: it only reads the allocator's own counters, and takes its locks for that.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// How many threads there are.
pub(crate) fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}
