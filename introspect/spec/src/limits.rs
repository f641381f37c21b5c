//! Limits of what one probe may request.

use std::time::Duration;

/// Maximum number of captured bytes in an event: memory, stack words and, for a return probe, its private data.
pub const CAPTURE_MAX: usize = 248;
/// Maximum number of items that one probe captures: those at the entry and those at the return together.
pub const ITEMS_MAX: usize = 32;
/// Maximum number of addresses of one stack.
pub const FRAMES_MAX: usize = 31;
/// Maximum number of pointers that are followed for one item, as in the kernel (`FETCH_INSN_MAX` in
/// kernel/trace/trace_probe.h).
pub const POINTERS_MAX: usize = 16;
/// Maximum number of changes in a list of changes, and maximum number of conditions of a probe.
pub const CHANGES_MAX: usize = 32;
/// Maximum time that a hit may wait for a client.
pub const DEADLINE_MAX: Duration = Duration::from_secs(60);
