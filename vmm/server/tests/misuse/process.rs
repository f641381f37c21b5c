//! Resources that this process takes.

use std::fs;
use std::time::{Duration, Instant};

/// How long it may take until released resources are gone.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the process has to stay unchanged to count as settled.
const QUIET: Duration = Duration::from_secs(2);

/// Resources of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub threads: u64,
    pub descriptors: u64,
    /// Allocated bytes. Resident memory says nothing: the allocator keeps tens of megabytes of threads that
    /// have ended.
    pub memory: u64,
}

/// Returns the bytes that were allocated and not freed, in every arena (mallinfo(3)).
fn allocated() -> u64 {
    // SAFETY: the function takes nothing and returns numbers; it reads the arenas under their locks.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as u64
}

impl Size {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.unwrap().split_whitespace().next().unwrap();
            number.parse().unwrap()
        };
        Self {
            threads: field("Threads:"),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count() as u64,
            memory: allocated(),
        }
    }

    pub(crate) fn is_within(&self, bound: &Self) -> bool {
        self.threads <= bound.threads
            && self.descriptors <= bound.descriptors
            && self.memory <= bound.memory
    }

    /// Waits until the resources are within `bound` or, without a bound, until threads and descriptors stay the
    /// same for [`QUIET`]; at most for [`PATIENCE`]. Returns the resources.
    pub(crate) async fn settled(bound: Option<&Self>) -> Self {
        let begun = Instant::now();
        let (mut last, mut since) = (Self::now(), Instant::now());
        loop {
            let now = Self::now();
            let is_same = (now.threads, now.descriptors) == (last.threads, last.descriptors);
            let is_settled = match bound {
                Some(bound) => now.is_within(bound),
                None => is_same && since.elapsed() >= QUIET,
            };
            if is_settled || begun.elapsed() >= PATIENCE {
                return now;
            }
            if !is_same {
                (last, since) = (now, Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
