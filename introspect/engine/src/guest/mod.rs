//! Facts about the guest besides its text: its own kprobes, the identity of its kernel, and the kernel functions
//! that detours call.

pub(crate) mod banner;
pub(crate) mod kernel;
pub(crate) mod kprobes;
pub(crate) mod mutex;
pub(crate) mod per_cpu;
pub(crate) mod readers;
