//! Conversion of what the user typed into requests: probes in the syntax of the kernel and of `perf probe`, files
//! of definitions, and the guest to boot. It reads local files only, and knows no server.

pub(crate) mod cache;
pub(crate) mod debug_info;
pub(crate) mod events_file;
pub(crate) mod guest;
pub(crate) mod kernels;
pub(crate) mod perf_probe;
pub(crate) mod probes;
