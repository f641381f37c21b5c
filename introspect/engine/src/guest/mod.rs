//! What the engine has to know of the guest beside its text: its own kprobes, which kernel it runs, and
//! what of that kernel detours call.

pub(crate) mod banner;
pub(crate) mod kernel;
pub(crate) mod kprobes;
pub(crate) mod mutex;
pub(crate) mod per_cpu;
pub(crate) mod readers;
