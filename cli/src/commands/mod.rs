//! The commands: each file has the function that `main` calls, and a folder of its name has the parts that only
//! it needs. No other folder knows them.

pub(crate) mod decide;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod probe;
pub(crate) mod run;
#[cfg(feature = "vmm")]
pub(crate) mod serve;
pub(crate) mod sources;
pub(crate) mod syms;
pub(crate) mod trace;
pub(crate) mod types;
pub(crate) mod unpack;
pub(crate) mod vm;
