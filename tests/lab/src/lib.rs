//! What the benchmarks that run inside a rig share. The `lab` program itself uses nothing of it.

pub mod measure;
