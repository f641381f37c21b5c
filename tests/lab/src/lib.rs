//! What the programs and tests of this package share: measuring for the benchmarks that run inside a rig
//! ([`measure`]), reading documents for the tests that compare them with programs ([`documented`]), and the table
//! of what was verified where ([`verified`]).

pub mod documented;
pub mod measure;
pub mod verified;
