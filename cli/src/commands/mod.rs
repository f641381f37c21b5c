//! The commands. Each file has the function that `main` calls, and a folder with the same name has the parts that
//! only this command needs. No other folder uses the commands.

pub(crate) mod decide;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod image;
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
