//! What the user typed, made into requests: probes as the kernel and as `perf probe` define them, files of them,
//! and the guest to boot. It reads local files only, and knows no server.

pub(crate) mod cache;
pub(crate) mod debug_info;
pub(crate) mod events_file;
pub(crate) mod guest;
pub(crate) mod perf_probe;
pub(crate) mod probes;
