//! What the engine has to know of the guest beside its text: its own kprobes, and which kernel it runs.

pub(crate) mod banner;
pub(crate) mod kernel;
pub(crate) mod kprobes;
