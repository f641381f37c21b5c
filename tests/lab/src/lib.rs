//! What the benchmarks that run inside a rig share ([`measure`]), and what tests compare documents
//! with ([`documented`]).

pub mod documented;
pub mod measure;
