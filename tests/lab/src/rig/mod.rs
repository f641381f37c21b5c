//! The machines that a job runs on.

mod bochs;
mod console;
mod direct;
mod emulated;
mod image;
mod start;
mod tcg;

pub(crate) use start::run;
