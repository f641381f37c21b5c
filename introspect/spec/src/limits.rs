//! How much one probe may ask for.

use std::time::Duration;

/// The most bytes one event carries of what was captured: memory, stack words and, for a return
/// probe, its private data.
pub const CAPTURE_MAX: usize = 248;
/// The most items one capture has.
pub const ITEMS_MAX: usize = 32;
/// The most addresses of one stack.
pub const FRAMES_MAX: usize = 31;
/// The most pointers that are followed for one item, as in the kernel (`FETCH_INSN_MAX` in
/// kernel/trace/trace_probe.h).
pub const POINTERS_MAX: usize = 16;
/// The most changes, and the most conditions, of one probe.
pub const CHANGES_MAX: usize = 32;
/// The longest a hit may wait for a client.
pub const DEADLINE_MAX: Duration = Duration::from_secs(60);
