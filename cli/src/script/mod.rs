//! `-e` and `--script`: actions at hits in the language of bpftrace. It reads scripts and carries them out; it
//! plants no probes.

mod maps;
mod printf;
mod printing;
mod running;
mod source;

pub(crate) use running::Running;
pub(crate) use source::Script;
